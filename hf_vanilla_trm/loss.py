"""Cross entropy with label smoothing (section 5.4), from hidden states and the output projection, without ever holding
all logits.

With a vocabulary of 37,000 the logits of one training batch are larger than everything else together, and reading them
back from memory takes longer than computing them. So the sum over positions is taken in chunks small enough to stay in
cache, and each chunk leaves its share of the gradient behind at once: three matrix products a chunk, as many as the
plain computation needs, and nothing is computed twice.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .projections import linear, suits_one_dnn, sum_of_outer_products

# Elements of the logits in one chunk. On a CPU a chunk should stay in the second- or third-level cache, on a GPU it
# should fill the device.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
LEAST_ROWS = 192
"""Targets in one chunk, whatever the vocabulary: each chunk reads the whole weight, and its gradient."""
ROWS_CONVERTED = 32
"""Rows of a chunk that are converted to another precision at once: few enough to stay in cache."""


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Sum over real targets of -(1 - eps) log p(y) - eps mean_v log p(v): smoothing spread over all V classes, as in
    PyTorch.

    Args:
        logits: `(..., vocab_size)`.
        labels: `(...)`; -100 marks positions without a target.
        label_smoothing: eps; the paper's is 0.1.

    Returns:
        A scalar in float32 or better; 0 where there is no target at all.
    """
    logits = logits.flatten(0, -2)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return nn.functional.cross_entropy(
        logits, labels.flatten(), reduction="sum", ignore_index=-100, label_smoothing=label_smoothing
    )


def projected_cross_entropy_sum(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, label_smoothing: float = 0.0
) -> Tensor:
    """`cross_entropy_sum` of `hidden_states @ weight.T + bias`, in chunks and over real targets only.

    Args:
        hidden_states: `(batch, target_length, d_model)`.
        weight: `(vocab_size, d_model)`.
        bias: `(vocab_size,)` or None.
        labels: `(batch, target_length)`; -100 marks positions without a target, which cost nothing here.
        label_smoothing: eps.

    Returns:
        The same scalar and the same gradients as the plain computation, up to the order of the sums.
    """
    has_target = labels != -100
    targets, hidden_states = labels[has_target], hidden_states[has_target]  # (num_targets,), (num_targets, d_model)
    if torch.is_autocast_enabled(hidden_states.device.type):
        dtype = torch.get_autocast_dtype(hidden_states.device.type)
    else:
        dtype = hidden_states.dtype
    loss: Tensor = _ProjectedCrossEntropySum.apply(
        hidden_states, weight, bias, targets, label_smoothing, dtype, torch.is_grad_enabled()
    )
    return loss


class _ProjectedCrossEntropySum(torch.autograd.Function):
    """The chunked sum; its forward also computes the gradients, which its backward only scales.

    With z the logits of a target y, the loss is log sum_v exp(z_v) - (1 - eps) z_y - eps mean_v z_v, and its gradient
    by z is softmax(z) - (1 - eps) onehot(y) - eps / V. The last term of each is linear in z and the same for all
    targets: it needs no logits, but the mean row of the weight and the sum of the hidden states. The softmax stays
    unnormalised: what has a row for each target is divided by the row's sum in its place.

    Logits, exponentials and matrix products are in `dtype`; sums and gradients in float32 or better.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        label_smoothing: float,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> Tensor:
        """Loss of `hidden_states` `(num_targets, d_model)` and `targets` `(num_targets,)`.

        `with_gradients` says whether there will be a backward: in here autograd is always off, and
        `ctx.needs_input_grad` goes by the tensors alone.
        """
        sum_dtype = torch.promote_types(dtype, torch.float32)
        needed = [with_gradients and needs for needs in ctx.needs_input_grad[:3]]
        leaves = (hidden_states, weight, bias)
        gradients = [
            leaf.new_zeros(leaf.shape, dtype=sum_dtype) if needs and leaf is not None else None
            for leaf, needs in zip(leaves, needed, strict=True)
        ]
        with torch.autocast(hidden_states.device.type, enabled=False):
            loss = _add_chunks(hidden_states, weight, bias, targets, 1 - label_smoothing, dtype, gradients)
            if label_smoothing:
                loss -= label_smoothing * _take_mean_logits(hidden_states, weight, bias, label_smoothing, gradients)
        # Autograd wants each gradient in its tensor's own precision.
        ctx.save_for_backward(
            *(
                None if gradient is None or leaf is None else gradient.to(leaf.dtype)
                for gradient, leaf in zip(gradients, leaves, strict=True)
            )
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that forward left behind."""
        # `grad_loss` is a scalar and does not promote; cast to a gradient's float16, a loss scale would be infinite.
        gradients = (None if g is None else g * grad_loss for g in ctx.saved_tensors)
        return (*gradients, None, None, None, None)


Gradients = list[Tensor | None]
"""By the hidden states, the weight and the bias; None where it is not needed."""


def _add_chunks(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    certain: float,
    dtype: torch.dtype,
    gradients: Gradients,
) -> Tensor:
    """The sum over targets of log sum_v exp(z_v) - certain * z_y, with its gradients added to `gradients`."""
    grad_hidden, grad_weight, grad_bias = gradients
    device, sum_dtype = hidden_states.device.type, torch.promote_types(dtype, torch.float32)
    loss = hidden_states.new_zeros((), dtype=sum_dtype)
    rows = max(LEAST_ROWS, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // weight.size(0))
    projection = weight.to(dtype)
    buffer = projection.new_empty(min(rows, len(targets)), weight.size(0))  # memory that is new has to be cleared
    for start in range(0, len(targets), rows):
        hidden, target = hidden_states[start : start + rows].to(dtype), targets[start : start + rows].unsqueeze(1)
        if suits_one_dnn(hidden, projection):
            logits = linear(hidden, projection)  # (rows, vocab_size)
        else:
            logits = torch.mm(hidden, projection.t(), out=buffer[: len(hidden)])
        if bias is not None:
            logits += bias.to(dtype)
        loss -= certain * logits.gather(1, target).sum(dtype=sum_dtype)
        highest = logits.amax(dim=1, keepdim=True)
        exponentials = logits.sub_(highest).exp_()
        total = _row_sums(exponentials, sum_dtype)
        loss += (highest.to(sum_dtype) + total.log()).sum()
        if grad_hidden is None and grad_weight is None and grad_bias is None:
            continue
        if dtype == torch.float16:  # sums over the vocabulary might leave its range
            exponentials /= total
            total = torch.ones_like(total)
        difference = exponentials.gather(1, target) - certain * total  # in `sum_dtype`: both may be close to each other
        by_logits = exponentials  # times `total`
        # By two indices: PyTorch's scatter_ copies a whole bfloat16 tensor there and back on a CPU.
        by_logits[torch.arange(len(target), device=target.device), target.squeeze(1)] = difference.squeeze(1).to(dtype)
        if grad_hidden is not None:
            grad_hidden[start : start + rows] = linear(by_logits, projection.t()) / total
        if grad_weight is not None:
            over_total = (hidden / total).to(dtype)
            if dtype != grad_weight.dtype or suits_one_dnn(hidden, projection):
                grad_weight += sum_of_outer_products(by_logits, over_total)
            else:
                torch.addmm(grad_weight, by_logits.t(), over_total, out=grad_weight)
        if grad_bias is not None:
            grad_bias += (by_logits / total).sum(dim=0)
    return loss


def _row_sums(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each row of `(rows, columns)` in another precision: `(rows, 1)`."""
    if values.dtype == dtype or values.device.type != "cpu":
        return values.sum(dim=1, keepdim=True, dtype=dtype)
    # PyTorch would convert the whole tensor first, in memory that is new and has to be cleared.
    return torch.cat([part.sum(dim=1, keepdim=True, dtype=dtype) for part in values.split(ROWS_CONVERTED)])


def _take_mean_logits(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, label_smoothing: float, gradients: Gradients
) -> Tensor:
    """The sum over targets of mean_v z_v; `label_smoothing` times its gradients are taken from `gradients`."""
    grad_hidden, grad_weight, grad_bias = gradients
    sum_dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    mean_row, hidden_sum = weight.mean(dim=0, dtype=sum_dtype), hidden_states.sum(dim=0, dtype=sum_dtype)
    total = hidden_sum @ mean_row
    if bias is not None:
        total += len(hidden_states) * bias.mean(dtype=sum_dtype)
    if grad_hidden is not None:
        grad_hidden -= label_smoothing * mean_row
    if grad_weight is not None:
        grad_weight -= label_smoothing / weight.size(0) * hidden_sum
    if grad_bias is not None:
        grad_bias -= label_smoothing / weight.size(0) * len(hidden_states)
    return total
