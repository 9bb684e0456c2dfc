"""Dropout (section 5.4) that costs little on a CPU.

PyTorch draws a random number for every element with a generator that a CPU runs slowly; for the paper's model that is
a sixth of a training step in bfloat16. Here one draw of 64 bits decides over four elements.
"""

from typing import Any

import torch
from torch import Tensor, nn

LANES = 2**16
"""Equally likely values of the 16 random bits of an element: a rate is rounded to a multiple of 1 / 65536."""


def dropout(inputs: Tensor, rate: float, *, training: bool = True) -> Tensor:
    """Zero every element with probability `rate`, and divide the others by the probability of being kept.

    Args:
        inputs: Any shape.
        rate: From 0 to below 1.
        training: Otherwise the inputs are returned.
    """
    if not training or not rate:
        return inputs
    if inputs.device.type != "cpu" or torch.compiler.is_compiling():
        return nn.functional.dropout(inputs, rate)
    outputs: Tensor = _Dropout.apply(inputs, rate)
    return outputs


def _kept(inputs: Tensor, dropped: int) -> Tensor:
    """Booleans of the shape of `inputs`, each False with probability `dropped / LANES`."""
    bits = torch.empty(-(-inputs.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    lanes = bits.view(torch.int16)[: inputs.numel()].view(inputs.shape)
    return lanes >= dropped - LANES // 2


class _Dropout(torch.autograd.Function):
    """Keeps a byte for each element until the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, rate: float) -> Tensor:
        """See `dropout`."""
        dropped = round(rate * LANES)
        ctx.scale = LANES / (LANES - dropped)
        kept = _kept(inputs, dropped)
        ctx.save_for_backward(kept)
        return inputs * kept.to(inputs.dtype).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor, None]:
        """The gradient of what was kept."""
        (kept,) = ctx.saved_tensors
        return grad_outputs * kept.to(grad_outputs.dtype).mul_(ctx.scale), None


class Dropout(nn.Dropout):
    """`nn.Dropout` by way of `dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map any shape to the same."""
        return dropout(input, self.p, training=self.training)
