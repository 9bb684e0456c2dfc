"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017) as transformers models: sections 3.1 and 3.2.2,
and the heads.

Every sub-layer's output is LayerNorm(x + Dropout(Sublayer(x))): the norm closes the sub-layer ("post-LN"), and no norm
follows the stacks. The equations inside the sub-layers, and the legend of the dimension names, stand in `layers.py`.

Why each part is there is said where it is defined: several heads, and where queries, keys and values come from, in
`VanillaTrmAttention`; residual sums and LayerNorm in `VanillaTrmEncoderLayer`; the mask in `VanillaTrmDecoderLayer`;
the division by sqrt(d_k) and the positions in `layers.py`.

A layer is told its depth by an argument of the call and does not remember it, so that one stored layer can serve
several depths. Where the config asks for it, the layers of a stack share their parameters, all of them (ALBERT: Lan et
al., 2020) or the attention or the feed-forward networks alone: a module is stored once and called several times.
"""

import copy
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from types import SimpleNamespace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.import_utils import is_torchdynamo_compiling
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_trm import VanillaTrmConfig, arrangement_of, describe_sharing
from .decoding import BeamSearchOptions, Hypothesis, SamplingOptions
from .dropout import Dropout
from .generation import saved_options, score_targets, search
from .layers import FeedForward, SinusoidalPositions, embedding_scale, scaled_dot_product_attention, shift_right
from .loss import cross_entropy_sum, projected_cross_entropy_sum
from .projections import Linear, is_plain
from .translation import BATCH_TOKENS, translate_stream


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention` behind transformers' attention interface.

    Args:
        module: The calling attention; unused.
        query: `(batch, num_heads, query_length, d_k)`.
        key: `(batch, num_heads, key_length, d_k)`.
        value: `(batch, num_heads, key_length, d_k)`.
        attention_mask: transformers' mask for eager attention, which is added to the scores, or a boolean one, where
            True may attend.
        dropout: Dropout on the weights.
        **kwargs: What other implementations take.

    Returns:
        The output `(batch, query_length, num_heads, d_k)` and the weights `(batch, num_heads, query_length,
        key_length)`.
    """
    output, weights = scaled_dot_product_attention(query, key, value, attention_mask, dropout)
    return output.transpose(1, 2).contiguous(), weights


class VanillaTrmAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (section
    3.2.2).

    Several heads attend to different positions at once, each for reasons of its own, where a single softmax would
    average them into one. The h matrices W_i^Q stand side by side in `q_proj`, and likewise for `k_proj` and `v_proj`;
    d_k = d_v = d_model / h, so that h heads cost what one full-width head would.

    The three uses of section 3.2.3: the encoder's self-attention, the decoder's masked self-attention (`is_causal`),
    and the decoder's cross-attention. There the queries come from the decoder, what has been written asking for what
    comes next, and keys and values from the encoder's output (`encoder_hidden_states`): every target position may look
    up any source position. The source is complete before the first word is written, so that nothing but padding is
    masked, and its keys and values are computed once a sentence.
    """

    def __init__(self, config: VanillaTrmConfig, *, is_causal: bool = False) -> None:
        super().__init__()
        self.config = config
        self.is_causal = is_causal
        self.d_k = config.d_model // config.num_attention_heads
        self.scaling = 1 / math.sqrt(self.d_k)
        self.dropout = config.attention_dropout
        self.q_proj = Linear(config.d_model, config.d_model, bias=config.attention_bias)
        self.k_proj = Linear(config.d_model, config.d_model, bias=config.attention_bias)
        self.v_proj = Linear(config.d_model, config.d_model, bias=config.attention_bias)
        self.out_proj = Linear(config.d_model, config.d_model, bias=config.attention_bias)

    def _split_heads(self, projected: Tensor) -> Tensor:
        """`(batch, length, d_model)` to `(batch, num_heads, length, d_k)`."""
        return projected.view(*projected.shape[:-1], -1, self.d_k).transpose(1, 2)

    def _queries_keys_values(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor | None, cache: EncoderDecoderCache | None, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(batch, num_heads, query_length, d_k)`, keys and values `(batch, num_heads, key_length, d_k)`; those
        of the encoder's output are computed once a sentence.
        """
        if encoder_hidden_states is None:
            query, key, value = (
                self._split_heads(projection(hidden_states)) for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
            if cache is not None:
                key, value = cache.self_attention_cache.update(key, value, depth)
            return query, key, value
        query = self._split_heads(self.q_proj(hidden_states))
        if cache is not None and cache.is_updated.get(depth):
            layer: Any = cache.cross_attention_cache.layers[depth]
            return query, layer.keys, layer.values
        key, value = (self._split_heads(projection(encoder_hidden_states)) for projection in (self.k_proj, self.v_proj))
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, depth)
            cache.is_updated[depth] = True
        return query, key, value

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        depth: int,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `hidden_states` to itself, or to `encoder_hidden_states` where they are given.

        Args:
            hidden_states: `(batch, query_length, d_model)`.
            encoder_hidden_states: `(batch, source_length, d_model)`.
            attention_mask: What transformers' mask functions made for the attention implementation in use, or None.
            depth: Which entry of the cache is meant.
            cache: Keys and values of earlier decoding steps; updated.
            **kwargs: Passed on to the attention implementation.

        Returns:
            The output `(batch, query_length, d_model)`, and the attention weights where the implementation gives them.
        """
        query, key, value = self._queries_keys_values(hidden_states, encoder_hidden_states, cache, depth)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        heads, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.out_proj(heads.flatten(-2)), weights  # Concat: (batch, query_length, num_heads * d_k)


def _tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    """How a stack is divided over the devices of a tensor-parallel group: heads and inner features, each device having
    its own, meet again in the sum that `out_proj` and `fc2` make; the embedding is divided by tokens.
    """
    plan = {"embed_tokens": "embedding_rowwise"}
    for attention in attentions:
        plan |= {f"layers.*.{attention}.{projection}": "colwise" for projection in ("q_proj", "k_proj", "v_proj")}
        plan[f"layers.*.{attention}.out_proj"] = "rowwise"
    return plan | {"layers.*.feed_forward.fc1": "colwise", "layers.*.feed_forward.fc2": "rowwise"}


def _feed_forward(config: VanillaTrmConfig) -> FeedForward:
    return FeedForward(
        config.d_model, config.d_ff, activation=ACT2FN[config.activation_function], dropout=config.activation_dropout
    )


SHARED_SUBLAYERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "attention": ("self_attn", "cross_attn"),
    "ffn": ("feed_forward",),
    "all": (),  # no part of a layer: the layer
}
"""The sub-modules of a layer that several depths use, by `config.parameter_sharing`."""


class VanillaTrmEncoderLayer(GradientCheckpointingLayer):
    """Self-attention, then the feed-forward network; each output is LayerNorm(x + Dropout(Sublayer(x))) (sections 3.1,
    5.4).

    The residual sum lets the gradient reach the lower layers undiminished, and leaves to each sub-layer what is to be
    added. LayerNorm normalises each position by itself, over its d_model features. BatchNorm would normalise each
    feature over all positions of all sentences: for text its statistics would depend on padding and on which sentences
    are batched together, and would be others when a sentence is decoded alone, a token at a time.

    Args:
        config: The model's.
        borrows: Sub-modules that the layer does not have, since it shares those of an earlier one: they are arguments
            of every call.
    """

    SUBLAYERS = ("self_attn", "feed_forward")

    def __init__(self, config: VanillaTrmConfig, borrows: Collection[str] = ()) -> None:
        super().__init__()
        if "self_attn" not in borrows:
            self.self_attn = VanillaTrmAttention(config)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        if "feed_forward" not in borrows:
            self.feed_forward = _feed_forward(config)
        self.feed_forward_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        depth: int,
        self_attn: Callable[..., Any] | None = None,
        feed_forward: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map `(batch, source_length, d_model)` to the same shape; `self_attn` and `feed_forward` are borrowed ones."""
        self_attn, feed_forward = self_attn or self.self_attn, feed_forward or self.feed_forward
        attended, _ = self_attn(hidden_states, attention_mask=attention_mask, depth=depth, **kwargs)
        hidden_states = self.self_attn_layer_norm(hidden_states + self.dropout(attended))
        output: Tensor = self.feed_forward_layer_norm(hidden_states + self.dropout(feed_forward(hidden_states)))
        return output


class VanillaTrmDecoderLayer(GradientCheckpointingLayer):
    """Masked self-attention, cross-attention to the encoder's output, then the feed-forward network; post-LN throughout
    (section 3.1).

    The mask keeps a position from attending to later ones: their tokens are what it is trained to predict. With it one
    pass trains all positions of a target at once, each on what decoding will know there, the tokens before it.

    Args:
        config: The model's.
        borrows: As for `VanillaTrmEncoderLayer`.
    """

    SUBLAYERS = ("self_attn", "cross_attn", "feed_forward")

    def __init__(self, config: VanillaTrmConfig, borrows: Collection[str] = ()) -> None:
        super().__init__()
        if "self_attn" not in borrows:
            self.self_attn = VanillaTrmAttention(config, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        if "cross_attn" not in borrows:
            self.cross_attn = VanillaTrmAttention(config)
        self.cross_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        if "feed_forward" not in borrows:
            self.feed_forward = _feed_forward(config)
        self.feed_forward_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        *,
        depth: int,
        cache: EncoderDecoderCache | None = None,
        self_attn: Callable[..., Any] | None = None,
        cross_attn: Callable[..., Any] | None = None,
        feed_forward: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map `(batch, target_length, d_model)` to the same shape, given the encoder's output `(batch, source_length,
        d_model)`; `self_attn`, `cross_attn` and `feed_forward` are those borrowed.
        """
        self_attn, cross_attn = self_attn or self.self_attn, cross_attn or self.cross_attn
        feed_forward = feed_forward or self.feed_forward
        attended, _ = self_attn(hidden_states, attention_mask=attention_mask, depth=depth, cache=cache, **kwargs)
        hidden_states = self.self_attn_layer_norm(hidden_states + self.dropout(attended))
        attended, _ = cross_attn(
            hidden_states, encoder_hidden_states, encoder_attention_mask, depth=depth, cache=cache, **kwargs
        )
        hidden_states = self.cross_attn_layer_norm(hidden_states + self.dropout(attended))
        output: Tensor = self.feed_forward_layer_norm(hidden_states + self.dropout(feed_forward(hidden_states)))
        return output


class WidthProjection(Linear):
    """Takes factorised embeddings to `d_model`, or the decoder's output back to their width (Lan et al., 2020, section
    3.1). It begins with weights that keep the scale of what it gets.
    """

    def __init__(self, width: int, new_width: int) -> None:
        super().__init__(width, new_width, bias=False)


def _projection(width: int, new_width: int) -> nn.Module:
    return nn.Identity() if width == new_width else WidthProjection(width, new_width)


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""The arguments of `from_pretrained` that say where a file is."""


class VanillaTrmPreTrainedModel(PreTrainedModel):
    """What all classes share: initialisation, embeddings and ties.

    The paper does not say how it initialises. Here every matrix is drawn from N(0, 0.02^2), and biases are zero. Each
    sub-layer then starts as a small correction to its residual, and post-LN stacks learn sooner than with Xavier's
    larger weights: 6+6 layers reverse 99 % of held-out sequences after 1,900 updates, and 67 % after 2,500 with Xavier
    (`training/RESULTS.md`). Embeddings of that size give the tied output small logits, so that a fresh model's loss is
    close to ln(vocab_size); beside matrices as small as these, embeddings from N(0, 1 / d_model), the other usual
    choice, would come through the residuals and meet themselves in the output as large logits. The projections of
    factorised embeddings are drawn from N(0, 1 / width), which leaves the embeddings their size.
    """

    config: VanillaTrmConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VanillaTrmEncoderLayer", "VanillaTrmDecoderLayer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    def __init__(self, config: VanillaTrmConfig, *args: Any, **kwargs: Any) -> None:
        config.check()  # `from_pretrained(..., pad_token_id=N)` sets a field after the config has checked itself
        super().__init__(config, *args, **kwargs)
        self.arrangement = arrangement_of(config.to_dict())

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does.

        Raises:
            ValueError: The config's sharing fields were changed after the model was built: loaded by such a config, its
                tensors would be used at other depths.
        """
        config = self.config.to_dict()
        if arrangement_of(config) != self.arrangement:
            raise ValueError(
                f"the config was set to {describe_sharing(config)} after the model was built: set it back, or convert "
                "the model with share_parameters or unshare_parameters"
            )
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """Load a saved model; see transformers.

        Raises:
            ValueError: The checkpoint was saved by a model that shares its parameters otherwise: its tensors would fill
                some of this model's, and leave others as they were drawn.
        """
        where = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        saved: dict[str, Any] = {}
        if pretrained_model_name_or_path is not None:
            saved, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **where)
        if saved:  # a folder of weights alone says nothing
            if isinstance(config, str | os.PathLike):
                wanted, _ = PreTrainedConfig.get_config_dict(config, **where)
            else:
                wanted = saved | kwargs if config is None else config.to_dict()
            if arrangement_of(saved) != arrangement_of(wanted):
                raise ValueError(
                    f"{pretrained_model_name_or_path} has {describe_sharing(saved)}, and cannot be loaded into a model "
                    f"with {describe_sharing(wanted)}: share_parameters and unshare_parameters of the package convert "
                    "one to the other"
                )
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # The functions of `init` leave loaded tensors alone; writing to `.data` would not.
        if isinstance(module, WidthProjection):
            init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, SinusoidalPositions):
            # Not saved, so after loading it is uninitialised memory until it is computed again.
            init.copy_(module.table, module.compute_table())

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The ties in force, by the flags of this model: transformers' own version knows one flag for all of them."""
        if all_submodels:
            ties: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels=True)
            return ties
        return dict(self._tied_weights_keys or {})

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        if self.config.share_encoder_decoder_embeddings:
            resized: nn.Module = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
            return resized
        # transformers' own version would resize the output too, which here belongs to the other vocabulary.
        old: Any = self.get_input_embeddings()
        self.set_input_embeddings(self._get_resized_embeddings(old, new_num_tokens, pad_to_multiple_of, mean_resizing))
        return self.get_input_embeddings()

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the target vocabulary, and the output with it, where source and target have their own.

        Raises:
            ValueError: Source and target share their vocabulary.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError("source and target share their embedding: call resize_token_embeddings instead")
        decoder = self.get_decoder()
        embeddings = self._get_resized_embeddings(
            decoder.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        decoder.embed_tokens = embeddings
        if (lm_head := self.get_output_embeddings()) is not None:
            size = embeddings.num_embeddings
            self.set_output_embeddings(self._get_resized_lm_head(lm_head, size, mean_resizing=mean_resizing))
        self.config.decoder_vocab_size = embeddings.num_embeddings
        self.tie_weights()
        return embeddings


def config_for(config: VanillaTrmConfig, *, is_encoder_decoder: bool) -> VanillaTrmConfig:
    """The config itself where it says what the model is, or a copy that does, as when the encoder of a translation
    model becomes a model of its own.
    """
    if config.is_encoder_decoder != is_encoder_decoder:
        config = copy.deepcopy(config)
        config.is_encoder_decoder = is_encoder_decoder
    return config


class VanillaTrmStack(VanillaTrmPreTrainedModel):
    """What encoder and decoder have in common: embeddings, positions, dropout of their sum, and N calls of layers
    (sections 3.1, 3.4, 3.5).

    N calls, of fewer modules where parameters are shared. With "all", `layers` holds the M distinct layers. With
    "attention" or "ffn" it holds one for each depth, which has norms of its own; a shared sub-module belongs to the
    first that uses it, and is handed to the later ones.

    Args:
        config: The model's.
        vocab_size: Tokens to embed.
        num_layers: N.
        layer_class: `VanillaTrmEncoderLayer` or `VanillaTrmDecoderLayer`.
    """

    _fsdp_plan = {"layers.*": "free_full_weight"}  # noqa: RUF012 - the embeddings go with the whole model

    def __init__(
        self,
        config: VanillaTrmConfig,
        *,
        vocab_size: int,
        num_layers: int,
        layer_class: type[VanillaTrmEncoderLayer | VanillaTrmDecoderLayer],
    ) -> None:
        super().__init__(config)
        self.num_layers = num_layers
        self.embed_tokens = nn.Embedding(vocab_size, config.embedding_width)
        self.embed_projection = _projection(config.embedding_width, config.d_model)
        self.embed_positions = SinusoidalPositions(config.max_position_embeddings, config.d_model)
        self.dropout = Dropout(config.dropout)
        # Kept here, for the config may be set to something else afterwards.
        uses = [config.unique_layer_at(depth, num_layers) for depth in range(num_layers)]
        shared = SHARED_SUBLAYERS[config.parameter_sharing]
        self.shared_sublayers = [name for name in shared if name in layer_class.SUBLAYERS]
        self.layer_of_depth = uses if config.parameter_sharing == "all" else list(range(num_layers))
        self.lender_of_depth = [uses.index(use) for use in uses]  # the first depth that uses the same
        self.layers = nn.ModuleList(
            layer_class(config, borrows=() if self.lender_of_depth[depth] == depth else self.shared_sublayers)
            for depth in range(max(self.layer_of_depth) + 1)
        )
        self.gradient_checkpointing = False
        self.post_init()
        # While a layer's weights are gathered for its own call alone, another depth cannot use a part of it, unless
        # that part is gathered by itself.
        parts = {f"layers.*.{name}": "free_full_weight" for name in self.shared_sublayers}
        self._fsdp_plan = {**self.fsdp_plan, **parts}

    def layer_at(self, depth: int) -> nn.Module:
        """The layer called at `depth`, counted from 0."""
        return self.layers[self.layer_of_depth[depth]]

    def _lent_to(self, depth: int) -> dict[str, nn.Module]:
        """The sub-modules that the layer at `depth` uses and an earlier one has, by name."""
        lender = self.lender_of_depth[depth]
        if lender == depth:
            return {}
        return {name: getattr(self.layers[lender], name) for name in self.shared_sublayers}

    def borrowed_at(self, depth: int) -> dict[str, Callable[..., Any]]:
        """The arguments with which the layer at `depth` is called: what it uses of an earlier one."""
        # The call and not the module: accelerate's hooks would move a module among the arguments to another device.
        return {name: module.__call__ for name, module in self._lent_to(depth).items()}

    def sublayers_at(self, depth: int) -> dict[str, nn.Module]:
        """All sub-modules that are used at `depth`, by name, whichever layer has them."""
        return dict(self.layer_at(depth).named_children()) | self._lent_to(depth)

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Scaled embeddings `(batch, length, d_model)` of `input_ids`, or of `inputs_embeds` in their place.

        Raises:
            ValueError: Both or neither are given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{type(self).__name__} takes exactly one of input_ids and inputs_embeds")
        tokens = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        embeddings: Tensor = self.embed_projection(tokens)
        return embeddings * embedding_scale(self.config.d_model) if self.config.scale_embedding else embeddings

    def add_positions(self, embeddings: Tensor, positions: Tensor, end: int) -> Tensor:
        """Embeddings plus positions, then dropout (section 5.4); `positions` `(length,)` are below `end`."""
        encodings = self.embed_positions(positions, end).to(embeddings.dtype)
        output: Tensor = self.dropout(embeddings + encodings)
        return output


class VanillaTrmEncoder(VanillaTrmStack):
    """A stack of N identical layers, with parameters of their own unless the config lets them share (section 3.1)."""

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(VanillaTrmEncoderLayer, index=0, num_hidden_layers_key="encoder_layers"),
        "attentions": OutputRecorder(VanillaTrmAttention, index=1, layer_name="self_attn"),
    }
    _tp_plan = _tensor_parallel_plan("self_attn")

    def __init__(self, config: VanillaTrmConfig) -> None:
        super().__init__(
            config,
            vocab_size=config.vocab_size,
            num_layers=config.encoder_layers,
            layer_class=VanillaTrmEncoderLayer,
        )

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode source sentences.

        Args:
            input_ids: `(batch, source_length)`. Source tokens.
            attention_mask: `(batch, source_length)`. 1 for tokens, 0 for padding; all are tokens where it is None.
            inputs_embeds: `(batch, source_length, embedding_width)`. Unscaled embeddings, in place of `input_ids`.
        """
        embeddings = self.embed(input_ids, inputs_embeds)
        length = embeddings.size(1)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=embeddings, attention_mask=attention_mask)
        hidden_states = self.add_positions(embeddings, torch.arange(length, device=embeddings.device), length)
        for depth in range(self.num_layers):
            layer, borrowed = self.layer_at(depth), self.borrowed_at(depth)
            hidden_states = layer(hidden_states, mask, depth=depth, **borrowed, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)


class VanillaTrmDecoder(VanillaTrmStack):
    """A stack of N identical layers, each also attending to the encoder's output, with parameters of their own unless
    the config lets them share (section 3.1).
    """

    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(VanillaTrmDecoderLayer, index=0, num_hidden_layers_key="decoder_layers"),
        "attentions": OutputRecorder(VanillaTrmAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaTrmAttention, index=1, layer_name="cross_attn"),
    }
    _tp_plan = _tensor_parallel_plan("self_attn", "cross_attn")

    def __init__(self, config: VanillaTrmConfig) -> None:
        super().__init__(
            config,
            vocab_size=config.decoder_vocab_size or config.vocab_size,
            num_layers=config.decoder_layers,
            layer_class=VanillaTrmDecoderLayer,
        )

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode target prefixes.

        Args:
            input_ids: `(batch, target_length)`. Target tokens behind the start token; those not yet cached.
            attention_mask: `(batch, cached_length + target_length)`. 0 for padding of the target.
            encoder_hidden_states: `(batch, source_length, d_model)`. The encoder's output.
            encoder_attention_mask: `(batch, source_length)`. 0 for padding of the source.
            cache: Keys and values of earlier steps, an `EncoderDecoderCache`; updated.
            inputs_embeds: `(batch, target_length, embedding_width)`. Unscaled embeddings, in place of `input_ids`.
            use_cache: Whether to begin a cache where none is given.

        Raises:
            ValueError: There are no `encoder_hidden_states`, or the cache is of another class.
        """
        if encoder_hidden_states is None:
            raise ValueError(
                "the decoder needs encoder_hidden_states: its cross-attention takes keys and values from them"
            )
        embeddings = self.embed(input_ids, inputs_embeds)
        cache = self._encoder_decoder_cache(cache, bool(use_cache))
        cached_length = cache.get_seq_length() if cache is not None else 0
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            cache=cache.self_attention_cache if cache is not None else None,
        )
        cross_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=embeddings,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
        )
        positions = torch.arange(embeddings.size(1), device=embeddings.device) + cached_length
        if cache is not None and isinstance(cached_length, Tensor):
            # A static cache keeps its length on the device; its capacity bounds the positions without reading it.
            end = cache.get_max_length()
        else:
            end = cached_length + embeddings.size(1)
        hidden_states = self.add_positions(embeddings, positions, end)
        masks = (causal_mask, cross_mask)
        for depth in range(self.num_layers):
            layer, borrowed = self.layer_at(depth), self.borrowed_at(depth)
            hidden_states = layer(
                hidden_states, encoder_hidden_states, *masks, depth=depth, cache=cache, **borrowed, **kwargs
            )
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states, cache=cache)

    def _encoder_decoder_cache(self, cache: Cache | None, use_cache: bool) -> EncoderDecoderCache | None:
        """The given cache, a new one where `use_cache` asks for it, or None."""
        if cache is None and use_cache:
            return EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if cache is not None and not isinstance(cache, EncoderDecoderCache):
            raise ValueError(
                f"cache must be an EncoderDecoderCache, not {type(cache).__name__}: cross-attention has its own"
            )
        return cache


class VanillaTrmModel(VanillaTrmPreTrainedModel):
    """Encoder and decoder without a head (figure 1)."""

    def __init__(self, config: VanillaTrmConfig) -> None:
        config = config_for(config, is_encoder_decoder=True)
        super().__init__(config)
        self._tied_weights_keys = {}
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.embedding_width)
            self._tied_weights_keys["encoder.embed_tokens.weight"] = "shared.weight"
            self._tied_weights_keys["decoder.embed_tokens.weight"] = "shared.weight"
        if config.embedding_width != config.d_model:
            self._tied_weights_keys["decoder.embed_projection.weight"] = "encoder.embed_projection.weight"
        self.encoder = VanillaTrmEncoder(config)
        self.decoder = VanillaTrmDecoder(config)
        self.post_init()
        if config.share_encoder_decoder_embeddings:
            self._tp_plan = {**self.tp_plan, "shared": "embedding_rowwise"}

    def get_input_embeddings(self) -> nn.Embedding:
        """The source embedding, which is also the target's where they are shared."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the source embedding, and the target's where they are shared."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = self.decoder.embed_tokens = value

    @can_return_tuple
    @deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode a source and decode a target prefix.

        Args:
            input_ids: `(batch, source_length)`. Source tokens; not needed where `encoder_outputs` are given.
            attention_mask: `(batch, source_length)`. 1 for tokens of the source, 0 for padding.
            decoder_input_ids: `(batch, target_length)`. Target tokens behind the start token.
            decoder_attention_mask: `(batch, target_length)`. 1 for tokens of the target, 0 for padding.
            encoder_outputs: What the encoder returned for the source before.
            cache: As for `VanillaTrmDecoder`.
            inputs_embeds: `(batch, source_length, embedding_width)`. Unscaled embeddings, in place of `input_ids`.
            decoder_inputs_embeds: `(batch, target_length, embedding_width)`, in place of `decoder_input_ids`.
            use_cache: As for `VanillaTrmDecoder`.

        Raises:
            ValueError: Tokens and embeddings of one side are both given, or neither.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        encoded: Any = encoder_outputs
        if not isinstance(encoded, BaseModelOutput):
            encoded = BaseModelOutput(*encoded)  # a tuple in the order of the fields
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            cache=decoder_outputs.cache,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class ConditionalGenerationKwargs(TypedDict, total=False):
    """What `VanillaTrmForConditionalGeneration` takes beside its parameters.

    Attributes:
        label_smoothing: eps of `-(1 - eps) log p(y) - eps mean_v log p(v)`, 0 by default; the paper trains with 0.1. No
            parameter of its own, since the Trainer takes every parameter with "label" in its name for a tensor.
        output_attentions: Return the attention weights, with eager attention.
        output_hidden_states: Return the embeddings and every layer's output.
    """

    label_smoothing: float
    output_attentions: bool | None
    output_hidden_states: bool | None


class VanillaTrmForConditionalGeneration(VanillaTrmPreTrainedModel, GenerationMixin):
    """The whole Transformer: the stacks and the output projection, which is the target embedding unless it is untied
    (section 3.4). Where embeddings are factorised, so is the output: it has their width, and `lm_head_projection`
    before it takes the decoder's output to that width.
    """

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: VanillaTrmConfig) -> None:
        config = config_for(config, is_encoder_decoder=True)
        super().__init__(config)
        self.model = VanillaTrmModel(config)
        width, vocab_size = config.embedding_width, config.decoder_vocab_size or config.vocab_size
        self.lm_head_projection = _projection(config.d_model, width)
        self.lm_head = Linear(width, vocab_size, bias=config.output_bias)
        if config.tie_word_embeddings:
            shared = config.share_encoder_decoder_embeddings
            embedding = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
            self._tied_weights_keys = {"lm_head.weight": embedding}
        self.post_init()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does; the saved config says that the output is tied wherever it is.

        PEFT, on merging an adapter, compares the output with the source embedding and, where the vocabularies are
        separate, clears the flag of a model that is tied: loaded by such a config, the output would be drawn anew.
        """
        if getattr(self.lm_head, "weight", None) is self.get_decoder().embed_tokens.weight:
            self.config.tie_word_embeddings = True
        super().save_pretrained(*args, **kwargs)

    def compute_transition_scores(
        self,
        sequences: Tensor,
        scores: tuple[Tensor],
        beam_indices: Tensor | None = None,
        normalize_logits: bool = False,
    ) -> Tensor:
        """The scores of the chosen tokens; see transformers, which would count in the source's vocabulary."""
        in_target_vocabulary: Any = SimpleNamespace(config=self.config.get_text_config(decoder=True))
        chosen: Tensor = GenerationMixin.compute_transition_scores(
            in_target_vocabulary, sequences, scores, beam_indices, normalize_logits
        )
        return chosen

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels behind the start token, `(batch, target_length)`; what data collators call.

        Raises:
            ValueError: The config lacks a start or a padding token.
        """
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            name = "decoder_start_token_id" if start is None else "pad_token_id"
            raise ValueError(f"config.{name} is None: labels cannot be shifted to decoder inputs without it")
        return shift_right(labels, start_token_id=start, pad_token_id=pad)

    def _prepare_special_tokens(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        """Called by `generate`; refuses to decode from another start token than training begins with, unless the call
        names one. transformers would take BOS, or what the generation config still holds.

        Raises:
            ValueError: There is no start token, or the two configs disagree.
        """
        start, trained = generation_config.decoder_start_token_id, self.config.decoder_start_token_id
        if start is None:
            raise ValueError("generation_config.decoder_start_token_id is None: decoding cannot begin without it")
        if start != trained and start == self.generation_config.decoder_start_token_id:
            raise ValueError(
                f"config.decoder_start_token_id ({trained}), with which training begins, differs from that of the "
                f"generation config ({start}), with which decoding begins: set both, or give it to generate()"
            )
        mixin: Any = super()
        mixin._prepare_special_tokens(generation_config, *args, **kwargs)

    def search(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        prefixes: Sequence[Sequence[int]] | None = None,
        ensemble: Sequence[Any] = (),
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """Translate by the paper's beam search (section 6.1), in a loop of our own; `generate` has others.

        Args:
            input_ids: `(batch, source_length)`. Source tokens.
            attention_mask: `(batch, source_length)`. 1 for tokens, 0 for padding; all are tokens where it is None.
            prefixes: For each source the tokens with which its translation must begin.
            ensemble: Further models with the same vocabularies; the mean of all probabilities is what is searched.
            **options: Fields of `BeamSearchOptions`, with its defaults: the paper's beam of 4 and alpha of 0.6. The
                generation config is not read: tokens that it forbids are given as `forbidden_tokens`.

        Returns:
            For each source its hypotheses, the best first.

        Raises:
            ValueError: A model is in training mode, is not on one device as a whole, or differs from the others; the
                config lacks a start or EOS token; an option or a prefix breaks a rule; or outputs are not finite.
        """
        return search((self, *ensemble), input_ids, attention_mask, BeamSearchOptions(**options), prefixes=prefixes)

    def search_options(self, **changes: Any) -> BeamSearchOptions:
        """How the model's generation config says to search: what `translate` does, and `search` with these as fields.

        Args:
            **changes: Fields of `BeamSearchOptions` that replace those of the generation config; None keeps one.

        Raises:
            ValueError: A number is out of its range, or `bad_words_ids` has an entry of several tokens.
        """
        return saved_options(self.generation_config, **changes)

    def sample(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        prefixes: Sequence[Sequence[int]] | None = None,
        ensemble: Sequence[Any] = (),
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """Draw translations.

        Args:
            input_ids: `(batch, source_length)`. Source tokens.
            attention_mask: `(batch, source_length)`. 1 for tokens, 0 for padding; all are tokens where it is None.
            prefixes: As for `search`.
            ensemble: As for `search`.
            generator: Draws; PyTorch's own by default.
            **options: Fields of `SamplingOptions`.

        Returns:
            For each source its hypotheses, as they were drawn.

        Raises:
            ValueError: As for `search`.
        """
        models, sampling = (self, *ensemble), SamplingOptions(**options)
        return search(models, input_ids, attention_mask, sampling, prefixes=prefixes, generator=generator)

    def translate(
        self,
        texts: str | Iterable[str],
        tokenizer: Any,
        *,
        prefixes: Iterable[str] | None = None,
        ensemble: Sequence[Any] = (),
        batch_tokens: int = BATCH_TOKENS,
        **options: Any,
    ) -> Any:
        """Translate texts, in batches of similar length, by the search that the model's generation config describes.

        Args:
            texts: One, several, or a stream of them, of any length: an iterator is read ahead by some thousands. A
                blank text has a blank translation.
            tokenizer: The model's own.
            prefixes: For each text with what its translation must begin; for one text, one.
            ensemble: As for `search`.
            batch_tokens: Sources times longest source times beams in a batch, at most.
            **options: Fields of `BeamSearchOptions` that replace those of the generation config.

        Returns:
            For a string, a string; for a list or tuple, a list; for another iterable, an iterator. In the order of the
            texts.

        Raises:
            ValueError: As for `search`; several hypotheses are asked for, which `search` returns; or there are not as
                many prefixes as texts.
        """
        chosen = self.search_options(**options)
        if chosen.num_hypotheses != 1:
            raise ValueError(
                f"num_hypotheses ({chosen.num_hypotheses}) must be 1: translate gives the best, search all"
            )
        one = isinstance(texts, str)
        given: Any = [texts] if one else texts
        begin: Any = [prefixes] if isinstance(prefixes, str) else prefixes
        if begin is not None and isinstance(given, Sized) and isinstance(begin, Sized) and len(begin) != len(given):
            raise ValueError(f"there are {len(begin)} prefixes for {len(given)} texts")
        models = (self, *ensemble)
        found = translate_stream(models, tokenizer, given, chosen, prefixes=begin, batch_tokens=batch_tokens)
        stream = (translations[0].text for translations in found)
        if one:
            return next(stream)
        return list(stream) if isinstance(texts, list | tuple) else stream

    @torch.no_grad()
    def token_log_probs(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Score given translations: the log-probability of every target token, given the source and those before it.

        Their sum over a sentence is its log-probability; `search` divides that by the length penalty.

        Args:
            input_ids: `(batch, source_length)`. Source tokens.
            labels: `(batch, target_length)`. Target tokens, EOS included; -100 marks positions without a target.
            attention_mask: `(batch, source_length)`. 1 for tokens, 0 for padding; all are tokens where it is None.

        Returns:
            `(batch, target_length)`, in float32 or better; 0 where there is no target.

        Raises:
            ValueError: The model is in training mode, or its config lacks a start or padding token.
        """
        return score_targets(self, input_ids, attention_mask, labels)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", version="5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Tensor, ...] | BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        return_logits: bool | None = None,
        **kwargs: Unpack[ConditionalGenerationKwargs],
    ) -> Seq2SeqLMOutput:
        """Predict target tokens, and their loss where labels are given.

        Args:
            input_ids: `(batch, source_length)`. Source tokens; not needed where `encoder_outputs` are given.
            attention_mask: `(batch, source_length)`. 1 for tokens of the source, 0 for padding.
            decoder_input_ids: `(batch, target_length)`. Target tokens behind the start token; made from `labels` by
                default.
            decoder_attention_mask: As for `VanillaTrmModel`, like `encoder_outputs`, `cache`, `inputs_embeds`,
                `decoder_inputs_embeds` and `use_cache`; with labels there is no cache.
            labels: `(batch, target_length)`. Target tokens, EOS included; -100 marks positions without a target.
            num_items_in_batch: What the summed loss is divided by; by default the batch's own number of targets. Who
                accumulates gradients over several batches gives the targets of all of them.
            return_logits: Whether to return logits beside a loss; by default not in training mode, where they would be
                the largest tensor of all. Without labels they are always returned.
            **kwargs: See `ConditionalGenerationKwargs`.

        Returns:
            `loss` where there are labels, `logits` `(batch, target_length, vocab_size)` unless they are left out, and
            what `VanillaTrmModel` returns.

        Raises:
            ValueError: `label_smoothing` is not at least 0 and below 1, or the config lacks a start or padding token.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing ({label_smoothing}) must be at least 0 and below 1")
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = self.lm_head_projection(outputs.last_hidden_state)
        if labels is None or return_logits is None:
            return_logits = labels is None or not self.training
        logits = self.lm_head(hidden_states) if return_logits or not self._can_chunk_loss() else None
        loss = None
        if labels is not None:
            loss = self._loss(hidden_states, logits, labels, label_smoothing, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits if return_logits else None,
            cache=outputs.cache,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _can_chunk_loss(self) -> bool:
        """Whether the projection's weight may be used outside of its module, and there is no compiler to do better."""
        return is_plain(self.lm_head) and not is_torchdynamo_compiling()

    def _loss(
        self,
        hidden_states: Tensor,
        logits: Tensor | None,
        labels: Tensor,
        label_smoothing: float,
        num_items_in_batch: int | Tensor | None,
    ) -> Tensor:
        """The summed loss over `num_items_in_batch`, or over the number of targets; a batch without targets has loss
        0.
        """
        labels = labels.to(hidden_states.device)
        if logits is not None:
            loss = cross_entropy_sum(logits, labels, label_smoothing=label_smoothing)
        else:
            loss = projected_cross_entropy_sum(
                hidden_states, self.lm_head.weight, self.lm_head.bias, labels, label_smoothing=label_smoothing
            )
        if num_items_in_batch is None:
            num_items_in_batch = (labels != -100).sum()
        # Without a target the sum is 0, and so is the Trainer's count.
        if isinstance(num_items_in_batch, Tensor):
            count = num_items_in_batch.to(loss.device)
            return loss / count.masked_fill(count == 0, 1)
        return loss / (num_items_in_batch or 1)


class VanillaTrmEncoderModel(VanillaTrmPreTrainedModel):
    """The encoder without a decoder: a vector for every source token.

    Not in the paper, whose encoder always feeds a decoder. It loads the encoder of a translation model's folder as
    readily as a folder of its own, and so does the classifier.
    """

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head"]  # noqa: RUF012

    def __init__(self, config: VanillaTrmConfig) -> None:
        config = config_for(config, is_encoder_decoder=False)
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            # The name under which a translation model saves the one embedding.
            self.shared = nn.Embedding(config.vocab_size, config.embedding_width)
            self._tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}
        self.encoder = VanillaTrmEncoder(config)
        self.post_init()
        if config.share_encoder_decoder_embeddings:
            self._tp_plan = {**self.tp_plan, "shared": "embedding_rowwise"}

    def get_input_embeddings(self) -> nn.Embedding:
        """The source embedding."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the source embedding."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode sentences.

        Args:
            input_ids: `(batch, source_length)`. Source tokens.
            attention_mask: `(batch, source_length)`. 1 for tokens, 0 for padding; all are tokens where it is None.
            inputs_embeds: `(batch, source_length, embedding_width)`. Unscaled embeddings, in place of `input_ids`.

        Returns:
            `last_hidden_state` `(batch, source_length, d_model)`.
        """
        outputs: BaseModelOutput = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        return outputs


class VanillaTrmForSequenceClassification(VanillaTrmPreTrainedModel):
    """A linear classifier, or regression, on the mean of the encoder's outputs over the real tokens.

    The mean and not one token's output, since no token of a translation model has learned to stand for its sentence.
    """

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head"]  # noqa: RUF012
    # The losses divide by the batch, not by a count for the whole update; the Trainer then averages micro-batches.
    accepts_loss_kwargs = False

    def __init__(self, config: VanillaTrmConfig) -> None:
        config = config_for(config, is_encoder_decoder=False)
        super().__init__(config)
        self.model = VanillaTrmEncoderModel(config)
        self.dropout = Dropout(config.dropout)
        num_labels: Any = config.num_labels  # never None in a constructed config
        self.classifier = nn.Linear(config.d_model, num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify sentences, and their loss where labels are given.

        Args:
            input_ids: `(batch, source_length)`. Source tokens.
            attention_mask: `(batch, source_length)`. 1 for tokens, 0 for padding. By default it is made from
                `input_ids` and `config.pad_token_id`: the mean must not depend on padding.
            inputs_embeds: `(batch, source_length, embedding_width)`. Unscaled embeddings, in place of `input_ids`.
            labels: `(batch,)` classes, `(batch,)` or `(batch, num_labels)` numbers for a regression, or `(batch,
                num_labels)` zeros and ones. `config.problem_type` decides; where it is None, `num_labels` and the
                labels' dtype do.

        Returns:
            `logits` `(batch, num_labels)`, and `loss`.
        """
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        sentence = _mean_over_tokens(outputs.last_hidden_state, attention_mask)  # (batch, d_model)
        logits = self.classifier(self.dropout(sentence))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _mean_over_tokens(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """`(batch, length, d_model)` to `(batch, d_model)`; a sentence without a token gives zeros."""
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    is_token = attention_mask.bool().unsqueeze(-1)  # (batch, length, 1)
    total = torch.where(is_token, hidden_states, 0.0).sum(dim=1)
    return total / is_token.sum(dim=1).clamp(min=1)


__all__ = [
    "VanillaTrmDecoder",
    "VanillaTrmEncoder",
    "VanillaTrmEncoderModel",
    "VanillaTrmForConditionalGeneration",
    "VanillaTrmForSequenceClassification",
    "VanillaTrmModel",
    "VanillaTrmPreTrainedModel",
]
