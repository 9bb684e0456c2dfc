"""A model and its tokenizer as a folder for CTranslate2 (`pip install 'hf_vanilla_trm[export]'`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import MarianMTModel

from .conversion import to_marian
from .generation import forbidden_tokens

IMPOSSIBLE = -1e9
"""Added to the logit of a token that is never generated; in float16 it is minus infinity, to the same effect."""


def export_ctranslate2(
    model: Any,
    tokenizer: Any,
    folder: Path | str,
    *,
    quantization: str = "float32",
    max_position_embeddings: int | None = None,
) -> None:
    """Write a folder that `ctranslate2.Translator` and `AutoTokenizer` load.

    CTranslate2 takes and gives tokens as strings, those of `tokenizer.convert_ids_to_tokens`, EOS included in a source
    (of a `MarianTokenizer` with two vocabularies that function knows the target's; `tokenize` gives a source's). It
    begins a translation with the start token of the model's config, and never generates what the generation config
    has in `bad_words_ids`. Its length penalty is a power of the length.

    Args:
        model: A `VanillaTrmForConditionalGeneration` that MarianMT can be (`to_marian`), or a `MarianMTModel`.
        tokenizer: The model's own.
        folder: Is made; files of an earlier export are replaced.
        quantization: A type of CTranslate2's weights, as "float32", "int8", "int8_float32", "int16" or "float16".
        max_position_embeddings: The longest source or translation; by default that of the model's config, and always
            for a `MarianMTModel`.

    Raises:
        ImportError: CTranslate2 is not installed.
        ValueError: As `to_marian`; CTranslate2 has not the activation or the quantization; or the tokenizer has more
            tokens than the model.
    """
    check_quantization(quantization)
    marian = model
    if not isinstance(model, MarianMTModel):
        marian = to_marian(model, max_position_embeddings=max_position_embeddings)
    config = marian.config
    source, target = vocabularies_of(tokenizer, config)
    spec = _spec_of(marian, forbidden_tokens(marian.generation_config), source, target)
    unknown = getattr(tokenizer, "unk_token", None)
    if unknown in source:
        spec.config.unk_token = unknown
    spec.validate()
    spec.optimize(quantization=quantization)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    tokenizer.save_pretrained(folder)


def check_quantization(quantization: str) -> None:
    """Refuse a type of weights that CTranslate2 has not.

    Raises:
        ImportError: CTranslate2 is not installed.
        ValueError: As above; the message has those it has.
    """
    kinds = _ctranslate2().specs.model_spec.ACCEPTED_MODEL_TYPES
    if quantization not in kinds:
        raise ValueError(f"quantization ({quantization!r}) must be one of {', '.join(kinds)}")


def _ctranslate2() -> Any:
    try:
        import ctranslate2.converters.transformers
    except ImportError as error:
        raise ImportError(
            f"CTranslate2 is needed to export to it: pip install 'hf_vanilla_trm[export]' ({error})"
        ) from error
    return ctranslate2


def vocabularies_of(tokenizer: Any, config: Any) -> tuple[list[str], list[str]]:
    """The tokens of source and target by id, which are the same list where there is one vocabulary.

    Args:
        tokenizer: A `MarianTokenizer` with separate vocabularies has two of them.
        config: Of the model, whose vocabularies may be larger: ids without a token get a name.

    Raises:
        ValueError: The tokenizer has more tokens than the model, or has one twice.
    """
    if not getattr(tokenizer, "separate_vocabs", False):
        both = _by_id(tokenizer.get_vocab(), config.vocab_size)
        target = (
            both
            if config.decoder_vocab_size == config.vocab_size
            else _by_id(tokenizer.get_vocab(), config.decoder_vocab_size)
        )
        return both, target
    return _by_id(tokenizer.encoder, config.vocab_size), _by_id(tokenizer.target_encoder, config.decoder_vocab_size)


def _by_id(numbers: dict[str, int], size: int) -> list[str]:
    if max(numbers.values()) >= size:
        raise ValueError(f"the tokenizer has ids up to {max(numbers.values())}, and the model a vocabulary of {size}")
    if len(set(numbers.values())) != len(numbers):
        raise ValueError("the tokenizer has one id for several tokens")
    vocabulary = [f"<unused {number}>" for number in range(size)]
    for token, number in numbers.items():
        vocabulary[number] = token
    return vocabulary


@torch.no_grad()
def _spec_of(marian: MarianMTModel, forbidden: Sequence[int], source: list[str], target: list[str]) -> Any:
    """CTranslate2's description of a model, with its weights, which are copies: quantising scales them in place.

    CTranslate2's own converter of MarianMT takes every such model to begin with a vector of zeros and to have the pad
    token last, as the published ones; that of BART, of the same layout, does not.
    """
    converters = _ctranslate2().converters.transformers
    from ctranslate2.specs import TransformerSpec

    config: Any = marian.config
    activation = converters._SUPPORTED_ACTIVATIONS.get(config.activation_function)
    if activation is None:
        raise ValueError(f"activation_function ({config.activation_function!r}) is none that CTranslate2 has")
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.encoder_attention_heads,
        pre_norm=False,
        activation=activation,
    )
    with torch.random.fork_rng(devices=[]):
        copied = MarianMTModel(config)
    copied.load_state_dict(marian.state_dict())
    loader = converters.BartLoader()
    loader.set_encoder(spec.encoder, copied.model.encoder)
    loader.set_decoder(spec.decoder, copied.model.decoder)
    loader.set_linear(spec.decoder.projection, copied.lm_head)
    bias = copied.final_logits_bias.squeeze(0)
    bias[list(forbidden)] = IMPOSSIBLE
    if bias.any():
        spec.decoder.projection.bias = bias
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.config.eos_token = target[config.eos_token_id]
    spec.config.decoder_start_token = spec.config.bos_token = target[config.decoder_start_token_id]
    spec.config.unk_token = source[config.pad_token_id]  # must be one of the vocabulary, though none be unknown
    return spec
