"""The decoder a token at a time, for all beams of a batch of sentences: what a search asks for log-probabilities.

It computes what `VanillaTrmDecoder` computes with a cache (section 3.1), arranged for speed; see `decoding.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .layers import FeedForward
from .projections import PackedLinear, has_plain_call, is_plain, linear
from .softmax import row_multiple

FURTHER_STEPS = 8
"""Steps, more than source tokens, for which there is room at first; it is doubled where that is not enough."""

Map = Callable[[Tensor], Tensor]


def joined(*linears: Any, scale: float = 1.0, pack: bool = True, relu: bool = False) -> Map:
    """Several linear maps of the same input as one, their outputs side by side; the first output is scaled.

    Args:
        *linears: Modules that take `(..., d_in)` to `(..., d_out)`, all with a bias or none.
        scale: A factor of the first one's output.
        pack: Whether the map will be applied so often that its weight is worth storing anew.
        relu: Whether ReLU follows.
    """
    after = nn.functional.relu if relu else nn.Identity()
    if not all(is_plain(linear) for linear in linears):
        return lambda inputs: after(
            torch.cat(
                [module(inputs) * (scale if number == 0 else 1.0) for number, module in enumerate(linears)], dim=-1
            )
        )

    def side_by_side(name: str) -> Any:
        tensors = [getattr(module, name) for module in linears]
        if tensors[0] is None or (len(tensors) == 1 and scale == 1.0):
            return tensors[0]
        return torch.cat([tensors[0] * scale, *tensors[1:]])

    weight, bias = side_by_side("weight"), side_by_side("bias")
    if pack and PackedLinear.suits(weight, bias):
        return PackedLinear(weight, bias, relu=relu)
    return lambda inputs: after(linear(inputs, weight, bias))


@dataclass
class DecoderDepth:
    """The sub-layers at one depth of the decoder, ready to be called for one token a beam.

    Attributes:
        self_projection: Queries, scaled, keys and values of self-attention side by side.
        self_output: Of self-attention.
        cross_query: Queries of cross-attention, scaled.
        cross_output: Of cross-attention.
        feed_forward: Of the feed-forward network.
        parts: The sub-modules at this depth by name.
        cross_index: Which of the distinct cross-attentions it is: depths that share one share its keys and values too.
    """

    self_projection: Map
    self_output: Map
    cross_query: Map
    cross_output: Map
    feed_forward: Map
    parts: dict[str, Any]
    cross_index: int


class IncrementalDecoder:
    """Answers a search with the log-probabilities of the next token.

    Keys and values have the shape `(batch, num_heads, key_length, d_k)`: of cross-attention one for each source token,
    of self-attention one for each beam and step, but a single one of the first step, in which beams are alike. The
    beams of a sentence attend to both together, as queries `(batch, num_heads, num_beams, d_k)`; `ancestors` says which
    of the slots hold a beam's own past. On a CPU, where products of many small matrices are slow in bfloat16, they are
    in float32.

    With two beams A and B, slot 0 holds what both began with, slots 1 and 2 the first tokens after it, and each step
    takes two more; a swap of beams moves rows of `ancestors`, never keys or values:

        step    A attends to    B attends to
        1       0               0
        2       0, 1            0, 2
        if both of the best continuations now extend B, `reorder([1, 1])`:
        3       0, 2, 3         0, 2, 4

    Args:
        model: A `VanillaTrmForConditionalGeneration`, in evaluation mode. Its weights are read now.
        input_ids: `(batch, source_length)`. Source tokens.
        attention_mask: `(batch, source_length)`. 1 for tokens, 0 for padding; all are tokens where it is None.
        num_beams: Beams of every sentence.
        encoder_hidden_states: `(batch, source_length, d_model)`, where they are known already.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        *,
        num_beams: int,
        encoder_hidden_states: Tensor | None = None,
    ) -> None:
        self.model, self.num_beams = model, num_beams
        self.decoder: Any = model.get_decoder()
        if encoder_hidden_states is None:
            encoder_hidden_states = model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)[0]
        assert encoder_hidden_states is not None
        self.d_k = model.config.d_model // model.config.num_attention_heads
        self._prepare_depths()
        self.output = joined(model.lm_head)
        self._compute_cross_keys_values(encoder_hidden_states, attention_mask)
        self.length = self.slots = 0
        self.lowest = lowest_of(self.cross_kv)
        _, batch, num_heads, _, _ = self.cross_kv.shape
        capacity = _rounded_up((encoder_hidden_states.size(1) + FURTHER_STEPS) * num_beams, self.cross_kv)
        # Zeros: what has no weight must be numbers all the same.
        self.past = self.cross_kv.new_zeros((len(self.depths), 2, batch, num_heads, capacity, self.d_k))
        self.ancestors = self.cross_kv.new_full((batch, num_beams, capacity), self.lowest)
        self.own_slot = self.cross_kv.new_full((num_beams, num_beams), self.lowest).fill_diagonal_(0.0)

    def _prepare_depths(self) -> None:
        scale = self.d_k**-0.5
        maps: dict[tuple[int, ...], Map] = {}

        def once(make: Callable[..., Map], *modules: Any, **settings: Any) -> Map:
            """What `make` makes of modules; depths that share them share it too."""
            key = tuple(map(id, modules))
            if key not in maps:
                maps[key] = make(*modules, **settings)
            return maps[key]

        self.depths: list[DecoderDepth] = []
        self.cross_attentions, places = distinct_cross_attentions(self.decoder)
        for depth, place in enumerate(places):
            parts = self.decoder.sublayers_at(depth)
            own, cross = parts["self_attn"], parts["cross_attn"]
            self.depths.append(
                DecoderDepth(
                    self_projection=once(joined, own.q_proj, own.k_proj, own.v_proj, scale=scale),
                    self_output=once(joined, own.out_proj),
                    cross_query=once(joined, cross.q_proj, scale=scale),
                    cross_output=once(joined, cross.out_proj),
                    feed_forward=once(feed_forward, parts["feed_forward"]),
                    parts=parts,
                    cross_index=place,
                )
            )

    def _compute_cross_keys_values(self, encoder_hidden_states: Tensor, attention_mask: Tensor | None) -> None:
        """Compute the keys and values of every distinct cross-attention, once."""
        linears = [linear for cross in self.cross_attentions for linear in (cross.k_proj, cross.v_proj)]
        batch, length, _ = encoder_hidden_states.shape
        projected = joined(*linears, pack=False)(encoder_hidden_states)
        heads = projected.view(batch, length, len(linears), -1, self.d_k).permute(2, 0, 3, 1, 4)
        if heads.device.type == "cpu":
            heads = heads.to(torch.promote_types(heads.dtype, torch.float32))
        further = _rounded_up(length, heads) - length
        # (2 * cross-attentions, batch, num_heads, source_length, d_k)
        self.cross_kv = nn.functional.pad(heads, (0, 0, 0, further)).contiguous()
        self.cross_mask: Tensor | None = None
        if further or (attention_mask is not None and not bool(attention_mask.all())):
            mask = encoder_hidden_states.new_ones((batch, length)) if attention_mask is None else attention_mask
            padding = nn.functional.pad(mask, (0, further)) == 0
            as_scores = torch.zeros_like(padding, dtype=self.cross_kv.dtype).masked_fill(
                padding, lowest_of(self.cross_kv)
            )
            self.cross_mask = as_scores.unsqueeze(1)  # (batch, 1, source_length)
            # To a source without a token attention gives zeros, as in the model.
            self.cross_kv[:, padding.all(dim=1)] = 0.0

    def next_log_probs(self, tokens: Tensor) -> Tensor:
        """Log-probabilities `(batch, num_beams, vocab_size)` of what follows the newest tokens `(batch, num_beams)`."""
        if self.length == 0:  # all beams of a sentence are alike: one is enough
            tokens = tokens[:, :1]
        mask = self._take_slots(tokens.size(1))
        hidden_states = self.decoder.embed(tokens, None) + self._encoding()
        for depth, layer in enumerate(self.depths):
            parts = layer.parts
            attended = layer.self_output(self._attend_to_past(layer, depth, hidden_states, mask))
            hidden_states = parts["self_attn_layer_norm"](hidden_states + attended)
            keys, values = self.cross_kv[2 * layer.cross_index :][:2]
            query = layer.cross_query(hidden_states).unflatten(-1, (-1, self.d_k)).transpose(1, 2)
            attended = layer.cross_output(attention(query, keys, values, self.cross_mask))
            hidden_states = parts["cross_attn_layer_norm"](hidden_states + attended)
            hidden_states = parts["feed_forward_layer_norm"](hidden_states + layer.feed_forward(hidden_states))
        self.length += 1
        logits = self.output(self.model.lm_head_projection(hidden_states))
        log_probs: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        return log_probs.expand(-1, self.num_beams, -1)

    def _encoding(self) -> Tensor:
        """The encoding of the newest position, `(d_model,)` (section 3.5)."""
        positions = self.decoder.embed_positions
        if self.length < positions.num_positions:
            encoding: Tensor = positions.table[self.length]
        else:
            encoding = positions(torch.tensor([self.length], device=self.cross_kv.device), self.length + 1)[0]
        return encoding.to(self.decoder.embed_tokens.weight.dtype)

    def _take_slots(self, number: int) -> Tensor:
        """Take so many new slots of the past; return the mask of what the newest tokens may attend to: `(batch, number,
        key_length)`, each its own slot and those of its ancestors.
        """
        start, end = self.slots, self.slots + number
        if end > self.ancestors.size(-1):
            self.past = torch.cat((self.past, torch.zeros_like(self.past)), dim=-2)
            self.ancestors = torch.cat((self.ancestors, torch.full_like(self.ancestors, self.lowest)), dim=-1)
        self.ancestors[:, :, start:end] = 0.0 if number == 1 else self.own_slot
        self.slots = end
        return self.ancestors[:, :number, : _rounded_up(end, self.past)]

    def _attend_to_past(self, layer: DecoderDepth, depth: int, hidden_states: Tensor, mask: Tensor) -> Tensor:
        """Self-attention of the newest tokens, whose keys and values it adds to the past: `(batch, num_beams,
        d_model)`.
        """
        projected = layer.self_projection(hidden_states).unflatten(-1, (3, -1, self.d_k))
        by_heads = projected.permute(2, 0, 3, 1, 4)  # (3, batch, num_heads, num_beams, d_k)
        past, new = self.past[depth], hidden_states.size(1)
        past[:, :, :, self.slots - new : self.slots] = by_heads[1:]
        keys, values = past[..., : mask.size(-1), :]
        return attention(by_heads[0], keys, values, mask)

    def reorder(self, parents: Tensor) -> None:
        """Go on with other beams: `parents` `(batch, num_beams)` says which of the old beams each new one extends."""
        if self.num_beams > 1:
            index = parents.unsqueeze(-1).expand(-1, -1, self.ancestors.size(-1))
            self.ancestors = self.ancestors.gather(1, index)

    def keep(self, sentences: Tensor) -> None:
        """Go on with some of the sentences, `(remaining,)` indices in the batch; only what moves is copied."""
        number = sentences.numel()
        moved = (sentences != torch.arange(number, device=sentences.device)).nonzero().flatten()
        origins = sentences[moved]
        for tensor, dim in ((self.ancestors, 0), (self.cross_mask, 0), (self.cross_kv, 1), (self.past, 2)):
            if tensor is not None:
                tensor.index_copy_(dim, moved, tensor.index_select(dim, origins))
        self.ancestors, self.past = self.ancestors[:number], self.past[:, :, :number]
        self.cross_kv = self.cross_kv[:, :number]
        self.cross_mask = None if self.cross_mask is None else self.cross_mask[:number]


def distinct_cross_attentions(decoder: Any) -> tuple[list[Any], list[int]]:
    """The cross-attentions of a decoder, each once, and which of them every depth uses."""
    distinct: list[Any] = []
    places = []
    for depth in range(decoder.num_layers):
        cross = decoder.sublayers_at(depth)["cross_attn"]
        if not any(cross is known for known in distinct):
            distinct.append(cross)
        places.append(next(place for place, known in enumerate(distinct) if known is cross))
    return distinct, places


def lowest_of(tensor: Tensor) -> float:
    """What a mask adds to a score that must not count; still a number in bfloat16, to which autocast takes float32."""
    return torch.finfo(tensor.dtype).min / 2


def _rounded_up(length: int, tensor: Tensor) -> int:
    """The next multiple of what fills a register, so that a softmax over as many keys is fast."""
    multiple = row_multiple(tensor)
    return -(-length // multiple) * multiple


def feed_forward(network: Any) -> Map:
    """The feed-forward network (section 3.3) in evaluation; one that someone has changed, as itself."""
    if type(network) is not FeedForward or not has_plain_call(network):
        return cast(Map, network)
    activation = network.activation
    if activation is nn.functional.relu or type(activation) is nn.ReLU:
        first, second = joined(network.fc1, relu=True), joined(network.fc2)
        return lambda inputs: second(first(inputs))
    first, second = joined(network.fc1), joined(network.fc2)
    return lambda inputs: second(activation(first(inputs)))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax(Q K^T) V of scaled queries (section 3.2.1), heads side by side.

    Args:
        query: `(batch, num_heads, num_beams, d_k)`.
        key: `(batch, num_heads, key_length, d_k)`.
        value: `(batch, num_heads, key_length, d_k)`.
        mask: Added to the scores, `(batch, num_beams or 1, key_length)`.

    Returns:
        `(batch, num_beams, num_heads * d_k)`.
    """
    scores = query.to(key.dtype) @ key.transpose(-2, -1)
    if mask is not None:
        scores += mask.unsqueeze(1)
    heads = scores.softmax(dim=-1) @ value
    return heads.transpose(1, 2).flatten(2).to(query.dtype)


class Ensemble:
    """Several models as one: the mean of their probabilities.

    Args:
        members: With the same vocabulary, each knowing the sources.
    """

    def __init__(self, members: Sequence[IncrementalDecoder]) -> None:
        self.members = members

    def next_log_probs(self, tokens: Tensor) -> Tensor:
        """The logarithm of the mean of the members' probabilities, `(batch, num_beams, vocab_size)`."""
        log_probs = [member.next_log_probs(tokens) for member in self.members]
        return torch.stack(log_probs).logsumexp(dim=0) - torch.tensor(float(len(log_probs))).log()

    def reorder(self, parents: Tensor) -> None:
        """See `IncrementalDecoder.reorder`."""
        for member in self.members:
            member.reorder(parents)

    def keep(self, sentences: Tensor) -> None:
        """See `IncrementalDecoder.keep`."""
        for member in self.members:
            member.keep(sentences)
