"""Few shapes for many token counts: rows are padded up to the next of a short list of sizes.

JAX compiles for each shape. Packed batches have another number of tokens each time, so their rows are padded, and the
padding masked like ignored tokens, which cost no products. Padding costs a copy of the rows, and from 1024 rows on at
most twice their memory.

Training takes two programs a bucket where the backward is one of its own, as in "recompute": at most ten up to 8192
tokens, and two more for each doubling.
"""

import torch

# Below 1024 rows the memory of padding does not matter and compilations do; from there on powers of two, which are
# what batches of one size usually have.
_SMALLEST = (256, 1024)


def bucket(rows: int) -> int:
    """The number of rows to compile for: the smallest of 256, 1024, 2048, 4096, … that holds `rows`.

    >>> [bucket(rows) for rows in (0, 256, 257, 5000, 8192)]
    [256, 256, 1024, 8192, 8192]
    """
    for size in _SMALLEST:
        if rows <= size:
            return size
    return 1 << (rows - 1).bit_length()


def pad(tensor: torch.Tensor, rows: int, value: float = 0) -> torch.Tensor:
    """`tensor [n, ...]` with rows of `value` behind, `[rows, ...]`; itself where nothing is missing."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing), value=value)
