"""Ctrl-C and SIGTERM as a polite request: finish the step, save, leave. A second one ends the process at once."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Within the block, Ctrl-C and SIGTERM are noted; yields what returns the signal's number, or 0 without any."""
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    previous = {}
    if threading.current_thread() is threading.main_thread():  # Python delivers signals to the main thread only.
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: noted[0] if noted else 0
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
