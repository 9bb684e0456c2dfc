"""One update's gradient: the mean over every target token of the effective batch, whatever it is split into.

An update's batch may come as several micro-batches on several ranks. The mean of their means is not the mean over
tokens, so the tokens of the whole update are counted first, and each micro-batch's loss is its sum over that count.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator, DistributedType
from torch.distributed.tensor import DTensor

from training.batching import Batch

IGNORED = -100
"""The label of padding, which is no target (PyTorch's `ignore_index`)."""


class TrainingDivergedError(RuntimeError):
    """Losses or gradients are no longer finite numbers."""


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
        accelerator: Scales the loss, and synchronises the ranks' gradients once, at the last micro-batch (DDP).
        label_smoothing: Passed to the model.

    Returns:
        This rank's share of the loss, a detached scalar: the sum over ranks is the loss per target token.
    """
    loss_share = torch.zeros((), device=accelerator.device)
    # Divided parameters (FSDP) synchronise at every micro-batch: a whole gradient to add to is what they avoid.
    waits = accelerator.distributed_type != DistributedType.FSDP
    for number, batch in enumerate(batches, start=1):
        with accelerator.no_sync(model) if waits and number < len(batches) else nullcontext():
            on_device = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            with accelerator.autocast():
                loss = model(**on_device, label_smoothing=label_smoothing, num_items_in_batch=num_targets).loss
            loss_share += loss.detach()
            # DDP averages gradients over the ranks; ours are shares of one sum.
            accelerator.backward(loss * accelerator.num_processes)
    return loss_share


def clip_gradient(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
    """Scale the update's gradient down to a norm of at most `max_norm`; the gradient of fp16 is to be unscaled before.

    Args:
        parameters: The model's, each once.
        max_norm: 0 leaves the gradient as it is.

    Returns:
        The global L2 norm before, the same on every rank. Where the gradient is not finite, neither is it.
    """
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if isinstance(norm, DTensor):  # of FSDP
        norm = norm.full_tensor()
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)
