"""Stands for the helpers that the archive lacks: start the ranks of a distributed test as processes of this machine."""

import multiprocessing
import os
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

CLONE = Path(__file__).parents[3]
TIMEOUT = 240  # seconds; a test takes about ten on an idle machine


def _get_distributed_backend():
    return "gloo"


def _get_distributed_device_type():
    return "cpu"


def _get_rank_device(_rank):
    return torch.device("cpu")


def _set_rank_device(_rank):
    """A CPU has no current device to set."""


def _start_rank_processes(function, args, nprocs):
    """Run `function(rank, *args)` in `nprocs` fresh processes; raise where one fails or does not end."""
    # A server that has imported everything once and never computed forks them: a plain fork of this process would
    # inherit its autograd threads, and a spawned one would spend seconds on imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.conformance.ranks"])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CLONE), os.environ.get("PYTHONPATH", "")])
    from tests.conformance.ranks import run_rank

    payload = pickle.dumps((function, args))
    ranks = [context.Process(target=run_rank, args=(rank, payload), daemon=True) for rank in range(nprocs)]
    for process in ranks:
        process.start()
    end = time.monotonic() + TIMEOUT
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        if any(process.exitcode not in (None, 0) for process in ranks):
            break  # the others wait for the one that failed
        time.sleep(0.05)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    exit_codes = [process.exitcode for process in ranks]
    if any(exit_codes):
        raise RuntimeError(f"the {nprocs} ranks ended with {exit_codes}; their messages are on standard error")


def run_distributed(world_size):
    """A decorator: call the function in `world_size` ranks of one process group, its first argument being the rank."""

    def decorate(function):
        def start(*args):
            store = dist.TCPStore("localhost", 0, world_size=None, is_master=True, wait_for_workers=False)
            _start_rank_processes(_join_group_and_call, (function, store.port, world_size, args), world_size)

        return start

    return decorate


def _join_group_and_call(rank, function, port, world_size, args):
    names = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "WORLD_SIZE": world_size,
        "RANK": rank,
        "LOCAL_RANK": rank,
    }
    os.environ.update({name: str(value) for name, value in names.items()})
    store = dist.TCPStore("localhost", port, world_size=None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    function(rank, *args)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
