"""Batches on several threads: the results of one, in order, and nothing left behind."""

import threading
import time

import pytest
import torch

from hf_vanilla_trm.threads import in_threads


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(workers):
    def slower_first(number):
        time.sleep((5 - number) / 200)
        return number**2

    assert list(in_threads(slower_first, range(5), workers)) == [0, 1, 4, 9, 16]


def test_items_are_computed_at_once():
    """Each waits for the other: one after the other they would wait for ever."""
    both = threading.Barrier(2, timeout=60)
    assert sorted(in_threads(lambda _: both.wait(), range(2), 2)) == [0, 1]


def test_one_worker_is_the_thread_that_asks():
    (ident,) = in_threads(lambda _: threading.get_ident(), [0], 1)
    assert ident == threading.get_ident()


@pytest.mark.parametrize(("workers", "each"), [(2, 2), (3, 1), (5, 1)])
def test_workers_divide_the_threads_and_give_them_back(four_threads, workers, each):
    assert set(in_threads(lambda _: torch.get_num_threads(), range(6), workers)) == {each}
    assert torch.get_num_threads() == 4
    (of_a_new_thread,) = in_threads(lambda _: torch.get_num_threads(), [0], 1)
    assert of_a_new_thread == 4
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [4]


def test_a_failure_is_raised_and_what_has_not_begun_is_left(four_threads):
    begun = []

    def fail(number):
        begun.append(number)
        time.sleep(0.05)
        raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item 0"):
        list(in_threads(fail, range(100), 2))
    assert len(begun) < 10
    assert torch.get_num_threads() == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("search")]


def test_closing_leaves_what_has_not_begun(four_threads):
    begun = []

    def slow(number):
        begun.append(number)
        time.sleep(0.02)
        return number

    results = in_threads(slow, range(100), 2)
    assert next(results) == 0
    results.close()
    assert len(begun) < 10
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("number", [1, 3, 5])
def test_threads_that_have_little_to_do_end(four_threads, number):
    """The last of them may not have begun when the first have done everything, and there may be more than items."""
    results = []

    def many_times():
        for _ in range(300):
            results.append(list(in_threads(lambda item: item, range(number), 5)))

    thread = threading.Thread(target=many_times, daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert results == [list(range(number))] * 300


def test_a_thread_that_cannot_be_started_is_an_error_and_no_hang(four_threads, monkeypatch):
    start, started = threading.Thread.start, []

    def only_one(self):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", only_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(in_threads(lambda number: number, range(5), 2))
