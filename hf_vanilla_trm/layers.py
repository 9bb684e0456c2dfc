"""The parts of the Transformer that need nothing but torch: "Attention Is All You Need" (Vaswani et al., 2017),
section 3.1 (the shift of the decoder's input), 3.2.1, and 3.3 to 3.5.

Read it beside the paper; the equations come in the paper's order. What needs transformers (the multi-head attention of
section 3.2.2 with its choice of kernels, the encoder and decoder layers of section 3.1) stands in
`modeling_vanilla_trm.py`.

Dimensions, here and everywhere:
    batch            sentences in a batch
    source_length    positions of the encoder's input
    target_length    positions of the decoder's input
    query_length     positions that attend, key_length positions that are attended to: each is one of the two above
    d_model          width of a layer's input and output
    num_heads        h of the paper
    d_k              width of one head, d_model / num_heads; also the paper's d_v
    d_ff             inner width of the feed-forward network
    vocab_size       number of tokens

Masks: True means "may attend".
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .dropout import dropout
from .projections import Linear
from .softmax import softmax


def shift_right(labels: Tensor, *, start_token_id: int, pad_token_id: int) -> Tensor:
    """The decoder's inputs in training: the labels "offset by one position" behind the start token (section 3.1).

    Args:
        labels: `(batch, target_length)`; -100 marks positions without a target.
        start_token_id: The first input.
        pad_token_id: Stands where a label is -100.

    Returns:
        `(batch, target_length)`: the start token and all but the last label.
    """
    shifted = torch.cat((labels.new_full((labels.size(0), 1), start_token_id), labels[:, :-1]), dim=1)
    return shifted.masked_fill(shifted == -100, pad_token_id)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout_rate: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V (section 3.2.1, equation 1).

    The dot product of two vectors of d_k independent numbers of unit variance has variance d_k; dividing by sqrt(d_k)
    keeps the scores at unit variance for any d_k. Larger ones would put all weight on one key, where the softmax is
    flat and passes hardly any gradient on.

    Args:
        query: `(batch, num_heads, query_length, d_k)`.
        key: `(batch, num_heads, key_length, d_k)`.
        value: `(batch, num_heads, key_length, d_k)`.
        mask: Broadcastable to `(batch, num_heads, query_length, key_length)`: True where a query may attend, or what is
            added to the scores, 0 where it may and else the lowest finite number. A query that may attend to nothing
            gets zeros, so that an empty sentence in a batch yields no NaN, forward or backward.
        dropout_rate: Probability of dropping an attention weight.

    Returns:
        The output `(batch, num_heads, query_length, d_k)` and the weights after dropout `(batch, num_heads,
        query_length, key_length)`.
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        if mask.dtype == torch.bool:
            lowest = torch.finfo(scores.dtype).min
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, lowest)
        scores = scores + mask
    weights = softmax(scores)
    weights = dropout(weights, dropout_rate)
    return weights @ value, weights


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, the same at every position (section 3.3, equation 2).

    Args:
        d_model: Width of input and output.
        d_ff: Inner width.
        activation: The non-linearity; the paper's is ReLU.
        dropout: Dropout on the inner activations; the paper has none.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Callable[[Tensor], Tensor] = nn.functional.relu,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.fc1 = Linear(d_model, d_ff)
        self.fc2 = Linear(d_ff, d_model)
        self.activation = activation
        self.dropout = dropout

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map `(batch, length, d_model)` to the same shape."""
        inner = self.activation(self.fc1(hidden_states))  # (batch, length, d_ff)
        inner = dropout(inner, self.dropout, training=self.training)
        output: Tensor = self.fc2(inner)
        return output


def embedding_scale(d_model: int) -> float:
    """The sqrt(d_model) by which embeddings are multiplied (section 3.4).

    The embedding matrix is also the output projection, so its entries are small; the factor brings the vectors that
    enter the stacks near the size of the sines and cosines added to them.
    """
    return math.sqrt(d_model)


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same angle (section 3.5).

    Sines and cosines are interleaved. Attention is a weighted sum, which has no order: without positions a stack would
    treat a sentence as a bag of words. So they are added to the embeddings. Each pair of a sine and a cosine turns with
    its own frequency, so that PE(pos + k) is PE(pos) rotated by angles that depend on k alone: a linear map, the same
    at every position, which a head's projections can learn in order to attend "k to the left".

    Args:
        positions: Integers of any shape, without a limit.
        d_model: An even width.

    Returns:
        Shape `positions.shape + (d_model,)`, float64: the angles grow with the position, and lower precision would lose
        them. Cast it afterwards.
    """
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)  # 2i
    angles = positions.to(torch.float64).unsqueeze(-1) * torch.exp(even * (-math.log(10000.0) / d_model))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class SinusoidalPositions(nn.Module):
    """The encodings of section 3.5 for any position: those below `num_positions` are computed once, the rest when they
    are asked for.

    The table is a constant of the architecture: it follows the module from device to device and is not saved.
    """

    table: Tensor

    def __init__(self, num_positions: int, d_model: int) -> None:
        super().__init__()
        self.num_positions, self.d_model = num_positions, d_model
        self.register_buffer("table", self.compute_table(), persistent=False)

    def compute_table(self) -> Tensor:
        """The encodings of positions 0 to num_positions - 1, `(num_positions, d_model)`, in float32."""
        return sinusoids(torch.arange(self.num_positions), self.d_model).float()

    def forward(self, positions: Tensor, end: int) -> Tensor:
        """Encode `positions`, all of which are below `end`.

        Args:
            positions: `(length,)` or `(batch, length)` integers.
            end: A bound known without reading `positions`, which on a GPU would stall the device; it decides whether
                the table is long enough.

        Returns:
            `positions.shape + (d_model,)` in the table's dtype.
        """
        if end <= self.num_positions:
            return nn.functional.embedding(positions, self.table)
        return sinusoids(positions, self.d_model).to(self.table.dtype)
