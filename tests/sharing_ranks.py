"""Gradients of every sharing mode on two ranks, with DDP and with FSDP2; a program for torchrun."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed.configuration_utils import DistributedConfig

from tests.conftest import tiny_model
from tests.updates import make_rows

HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
MODES = ("none", "attention", "ffn", "all")


def model_of(mode):
    """Six layers of which two are distinct, used as ABABBA, and factorised embeddings."""
    depths = {"encoder_layers": 6, "decoder_layers": 6, "num_unique_layers": 2, "sharing_order": "cycle_reverse"}
    return tiny_model(parameter_sharing=mode, embedding_size=8, **depths).train()


def backward(model, rows, targets):
    """The gradient of the mean over `targets`, of which these rows have a part."""
    (batch,) = make_rows([rows])
    model(**batch, num_items_in_batch=targets).loss.backward()


def gradients_of(model):
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return {name.removeprefix("module."): tensor for name, tensor in whole.items()}


def shard(model):
    """Each unit of the model's own plan, the inner ones first."""
    plan = model._resolve_parallel_plans(DistributedConfig(fsdp_size=2))[2]
    for name in plan:
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    return model


def main(folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    targets = sum(int((batch["labels"] != -100).sum()) for batch in make_rows(HALVES))
    results = {"num_processes": torch.distributed.get_world_size()}
    for mode in MODES:
        alone = model_of(mode)
        backward(alone, [row for half in HALVES for row in half], targets)
        expected = gradients_of(alone)
        for way in ("DDP", "DDP and checkpointing", "FSDP2"):
            model = model_of(mode)
            if way == "DDP and checkpointing":
                model.activation_checkpointing_enable({"use_reentrant": False})
            model = shard(model) if way == "FSDP2" else DistributedDataParallel(model)
            backward(model, HALVES[rank], targets / 2)  # both average over the ranks
            results[mode, way] = gradients_of(model), expected
            if way == "FSDP2":
                assert model.lm_head.weight is model.model.shared.weight is model.model.decoder.embed_tokens.weight
    if rank == 0:
        torch.save(results, Path(folder) / "gradients.pt")
    torch.distributed.barrier()
    os._exit(0)  # as in tests.updates


if __name__ == "__main__":
    main(sys.argv[1])
