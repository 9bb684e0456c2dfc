"""The softmax of attention (section 3.2.1), with rows that have nothing to attend to, and fast for short rows."""

import torch
from torch import Tensor, nn

VECTOR_BYTES = 64
"""Of the longest registers of a CPU."""
ALIGNED_ROW = 8
"""Elements of which the rows of a matrix should be multiples on an accelerator."""


def row_multiple(tensor: Tensor) -> int:
    """Elements of which the rows of a tensor of this precision and device should be multiples."""
    return VECTOR_BYTES // tensor.element_size() if tensor.device.type == "cpu" else ALIGNED_ROW


def softmax(scores: Tensor) -> Tensor:
    """The softmax over the last dimension, and zeros for a row of nothing but the lowest finite numbers.

    A further column takes the whole weight of such a row: its score is below all real ones, and above the lowest
    number. (With -inf in the place of that, the row would be 0/0, and NaN in its gradient.) On a CPU there are enough
    further columns to fill a vector register: for shorter rows PyTorch's softmax takes ten times as long.
    """
    length, lanes = scores.size(-1), row_multiple(scores)
    further = lanes - length % lanes
    padded = nn.functional.pad(scores, (0, further), value=torch.finfo(scores.dtype).min / 2)
    return padded.softmax(dim=-1)[..., :length]
