"""The Transformer of "Attention Is All You Need" as a Hugging Face model.

Importing this package registers it with the Auto classes, and does nothing else.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

from .configuration_vanilla_trm import PARAMETER_SHARING_MODES, VanillaTrmConfig, arrangement_of, describe_sharing
from .conversion import from_marian, load_torch_weights, to_marian
from .ctranslate2_export import export_ctranslate2, vocabularies_of
from .decoding import BeamSearchOptions, DecodingOptions, Hypothesis, SamplingOptions
from .generation import custom_generate, saved_options
from .modeling_vanilla_trm import (
    VanillaTrmDecoder,
    VanillaTrmEncoder,
    VanillaTrmEncoderModel,
    VanillaTrmForConditionalGeneration,
    VanillaTrmForSequenceClassification,
    VanillaTrmModel,
    VanillaTrmPreTrainedModel,
)
from .onnx_export import OnnxTranslator, export_onnx, export_programs
from .quantization import quantize
from .sharing import share_parameters, unshare_parameters
from .translation import BATCH_TOKENS, WINDOW, Translation, search_by_length, translate_by_length, translate_stream

if VanillaTrmConfig.model_type in CONFIG_MAPPING_NAMES:
    raise ValueError(
        f"'{VanillaTrmConfig.model_type}' is already used by a Transformers config: this version of transformers has a "
        "model of that type, and hf_vanilla_trm must not take its place"
    )
# exist_ok: the package may be imported anew, and its newest classes count. AutoModel takes the class that a saved
# folder names, and the first where none is named.
AutoConfig.register("vanilla_trm", VanillaTrmConfig, exist_ok=True)
AutoModel.register(VanillaTrmConfig, (VanillaTrmModel, VanillaTrmEncoderModel), exist_ok=True)
AutoModelForSeq2SeqLM.register(VanillaTrmConfig, VanillaTrmForConditionalGeneration, exist_ok=True)
AutoModelForTextEncoding.register(VanillaTrmConfig, VanillaTrmEncoderModel, exist_ok=True)
AutoModelForSequenceClassification.register(VanillaTrmConfig, VanillaTrmForSequenceClassification, exist_ok=True)

__version__ = "0.1.0"

__all__ = [
    "BATCH_TOKENS",
    "PARAMETER_SHARING_MODES",
    "WINDOW",
    "BeamSearchOptions",
    "DecodingOptions",
    "Hypothesis",
    "OnnxTranslator",
    "SamplingOptions",
    "Translation",
    "VanillaTrmConfig",
    "VanillaTrmDecoder",
    "VanillaTrmEncoder",
    "VanillaTrmEncoderModel",
    "VanillaTrmForConditionalGeneration",
    "VanillaTrmForSequenceClassification",
    "VanillaTrmModel",
    "VanillaTrmPreTrainedModel",
    "arrangement_of",
    "custom_generate",
    "describe_sharing",
    "export_ctranslate2",
    "export_onnx",
    "export_programs",
    "from_marian",
    "load_torch_weights",
    "quantize",
    "saved_options",
    "search_by_length",
    "share_parameters",
    "to_marian",
    "translate_by_length",
    "translate_stream",
    "unshare_parameters",
    "vocabularies_of",
]
