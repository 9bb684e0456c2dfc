"""transformers' own tests of its models, on ours."""

import unittest
from unittest import mock

import pytest
from transformers import AutoModelForTextEncoding

from tests.conformance import archive

archive.load()

from transformers_tests import test_modeling_common  # noqa: E402
from transformers_tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from transformers_tests.test_configuration_common import ConfigTester  # noqa: E402
from transformers_tests.test_fsdp_mixin import FSDPTesterMixin  # noqa: E402
from transformers_tests.test_modeling_common import ModelTesterMixin  # noqa: E402
from transformers_tests.test_tensor_parallel_mixin import TensorParallelTesterMixin  # noqa: E402
from transformers_tests.test_training_mixin import TrainingTesterMixin  # noqa: E402

from hf_vanilla_trm import (  # noqa: E402
    VanillaTrmConfig,
    VanillaTrmEncoderModel,
    VanillaTrmForConditionalGeneration,
    VanillaTrmForSequenceClassification,
    VanillaTrmModel,
)
from tests.conformance import variants  # noqa: E402
from tests.conformance.testers import ContinuesItsPrompt, EncoderOnlyTester, ModelTester  # noqa: E402


class CommonTests(ModelTesterMixin):
    """The common tests, with what one of them needs."""

    def test_model_forward_default_config_values(self):
        # It gives every special token the id 0, and that PAD is not EOS is a rule of ours.
        with mock.patch.object(VanillaTrmConfig, "validate_special_tokens"):
            super().test_model_forward_default_config_values()


class Models(CommonTests, GenerationTesterMixin):
    """The common tests of the encoder-decoder."""

    all_model_classes = (VanillaTrmModel, VanillaTrmForConditionalGeneration)
    is_encoder_decoder = True
    test_can_init_all_missing_weights_before_2023 = True  # by its lack of a copyright line our config looks old
    changes = {}  # noqa: RUF012

    def setUp(self):
        self.model_tester = ModelTester(self, **self.changes)
        self.has_one_depth = self.model_tester.num_hidden_layers == self.model_tester.decoder_layers

    def test_attention_outputs(self):
        if not self.has_one_depth:
            self.skipTest("counts one depth for both stacks")
        super().test_attention_outputs()

    def test_hidden_states_output(self):
        if not self.has_one_depth:
            self.skipTest("counts one depth for both stacks")
        super().test_hidden_states_output()

    def test_inputs_embeds_matches_input_ids(self):
        if not self.model_tester.get_config().share_encoder_decoder_embeddings:
            self.skipTest("embeds the target with the source's embedding")
        super().test_inputs_embeds_matches_input_ids()

    def test_resize_embeddings_untied(self):
        if not self.model_tester.get_config().share_encoder_decoder_embeddings:
            self.skipTest("resizes the source's vocabulary and expects the target's to follow")
        super().test_resize_embeddings_untied()


class Parallel(TrainingTesterMixin, TensorParallelTesterMixin, FSDPTesterMixin):
    """Training, and two processes against one: without dropout, whose randomness would differ between them."""

    all_model_classes = (VanillaTrmModel, VanillaTrmForConditionalGeneration)
    model_tester = None
    training_overfit_learning_rate = 3e-3  # at 1e-3 our small first weights leave the gradient at 12 % of its start
    changes = {}  # noqa: RUF012

    def setUp(self):
        # The training test prompts with the token 1.
        tokens = {"pad_token_id": 98, "decoder_start_token_id": 1}
        self.model_tester = ModelTester(self, **self.changes, **tokens, dropout=0.0, attention_dropout=0.0)

    def _get_tiny_config(self):
        config_class, fields = super()._get_tiny_config()
        # A ReLU that hardly a token passes has a gradient of rounding errors, which Adam makes as large as any other.
        return config_class, fields | {"decoder_vocab_size": fields["vocab_size"], "activation_function": "gelu"}

    def _get_trainable_model_class(self):
        return ContinuesItsPrompt


for row in variants.ROWS:
    name = "".join(map(str.title, row))
    for mixin in (Models, Parallel):
        body = {"changes": variants.changes_of(row), "__module__": __name__}
        test_class = type(f"Test{mixin.__name__}{name}", (mixin, unittest.TestCase), body)
        globals()[test_class.__name__] = pytest.mark.slow(test_class)
del mixin, test_class


@pytest.mark.slow
class TestEncoderOnly(CommonTests, unittest.TestCase):
    """The common tests of the encoder by itself, and of the classifier."""

    all_model_classes = (VanillaTrmEncoderModel, VanillaTrmForSequenceClassification)
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = EncoderOnlyTester(self)

    def test_load_with_mismatched_shapes(self):
        # AutoModel makes a translation model of a classifier's folder; its encoder has an Auto class of its own.
        with mock.patch.object(test_modeling_common, "AutoModel", AutoModelForTextEncoding):
            super().test_load_with_mismatched_shapes()


class TestConfig(unittest.TestCase):
    def test_config(self):
        self.model_tester = ModelTester(self)
        ConfigTester(self, config_class=VanillaTrmConfig, d_model=32).run_common_tests()
