"""What transformers' common tests ask of a model: a tiny config, inputs, and which classes to try."""

import torch
from transformers import set_seed

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration

PAD, START = 1, 0


def random_ids(*shape, vocab_size=99):
    """Real tokens only: none is a special one."""
    return torch.randint(3, vocab_size, shape)


class TakesTheSourceForTheTarget(VanillaTrmForConditionalGeneration):
    """For the tensor-parallel tests, which call a model with `input_ids` alone and expect logits for them."""

    def forward(self, input_ids=None, decoder_input_ids=None, labels=None, **kwargs):
        if decoder_input_ids is None and labels is None:
            decoder_input_ids = input_ids
        return super().forward(input_ids=input_ids, decoder_input_ids=decoder_input_ids, labels=labels, **kwargs)


class ContinuesItsPrompt(VanillaTrmForConditionalGeneration):
    """For the training test, which trains and prompts a model as if it were a causal language model: the source is the
    first token, the target the whole sequence.
    """

    def forward(self, input_ids=None, labels=None, **kwargs):
        if labels is None:
            return super().forward(input_ids=input_ids, **kwargs)
        following = torch.cat((labels[:, 1:], labels.new_full((labels.size(0), 1), -100)), dim=1)
        return super().forward(input_ids=input_ids[:, :1], decoder_input_ids=input_ids, labels=following, **kwargs)

    def generate(self, input_ids, **kwargs):
        return super().generate(input_ids[:, :1], decoder_input_ids=input_ids, **kwargs)


class ModelTester:
    """A tiny encoder-decoder."""

    causal_lm_class = TakesTheSourceForTheTarget
    batch_size = 5
    encoder_seq_length = key_length = 7
    seq_length = decoder_seq_length = 9  # the length of labels
    hidden_size = 32
    num_attention_heads = 4
    is_training = True

    def __init__(self, parent, **changes):
        self.parent, self.changes = parent, changes
        config = self.get_config()
        self.num_hidden_layers, self.decoder_layers = config.encoder_layers, config.decoder_layers
        self.vocab_size = config.vocab_size

    def get_config(self):
        sizes = {
            "vocab_size": 99,
            "d_model": self.hidden_size,
            "d_ff": 37,
            "num_attention_heads": self.num_attention_heads,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "max_position_embeddings": 50,
        }
        return VanillaTrmConfig(**(sizes | self.changes))

    def prepare_config_and_inputs_for_common(self):
        set_seed(0)
        source = random_ids(self.batch_size, self.encoder_seq_length)
        target = random_ids(self.batch_size, self.decoder_seq_length)
        inputs = {
            "input_ids": source,
            "attention_mask": torch.ones_like(source),
            "decoder_input_ids": target,
            "decoder_attention_mask": torch.ones_like(target),
        }
        return self.get_config(), inputs


class EncoderOnlyTester(ModelTester):
    """A tiny encoder."""

    causal_lm_class = None
    seq_length = encoder_seq_length = key_length = 7

    def get_config(self):
        config = super().get_config()
        config.is_encoder_decoder = False
        return config

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        return config, {name: inputs[name] for name in ("input_ids", "attention_mask")}
