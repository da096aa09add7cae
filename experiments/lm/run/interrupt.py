"""Ctrl-C and SIGTERM as a polite request: finish the step, save, leave. A second one ends the process at once."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether and by which signal the run was asked to stop."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = signal_number


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within the block, Ctrl-C and SIGTERM are noted in the object yielded instead of ending the process."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python delivers signals to the main thread only.
        return
    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
