"""What the ranks of a run must do alike: end between two updates, leave an evaluation, fail.

Decisions are made on the host, through a process group of its own, so that none of them waits for a device.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed
from accelerate import Accelerator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class OtherRankFailedError(RuntimeError):
    """Another rank has met an error, about which it tells itself."""


class StopRequest:
    """Turns SIGTERM and Ctrl-C, within a `with` block, into a request that is taken up at the next safe place.

    A second Ctrl-C interrupts at once. In a thread that is not the main one, which gets no signals, it does nothing.

    Attributes:
        signal: The signal that came first, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._interrupted = False

    def __enter__(self) -> "StopRequest":
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS if in_main_thread}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def __call__(self) -> bool:
        """Return whether this process was asked to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What the process exits with once all is saved: 0, or what a shell calls an interrupted program."""
        return 128 + signal.SIGINT if self.signal == signal.SIGINT else 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self.signal = self.signal or signal.Signals(number)


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Hold signals back while processes are started, which inherit that until `leave_stopping_to_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_stopping_to_parent(worker: int) -> None:
    """Let a loading process go on when the whole group is asked to stop: the process it loads for ends it in time."""
    del worker
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def loading_errors_named() -> Iterator[None]:
    """Say in one line that a loading process was killed, which its loader says by a RuntimeError.

    Raises:
        ChildProcessError: In its place.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ChildProcessError(f"a process that loads data was killed: {str(error).splitlines()[0]}") from error


class Ranks:
    """Agreement between the processes that train together. Every rank makes the same calls in the same order.

    Args:
        accelerator: Knows how many there are.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.number = accelerator.process_index
        self.group = torch.distributed.new_group(backend="gloo") if accelerator.num_processes > 1 else None

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set on some rank."""
        if self.group is None:
            return flags
        tensor = torch.tensor(flags, dtype=torch.uint8)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=self.group)
        return tuple(bool(flag) for flag in tensor)

    def agree_on(self, number: int) -> bool:
        """Return whether `number` is the same on all ranks."""
        if self.group is None:
            return True
        bounds = torch.tensor([number, -number])
        torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(bounds[0] == -bounds[1])

    def gather(self, number: float) -> list[float]:
        """Return the number of every rank, in order, exactly."""
        if self.group is None:
            return [number]
        own = torch.tensor([number], dtype=torch.float64)
        numbers = [torch.zeros_like(own) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(numbers, own, group=self.group)
        return [float(tensor) for tensor in numbers]

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank if one of them has met an error, so that none waits for it in vain.

        Args:
            error: What this rank has met, if anything.

        Raises:
            Exception: The rank's own error.
            OtherRankFailedError: On the others.
        """
        (failed,) = self.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise OtherRankFailedError("another rank has failed; it says why")

    def together(self, action: Callable[[], None]) -> None:
        """Do something on every rank; if that fails on one, fail on all, as `raise_together` says."""
        error = None
        try:
            action()
        except Exception as caught:
            error = caught
        self.raise_together(error)
