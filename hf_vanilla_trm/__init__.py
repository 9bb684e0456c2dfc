"""The Transformer of "Attention Is All You Need" as a Hugging Face model.

Importing this package registers it with the Auto classes, and does nothing else.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .configuration_vanilla_trm import VanillaTrmConfig
from .modeling_vanilla_trm import (
    VanillaTrmForConditionalGeneration,
    VanillaTrmModel,
    VanillaTrmPreTrainedModel,
)

# exist_ok: importing the package twice registers the same names again; model_type itself collides with nothing built
# in.
AutoConfig.register("vanilla_trm", VanillaTrmConfig, exist_ok=True)
AutoModel.register(VanillaTrmConfig, VanillaTrmModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VanillaTrmConfig, VanillaTrmForConditionalGeneration, exist_ok=True)

__version__ = "0.1.0"

__all__ = [
    "VanillaTrmConfig",
    "VanillaTrmForConditionalGeneration",
    "VanillaTrmModel",
    "VanillaTrmPreTrainedModel",
]
