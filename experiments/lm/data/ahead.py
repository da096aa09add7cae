"""Items made on a thread while those before them are used."""

import collections
import concurrent.futures
from collections.abc import Callable, Generator


def made_ahead[Item](make: Callable[[int], Item], numbers: range, count: int) -> Generator[Item]:
    """`make(number)` for each of the numbers in order, up to `count` of them made before they are asked for.

    Close it if it is not used up (`contextlib.closing`): that waits for the item being made, and no more are begun.

    Args:
        make: makes one item; called on one thread that is not the caller's, one call after the other.
        numbers: what it is called with.
        count: at least 1.

    Raises:
        Exception: what `make` raises, in place of that item; the items before it come first.
    """
    with concurrent.futures.ThreadPoolExecutor(1, "ahead") as thread:
        waiting = collections.deque(thread.submit(make, number) for number in numbers[:count])
        try:
            for number in numbers[count:]:
                item = waiting.popleft().result()
                waiting.append(thread.submit(make, number))
                yield item
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)
