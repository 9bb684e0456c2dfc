"""What a rank of a distributed conformance test runs; imported in advance by the server that forks the ranks."""

import pickle

import torch

from tests.conformance import archive

archive.load()

import hf_vanilla_trm  # noqa: E402, F401 - registers the model
from tests.conformance import testers  # noqa: E402, F401 - its classes are pickled by name


def run_rank(rank: int, payload: bytes) -> None:
    """Call the pickled function with the rank and the pickled arguments."""
    torch.set_num_threads(1)
    function, args = pickle.loads(payload)
    function(rank, *args)
