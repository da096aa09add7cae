"""Items made on a thread while those before them are used."""

import collections
import concurrent.futures
from collections.abc import Callable, Generator


def made_ahead[Item](make: Callable[[int], Item], numbers: range, count: int) -> Generator[Item]:
    """`make(number)` for each number in order, up to `count` made on one thread before they are asked for.

    What `make` raises comes in place of its item. Close it if it is not used up (`contextlib.closing`).
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
