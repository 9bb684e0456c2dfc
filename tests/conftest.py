"""Fixtures and settings for all tests: no network, one thread, tiny models."""

import logging
import os
import tempfile

# Before anything imports huggingface_hub, which reads them once.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home_")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_EVALUATE_OFFLINE"] = "1"

import pytest
import torch
import transformers

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration

torch.set_num_threads(1)

# Files of the package that do not travel with a saved model: to convert or export it, one has the package.
STAYS_BEHIND = {
    "__init__.py",
    "conversion.py",
    "ctranslate2_export.py",
    "onnx_export.py",
    "quantization.py",
    "sharing.py",
}


def tiny_config(**changes):
    """2+2 layers and sizes that all differ; no dropout."""
    sizes = {
        "vocab_size": 20,
        "d_model": 16,
        "d_ff": 24,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_attention_heads": 2,
        "dropout": 0.0,
        "max_position_embeddings": 40,
    }
    return VanillaTrmConfig(**(sizes | changes))


def spread_weights(model, std=0.3, seed=0):
    """Draw every parameter from N(0, std), the gains of norms from N(1, std).

    At the usual small initialisation different models look alike.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + 1 if name.endswith("layer_norm.weight") else noise)
    return model


def tiny_model(seed=0, **changes):
    return spread_weights(VanillaTrmForConditionalGeneration(tiny_config(**changes)), seed=seed).eval()


class RefuseDeprecations(logging.Handler):
    """transformers logs some of its deprecations instead of warning of them."""

    def emit(self, record):
        if "deprecated" in record.getMessage():
            raise DeprecationWarning(record.getMessage())


@pytest.fixture(autouse=True)
def refuse_deprecations():
    """What transformers will take away must not be used; the settings of pytest do the same with warnings."""
    handler = RefuseDeprecations()
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.fixture
def four_threads():
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def batch():
    """Three sources of 7, 4 and 6 tokens and three targets of 5, 2 and 4, padded with 1 and -100."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 20, (3, 7), generator=generator)
    labels = torch.randint(3, 20, (3, 5), generator=generator)
    attention_mask = torch.ones(3, 7, dtype=torch.long)
    for row, (source_length, target_length) in enumerate(((7, 5), (4, 2), (6, 4))):
        input_ids[row, source_length - 1] = labels[row, target_length - 1] = 2
        input_ids[row, source_length:] = 1
        attention_mask[row, source_length:] = 0
        labels[row, target_length:] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
