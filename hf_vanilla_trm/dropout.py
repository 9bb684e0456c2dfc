"""Dropout (section 5.4) that costs little on a CPU.

PyTorch draws a random number for every element with a generator that a CPU runs slowly: at d_model 256 that is a sixth
of a training step in bfloat16. Here one draw of 64 bits decides over four elements.
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
    dropped = min(round(rate * LANES), LANES - 1)
    bits = torch.empty(-(-inputs.numel() // 4), dtype=torch.int64, device="cpu").random_(-(2**63), None)
    lanes = bits.view(torch.int16)[: inputs.numel()].view(inputs.shape)
    outputs: Tensor = _Scale.apply(inputs, lanes >= dropped - LANES // 2, LANES / (LANES - dropped))
    return outputs


class _Scale(torch.autograd.Function):
    """Zeros where a mask is False, and the inputs times a number elsewhere; it keeps a byte for each element until the
    backward pass.
    """

    @staticmethod
    def forward(inputs: Tensor, kept: Tensor, scale: float) -> Tensor:
        """Any shape, with a mask of the same."""
        return inputs * kept.to(inputs.dtype).mul_(scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the mask."""
        _, kept, ctx.scale = inputs
        ctx.save_for_backward(kept)

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """The same of the gradient."""
        (kept,) = ctx.saved_tensors
        return grad_outputs * kept.to(grad_outputs.dtype).mul_(ctx.scale), None, None


class Dropout(nn.Dropout):
    """`nn.Dropout` by way of `dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map any shape to the same."""
        return dropout(input, self.p, training=self.training)
