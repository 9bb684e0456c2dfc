"""int8 for decoding on a CPU, by torchao (`pip install 'hf_vanilla_trm[export]'`)."""

import copy
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)
KINDS = ("int8_weights", "int8_dynamic")


def quantize(model: Model, kind: str) -> Model:
    """Return a copy whose linear maps have weights in int8, with a scale for each output feature.

    Embeddings and norms stay as they are; an output projection that is also the embedding becomes a matrix of its own.
    The copy is for decoding: `search`, `translate` and `generate` work as before, and training does not. It is not made
    to be saved: save the model, and quantise what is loaded.

    Args:
        model: In evaluation mode. Of the two kinds, "int8_weights" is meant for bfloat16.
        kind: "int8_weights" multiplies in the model's precision by weights that are converted at each call, which saves
            memory. "int8_dynamic" also brings the inputs of each call to int8, with a scale for each row.

    Raises:
        ImportError: torchao is not installed.
        ValueError: The kind is another, or the model is in training mode.
    """
    if kind not in KINDS:
        raise ValueError(f"kind ({kind!r}) must be one of {', '.join(KINDS)}")
    if model.training:
        raise ValueError("the model is in training mode: call eval() before it is quantised")
    torchao = _torchao()
    config = torchao.Int8WeightOnlyConfig if kind == "int8_weights" else torchao.Int8DynamicActivationInt8WeightConfig
    copied = copy.deepcopy(model)
    torchao.quantize_(copied, config())
    return copied


def _torchao() -> Any:
    try:
        import torchao.quantization
    except ImportError as error:
        raise ImportError(f"torchao is needed to quantise: pip install 'hf_vanilla_trm[export]' ({error})") from error
    return torchao.quantization
