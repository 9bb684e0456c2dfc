"""Batches on several threads of a CPU at once.

Two threads that multiply a matrix together wait for each other at its end, and one of them for the other in all that is
not divided. With a batch each they do not wait: PyTorch leaves Python's lock while it computes.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_WORKERS = 4
"""More would wait for Python's lock, with which one thread at a time says what is to be computed."""


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    """`map(function, items)`, on so many threads, between which PyTorch's own are divided.

    When the iterator is closed, or an item fails, those that have not begun are left.

    Args:
        function: Computes on the CPU. It is called in a thread that knows nothing of this one's contexts, like
            `torch.no_grad()`.
        items: What it is called with.
        workers: Threads, of which there are no more than items; 1 stays in this one.

    Yields:
        The results, in order.
    """
    workers = min(workers, len(items))
    if workers < 2:
        yield from map(function, items)
        return
    threads = torch.get_num_threads()
    together = threading.Barrier(workers)  # no thread computes while another is told how many threads it has

    def begin() -> None:
        torch.set_num_threads(max(1, threads // workers))
        together.wait()

    executor = ThreadPoolExecutor(workers, thread_name_prefix="search", initializer=begin)
    try:
        try:
            results = executor.map(function, items)  # starts a thread for each of the first items
        except BaseException:
            together.abort()  # not all threads could be started, and the others wait for them
            raise
        yield from results
    finally:
        executor.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # also for threads to come
