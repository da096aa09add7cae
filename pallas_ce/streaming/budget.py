"""The memory that blocks and tiles may take beside a call's inputs and outputs."""

# A call's by default, of an ordinary vocabulary.
DEFAULT_SCRATCH_BYTES = 512 * 2**20

# The default at most, and by vocabulary entry: a wider vocabulary needs more for a block of as many rows.
MOST_SCRATCH_BYTES = 2 * DEFAULT_SCRATCH_BYTES
_BYTES_PER_ENTRY = 4096

# A small problem's, however few its logits: otherwise its blocks would shrink to nothing.
_SMALL_BYTES = 2**20


def default_bytes(vocab_size: int) -> int:
    """A call's by default."""
    return min(max(DEFAULT_SCRATCH_BYTES, _BYTES_PER_ENTRY * vocab_size), MOST_SCRATCH_BYTES)


def budget(scratch_bytes: int | None, least: int, logits: int, what: str, default: int = DEFAULT_SCRATCH_BYTES) -> int:
    """The bytes that blocks and tiles may take: the caller's bound, or the default, never more than the logits.

    The fewest bytes that will do are `least`, which hold `what` the error names.
    """
    if scratch_bytes is None:
        return max(least, min(default, max(logits, _SMALL_BYTES)))
    if scratch_bytes < least:
        raise ValueError(f"scratch_bytes={scratch_bytes} cannot hold {what}: at least {least} bytes are needed")
    return scratch_bytes
