"""One update of a tiny model; as a program under torchrun, on two ranks."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.conftest import tiny_model
from training.batching import PairCollator
from training.objective import accumulate_gradient, clip_gradient, count_targets

LENGTHS = [(7, 5), (2, 9), (4, 4), (3, 2), (6, 6), (5, 11), (3, 3), (8, 2)]
"""(source, target) tokens of eight sentences."""

RANK_SPLITS = [[[0, 1, 2, 3], [4]], [[5, 6], [7]]]
"""The sentences of each rank's two batches: 26 targets and 16."""


def make_rows(split):
    """Return batches of the sentences whose numbers `split` lists."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        {
            "input_ids": torch.randint(3, 20, (source,), generator=generator).tolist(),
            "labels": torch.randint(3, 20, (target,), generator=generator).tolist(),
        }
        for source, target in LENGTHS
    ]
    collate = PairCollator(pad_token_id=1)
    return [collate([rows[number] for number in batch]) for batch in split]


def update(model, accelerator, split, *, label_smoothing, max_grad_norm):
    """Make one step of SGD, as the training loop does with its optimizer."""
    model.train()
    batches = make_rows(split)
    accumulate_gradient(
        model,
        batches,
        count_targets(batches, accelerator),
        accelerator=accelerator,
        label_smoothing=label_smoothing,
    )
    clip_gradient(list(model.parameters()), max_grad_norm)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def main(folder, max_grad_norm):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tiny_model())
    calls = []

    def counting_hook(state, bucket):
        calls.append(bucket.index())
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, counting_hook)
    split = RANK_SPLITS[accelerator.process_index]
    update(model, accelerator, split, label_smoothing=0.1, max_grad_norm=max_grad_norm)
    if accelerator.is_main_process:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        result = {"weights": weights, "num_processes": accelerator.num_processes, "all_reduces": len(calls)}
        torch.save(result, Path(folder) / "update.pt")
    accelerator.wait_for_everyone()
    # One launch has hung, at an unknown place; the process group's teardown, which may be it, is not what is tested.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
