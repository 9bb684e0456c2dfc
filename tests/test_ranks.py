"""Signals as requests, and what ranks decide together."""

import os
import signal
import threading
import time

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from training.ranks import Ranks, StopRequest, leave_stopping_to_parent, stop_signals_held


def send(number, stop):
    """Python runs a handler a little after the signal has come."""
    os.kill(os.getpid(), number)
    while not stop():
        time.sleep(0.001)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_becomes_a_request_and_the_handlers_come_back(number, code):
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    stop = StopRequest()
    assert not stop()
    with stop:
        assert not stop()
        send(number, stop)
        assert stop()
    assert stop.signal == number
    assert stop.exit_code == code
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_second_ctrl_c_interrupts_at_once_but_not_one_after_sigterm():
    with StopRequest() as stop:
        send(signal.SIGINT, stop)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with StopRequest() as stop:
        send(signal.SIGTERM, stop)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert stop.signal == signal.SIGTERM


def test_outside_the_main_thread_nothing_is_changed():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def enter():
        with StopRequest():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [before]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, row):
        return row, os.getpid()


def test_loading_processes_outlive_a_signal_to_the_whole_group():
    loader = DataLoader(Rows(), num_workers=2, batch_size=None, worker_init_fn=leave_stopping_to_parent)
    with stop_signals_held():
        rows = iter(loader)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) >= {signal.SIGTERM, signal.SIGINT}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGTERM, signal.SIGINT}
    seen = [next(rows)]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(int(seen[0][1]), number)
    seen += list(rows)
    assert [int(row) for row, _ in seen] == list(range(6))


def test_one_rank_agrees_with_itself():
    ranks = Ranks(Accelerator(cpu=True))
    assert ranks.any(True, False) == (True, False)
    assert ranks.agree_on(3)
    assert ranks.gather(0.1) == [0.1]
    with pytest.raises(OSError, match="full"):
        ranks.together(lambda: (_ for _ in ()).throw(OSError("full")))
