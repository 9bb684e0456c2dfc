"""One update's gradient: the mean over every target token of the effective batch, whatever it is split into.

An update's batch may come as several micro-batches on several ranks. The mean of their means is not the mean over
tokens, so the tokens of the whole update are counted first, and each micro-batch's loss is its sum over that count.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator

IGNORED = -100
"""The label of padding, which is no target (PyTorch's `ignore_index`)."""

Batch = dict[str, torch.Tensor]


def count_targets(batches: Sequence[Batch], accelerator: Accelerator) -> torch.Tensor:
    """Count the target tokens of one update, over its micro-batches and all ranks.

    Returns:
        An int64 scalar, the same on every rank, on the accelerator's device: reading it would wait for the device.
    """
    count = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    total = torch.tensor(count, device=accelerator.device)
    return accelerator.reduce(total, "sum") if accelerator.num_processes > 1 else total


def accumulate_gradient(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    num_targets: torch.Tensor,
    *,
    accelerator: Accelerator,
    label_smoothing: float,
) -> torch.Tensor:
    """Add to the parameters' gradients that of the update's loss per target token.

    Args:
        model: The prepared model, in training mode.
        batches: This rank's micro-batches on the host; every rank has as many.
        num_targets: What `count_targets` returned for them.
        accelerator: Scales the loss, and synchronises the ranks' gradients once, at the last micro-batch.
        label_smoothing: Passed to the model.

    Returns:
        This rank's share of the loss, a detached scalar: the sum over ranks is the loss per target token.
    """
    loss_share = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(batches, start=1):
        with nullcontext() if number == len(batches) else accelerator.no_sync(model):
            on_device = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            loss = model(**on_device, label_smoothing=label_smoothing, num_items_in_batch=num_targets).loss
            loss_share += loss.detach()
            # DDP averages gradients over the ranks; ours are shares of one sum.
            accelerator.backward(loss * accelerator.num_processes)
    return loss_share
