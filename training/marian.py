"""The same model by others, with the same weights: as a MarianMT of transformers, and as a folder for CTranslate2.

MarianMT is the paper's model too, but for the layout of its positions: all sines first, then all cosines, where the
paper interleaves them. What a model computes does not depend on the order of its d_model features, so that a fixed
permutation of everything that reads or writes them makes one of the other.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import MarianConfig, MarianMTModel

from hf_vanilla_trm import VanillaTrmForConditionalGeneration, unshare_parameters

MARIAN_NAMES = {
    "feed_forward_layer_norm": "final_layer_norm",
    "feed_forward.": "",
    "cross_attn": "encoder_attn",
    "lm_head.bias": "final_logits_bias",
}
"""Parts of our names of parameters, and what Marian calls them."""
WRITES = ("out_proj", "fc2")
"""Linear maps whose output is added to the d_model features; the input of all others is these."""
REQUIRED = {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}
"""What MarianMT has no choice in (or here none), by field of our config."""


def features_in_marians_order(d_model: int) -> torch.Tensor:
    """Which of our features each of Marian's is, `(d_model,)`: those of the sines, then those of the cosines."""
    return torch.cat((torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)))


def check_convertible(model: VanillaTrmForConditionalGeneration) -> None:
    """Refuse a model that MarianMT cannot be.

    Raises:
        ValueError: If the model is of another type, or a field of its config has a value that is not supported; the
            message names both.
    """
    config = model.config
    if config.model_type != "vanilla_trm" or not hasattr(model, "lm_head"):
        raise ValueError(f"a {type(model).__name__} of type {config.model_type} cannot become a MarianMT from here")
    for name, value in REQUIRED.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} ({getattr(config, name)}) must be {value} to become a MarianMT")
    if config.embedding_size not in (None, config.d_model):
        raise ValueError(
            f"embedding_size ({config.embedding_size}) must be d_model ({config.d_model}) to become a MarianMT, which "
            "has no factorised embeddings"
        )
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        if not isinstance(getattr(config, name), int):
            raise ValueError(f"{name} ({getattr(config, name)}) must be one token to become a MarianMT")


def to_marian(
    model: VanillaTrmForConditionalGeneration, *, max_position_embeddings: int | None = None
) -> MarianMTModel:
    """Return a MarianMT with the weights of a model, which gives the same logits.

    Layers that share parameters get copies of them, and projections without a bias one of zeros.

    Args:
        model: One embedding for source, target and output. It is left as it is.
        max_position_embeddings: Rows of the table of positions, beyond which MarianMT reads nothing; those of the
            model's config by default.

    Returns:
        In evaluation mode, of the model's precision and on its device. It begins with the model's own start token.

    Raises:
        ValueError: As `check_convertible`.
    """
    check_convertible(model)
    config = model.config
    with torch.random.fork_rng(devices=[]):  # the first weights, all to be replaced, cost no random numbers
        marian = MarianMTModel(
            MarianConfig(
                vocab_size=config.vocab_size,
                d_model=config.d_model,
                encoder_layers=config.encoder_layers,
                decoder_layers=config.decoder_layers,
                encoder_attention_heads=config.num_attention_heads,
                decoder_attention_heads=config.num_attention_heads,
                encoder_ffn_dim=config.d_ff,
                decoder_ffn_dim=config.d_ff,
                max_position_embeddings=max_position_embeddings or config.max_position_embeddings,
                activation_function=config.activation_function,
                scale_embedding=config.scale_embedding,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                activation_dropout=config.activation_dropout,
                pad_token_id=config.pad_token_id,
                bos_token_id=config.bos_token_id,
                eos_token_id=config.eos_token_id,
                forced_eos_token_id=None,
                decoder_start_token_id=config.decoder_start_token_id,
            )
        )
    marian = marian.to(device=model.device, dtype=model.dtype).eval()
    _fill(marian, model if config.parameter_sharing == "none" else unshare_parameters(model))
    return marian


@torch.no_grad()
def _fill(marian: MarianMTModel, model: VanillaTrmForConditionalGeneration) -> None:
    """Copy all weights of a model without sharing; what Marian has beyond them is biases, which are set to zero."""
    order = features_in_marians_order(model.config.d_model).to(model.device)
    theirs = marian.state_dict()
    unfilled = {name for name in theirs if "embed_positions" not in name}
    for name, tensor in model.state_dict().items():
        their_name = name
        for part, their_part in MARIAN_NAMES.items():
            their_name = their_name.replace(part, their_part)
        theirs[their_name].copy_(_permuted(name, tensor, order))
        unfilled.discard(their_name)
    for name in unfilled:
        assert name.endswith("bias"), name
        theirs[name].zero_()


def _permuted(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A parameter with its d_model features, where it has some, in another order."""
    module, kind = name.split(".")[-2:]
    if module.endswith("layer_norm") or module in WRITES:
        return tensor[order]
    return tensor[:, order] if kind == "weight" else tensor


def to_ctranslate2(marian: MarianMTModel, vocabulary: Sequence[str], folder: Path, quantization: str) -> None:
    """Write a folder that `ctranslate2.Translator` loads.

    It begins a translation with the start token of the model's config, unlike a MarianMT that CTranslate2's own
    converter takes to begin with a vector of zeros, as those of Helsinki-NLP do.

    Args:
        marian: From `to_marian`.
        vocabulary: The tokens, in the order of their ids.
        folder: Is made; files of an earlier conversion are replaced.
        quantization: A type of CTranslate2's weights, "float32" or "int8" for two.

    Raises:
        ImportError: If CTranslate2 is not installed.
        ValueError: If the vocabulary has another size than the model or has a token twice, or if the activation is not
            ReLU.
    """
    from ctranslate2.converters.transformers import BartLoader
    from ctranslate2.specs import TransformerSpec

    config = marian.config
    if not len(set(vocabulary)) == len(vocabulary) == config.vocab_size:
        raise ValueError(
            f"the vocabulary ({len(vocabulary)} tokens, {len(set(vocabulary))} of them distinct) must have "
            f"{config.vocab_size} distinct tokens, as the model has"
        )
    if config.activation_function != "relu":
        raise ValueError(f"activation_function ({config.activation_function!r}) must be 'relu' for CTranslate2 here")
    marian = copy.deepcopy(marian).float()  # quantising scales the weights that it is given, where they lie
    spec = TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers), config.encoder_attention_heads, pre_norm=False
    )
    loader = BartLoader()
    with torch.no_grad():
        loader.set_encoder(spec.encoder, marian.model.encoder)
        loader.set_decoder(spec.decoder, marian.model.decoder)
        loader.set_linear(spec.decoder.projection, marian.lm_head)
        if marian.final_logits_bias.any():
            spec.decoder.projection.bias = marian.final_logits_bias.squeeze(0)
        spec.register_source_vocabulary(list(vocabulary))
        spec.register_target_vocabulary(list(vocabulary))
        spec.config.eos_token = vocabulary[config.eos_token_id]
        spec.config.decoder_start_token = spec.config.bos_token = vocabulary[config.decoder_start_token_id]
        spec.config.unk_token = vocabulary[config.pad_token_id]  # must be one of the vocabulary; no token is unknown
        spec.validate()
        spec.optimize(quantization=quantization)
        folder.mkdir(parents=True, exist_ok=True)
        spec.save(str(folder))
