"""The same model in other libraries' layouts: transformers' MarianMT, both ways, and torch's `nn.Transformer`.

MarianMT is the paper's model, but for biases, the activation that its config names, and the layout of its positions:
all sines first, then all cosines, where the paper interleaves them (section 3.5). What a model computes does not depend
on the order of its d_model features, so that a fixed permutation of everything that reads or writes them makes one of
the other. torch's layers have the three input projections of an attention in one matrix, and no embeddings.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel
from transformers.activations import ACT2FN

from .configuration_vanilla_trm import VanillaTrmConfig
from .modeling_vanilla_trm import VanillaTrmForConditionalGeneration
from .sharing import unshare_parameters

MARIAN_NAMES = {
    "feed_forward_layer_norm": "final_layer_norm",
    "feed_forward.": "",
    "cross_attn": "encoder_attn",
    "lm_head.bias": "final_logits_bias",
}
"""Parts of our names of parameters, and what Marian calls them."""
WRITES = ("out_proj", "fc2")
"""Linear maps whose output is added to the d_model features; the input of all others is these."""
SAME_FIELDS = (
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "activation_function",
    "scale_embedding",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "share_encoder_decoder_embeddings",
    "decoder_vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)
"""Fields of the config that have the same name and meaning in both."""
MARIAN_LAYER_NORM_EPS = 1e-5
"""MarianMT has no choice in it."""
OLD_FIELDS = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
}
"""What some published configs of Marian models say, transformers ignores, and the paper's architecture is."""


def features_in_marians_order(d_model: int) -> Tensor:
    """Which of our features each of Marian's is, `(d_model,)`: those of the sines, then those of the cosines."""
    return torch.cat((torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)))


def features_in_our_order(d_model: int) -> Tensor:
    """Which of Marian's features each of ours is, `(d_model,)`: sines and cosines in turn."""
    return features_in_marians_order(d_model).argsort()


# From Marian --------------------------------------------------------------------------------------------------------


def from_marian(marian: MarianMTModel) -> VanillaTrmForConditionalGeneration:
    """Return our model with the weights of a MarianMT, which gives the same logits and generates the same tokens.

    Its config has biases on the attention projections and on the output. Its generation config is Marian's; note that
    `search` and `translate` read its `length_penalty` as the paper's alpha, where `generate` takes a power of the
    length.

    Args:
        marian: Of any size, with one vocabulary or two. It is left as it is.

    Returns:
        In evaluation mode, of Marian's precision and on its device.

    Raises:
        ValueError: The model is of another type, or a field of its config has a value that our model cannot have; the
            message names both.
    """
    check_marian(marian)
    theirs = marian.config
    fields = {name: getattr(theirs, name) for name in SAME_FIELDS}
    if not theirs.tie_word_embeddings:  # Marian's source and target embeddings are two then, whatever their names
        fields["share_encoder_decoder_embeddings"] = False
    config = VanillaTrmConfig(
        **fields,
        num_attention_heads=theirs.encoder_attention_heads,
        d_ff=theirs.encoder_ffn_dim,
        layer_norm_eps=MARIAN_LAYER_NORM_EPS,
        attention_bias=True,
        output_bias=True,
        use_cache=theirs.use_cache,
    )
    model: VanillaTrmForConditionalGeneration = _without_drawing(VanillaTrmForConditionalGeneration, config)
    model = model.to(device=marian.device, dtype=marian.dtype)  # type: ignore[call-arg]
    order = features_in_our_order(config.d_model).to(marian.device)
    weights = marian.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_permuted(name, weights[_marian_name(name)].view_as(tensor), order))
    model.generation_config = copy.deepcopy(marian.generation_config)
    return model


def check_marian(marian: Any) -> None:
    """Refuse a model that ours cannot be.

    Raises:
        ValueError: As `from_marian`.
    """
    if not isinstance(marian, MarianMTModel):
        raise ValueError(f"a {type(marian).__name__} is no MarianMTModel")
    config = marian.config
    for name in ("attention_heads", "ffn_dim"):
        own, other = getattr(config, f"encoder_{name}"), getattr(config, f"decoder_{name}")
        if own != other:
            raise ValueError(f"encoder_{name} ({own}) and decoder_{name} ({other}) must be the same")
    if config.d_model % 2:
        raise ValueError(f"d_model ({config.d_model}) must be even: our positions are pairs of a sine and a cosine")
    if config.activation_function not in ACT2FN:
        raise ValueError(f"activation_function ({config.activation_function!r}) is none that transformers has")
    if config.share_encoder_decoder_embeddings and config.decoder_vocab_size != config.vocab_size:
        raise ValueError(
            f"decoder_vocab_size ({config.decoder_vocab_size}) must be vocab_size ({config.vocab_size}) where "
            "share_encoder_decoder_embeddings is True"
        )
    for name, value in OLD_FIELDS.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{name} ({getattr(config, name)}) must be {value}: it is another architecture")


# To Marian ----------------------------------------------------------------------------------------------------------


def to_marian(
    model: VanillaTrmForConditionalGeneration, *, max_position_embeddings: int | None = None
) -> MarianMTModel:
    """Return a MarianMT with the weights of a model, which gives the same logits.

    Layers that share parameters get copies of them, and projections without a bias one of zeros.

    Args:
        model: It is left as it is.
        max_position_embeddings: Rows of the table of positions, beyond which MarianMT reads nothing; those of the
            model's config by default.

    Returns:
        In evaluation mode, of the model's precision and on its device, with the model's generation config. It begins
        with the model's own start token.

    Raises:
        ValueError: The model is of another type, or a field of its config has a value that MarianMT cannot have; the
            message names both.
    """
    check_convertible(model)
    config = model.config
    fields = {name: getattr(config, name) for name in SAME_FIELDS}
    fields["max_position_embeddings"] = max_position_embeddings or config.max_position_embeddings
    their_config = MarianConfig(
        **fields,
        encoder_attention_heads=config.num_attention_heads,
        decoder_attention_heads=config.num_attention_heads,
        encoder_ffn_dim=config.d_ff,
        decoder_ffn_dim=config.d_ff,
        use_cache=config.use_cache,
        forced_eos_token_id=None,
    )
    marian: Any = _without_drawing(MarianMTModel, their_config).to(device=model.device, dtype=model.dtype)
    source = model if config.parameter_sharing == "none" else unshare_parameters(model)
    order = features_in_marians_order(config.d_model).to(model.device)
    weights = marian.state_dict()
    unfilled = {name for name in weights if "embed_positions" not in name}
    with torch.no_grad():
        for name, tensor in source.state_dict().items():
            weights[_marian_name(name)].copy_(_permuted(name, tensor, order))
            unfilled.discard(_marian_name(name))
        for name in unfilled:
            assert name.endswith("bias"), name
            weights[name].zero_()
    marian.generation_config = copy.deepcopy(model.generation_config)
    result: MarianMTModel = marian
    return result


def check_convertible(model: Any) -> None:
    """Refuse a model that MarianMT cannot be.

    Raises:
        ValueError: As `to_marian`.
    """
    config = model.config
    if config.model_type != "vanilla_trm" or not hasattr(model, "lm_head"):
        raise ValueError(f"a {type(model).__name__} of type {config.model_type} cannot become a MarianMT from here")
    if config.layer_norm_eps != MARIAN_LAYER_NORM_EPS:
        raise ValueError(
            f"layer_norm_eps ({config.layer_norm_eps}) must be {MARIAN_LAYER_NORM_EPS} to become a MarianMT"
        )
    if config.embedding_size not in (None, config.d_model):
        raise ValueError(
            f"embedding_size ({config.embedding_size}) must be d_model ({config.d_model}) to become a MarianMT, which "
            "has no factorised embeddings"
        )
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        if not isinstance(getattr(config, name), int):
            raise ValueError(f"{name} ({getattr(config, name)}) must be one token to become a MarianMT")


def _marian_name(name: str) -> str:
    for part, their_part in MARIAN_NAMES.items():
        name = name.replace(part, their_part)
    return name


def _permuted(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """A parameter with its d_model features, where it has some, in another order. `name` is ours."""
    module, kind = name.split(".")[-2:]
    if module.endswith("layer_norm") or module in WRITES:
        return tensor[order]
    return tensor[:, order] if kind == "weight" else tensor


def _without_drawing(kind: Any, config: Any) -> Any:
    """A model in evaluation mode, whose first weights, all to be replaced, cost no random numbers."""
    with torch.random.fork_rng(devices=[]):
        return kind(config).eval()


# From torch ---------------------------------------------------------------------------------------------------------

TORCH_NAMES = {
    "multihead_attn.": "cross_attn.",
    "linear1.": "feed_forward.fc1.",
    "linear2.": "feed_forward.fc2.",
}
"""Parts of torch's names of parameters, and what we call them. Its norms are numbered in the order of sub-layers."""
TORCH_NORMS = {
    False: {"norm1.": "self_attn_layer_norm.", "norm2.": "feed_forward_layer_norm."},
    True: {"norm1.": "self_attn_layer_norm.", "norm2.": "cross_attn_layer_norm.", "norm3.": "feed_forward_layer_norm."},
}
"""What its norms close, in an encoder and in a decoder."""


def load_torch_weights(module: torch.nn.Module, state_dict: Mapping[str, Tensor], *, norm_first: bool) -> None:
    """Fill the layers of our model with those of torch's `nn.Transformer`, or of one stack with those of one of its.

    Embeddings and the output projection are no part of torch's: the model keeps its own. Our config must say what a
    state dict does not tell: `num_attention_heads`, `activation_function` and `layer_norm_eps`.

    The paper has no LayerNorm behind a stack, where `nn.Transformer` always has one. It is dropped where it changes
    nothing: where it and the norm that closes the last layer, whose output it normalises a second time, have weights of
    1 and biases of 0. Any other is refused.

    Args:
        module: A model with encoder and decoder, or `VanillaTrmEncoder` or `VanillaTrmDecoder` alone. Its layers share
            nothing.
        state_dict: Of `nn.Transformer`, or of `nn.TransformerEncoder` or `nn.TransformerDecoder`.
        norm_first: As torch's layers were made. Those with True are pre-LN, another architecture, and refused.

    Raises:
        ValueError: See above; or names, shapes or numbers of layers are not the module's. The message names which, and
            the module is as it was.
    """
    if norm_first:
        raise ValueError("norm_first (True) must be False: the layers of the paper are post-LN, and these are not")
    given: dict[str, dict[str, Tensor]] = {"": dict(state_dict)}
    stacks: dict[str, Any] = {"": module}
    if hasattr(module, "get_encoder") and not hasattr(module, "sublayers_at"):
        names = ("encoder.", "decoder.")
        given = {name: {k.removeprefix(name): v for k, v in state_dict.items() if k.startswith(name)} for name in names}
        stacks = {"encoder.": module.get_encoder(), "decoder.": module.get_decoder()}  # type: ignore[operator]
        if others := [key for key in state_dict if not key.startswith(names)]:
            raise ValueError(f"nn.Transformer has no {others[0]!r}: its names begin with 'encoder.' or 'decoder.'")
    translated = {name: _translated(stacks[name], tensors, name) for name, tensors in given.items()}
    for name, stack in stacks.items():
        stack.layers.load_state_dict(translated[name])


def _translated(stack: Any, given: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The state dict of our stack's `layers`, from torch's of a stack; `prefix` is for messages."""
    if stack.config.parameter_sharing != "none":
        raise ValueError(f"parameter_sharing ({stack.config.parameter_sharing!r}) must be 'none' for torch's weights")
    expected = stack.layers.state_dict()
    found: dict[str, Tensor] = {}
    final: dict[str, Tensor] = {}
    for key, tensor in given.items():
        if key.startswith("norm."):
            final[key.removeprefix("norm.")] = tensor
            continue
        for name, part in _ours_of(key, tensor, TORCH_NAMES | TORCH_NORMS["cross_attn" in stack.sublayers_at(0)]):
            if name not in expected:
                advice = "; set attention_bias=True" if name.endswith("bias") and "attn" in name else ""
                raise ValueError(
                    f"there is no place for {prefix + key!r} in a stack of {stack.num_layers} layers{advice}"
                )
            if part.shape != expected[name].shape:
                shapes = f"is of {tuple(part.shape)}, and the model's {name} of {tuple(expected[name].shape)}"
                raise ValueError(f"{prefix + key!r} {shapes}")
            found[name] = part
    for name in sorted(expected.keys() - found.keys()):
        if not name.endswith("bias"):
            raise ValueError(f"the state dict has nothing for {prefix}layers.{name}: it has fewer layers, or others")
        found[name] = torch.zeros_like(expected[name])  # torch's layers without biases have none in their norms either
    _check_final_norm(final, found, stack.num_layers - 1, prefix)
    return found


def _ours_of(key: str, tensor: Tensor, names: Mapping[str, str]) -> list[tuple[str, Tensor]]:
    """Our names and tensors, below `layers`, of one of torch's; a name that is not known stays as it is."""
    key = key.removeprefix("layers.")
    for theirs, ours in names.items():
        key = key.replace(theirs, ours)
    if ".in_proj_" in key:
        thirds = zip(("q_proj.", "k_proj.", "v_proj."), tensor.chunk(3), strict=True)
        return [(key.replace("in_proj_", name), third) for name, third in thirds]
    return [(key, tensor)]


def _check_final_norm(final: Mapping[str, Tensor], layers: Mapping[str, Tensor], last: int, prefix: str) -> None:
    """Refuse a LayerNorm behind the stack that changes what the last layer's own norm gives."""
    if not final:
        return
    own = {kind: layers[f"{last}.feed_forward_layer_norm.{kind}"] for kind in ("weight", "bias")}
    for name, norm in ((f"{prefix}norm", final), ("the norm that closes the last layer", own)):
        values = {"weight": 1.0, "bias": 0.0}
        if any(bool((tensor != values[kind]).any()) for kind, tensor in norm.items()):
            raise ValueError(
                f"there is a LayerNorm behind the stack ({prefix}norm), which the paper has not and our model cannot "
                f"have. It would be dropped if it changed nothing, but {name} has weights other than 1 or biases other "
                "than 0"
            )
