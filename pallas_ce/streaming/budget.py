"""The memory that blocks and tiles may take beside a call's inputs and outputs."""

# A call's by default.
DEFAULT_SCRATCH_BYTES = 512 * 2**20

# A small problem's, however few its logits: otherwise its blocks would shrink to nothing.
_SMALL_BYTES = 2**20


def budget(scratch_bytes: int | None, least: int, logits: int, what: str, default: int = DEFAULT_SCRATCH_BYTES) -> int:
    """The bytes that blocks and tiles may take: the caller's bound, or the default, never more than the logits.

    The fewest bytes that will do are `least`, which hold `what` the error names.
    """
    if scratch_bytes is None:
        return max(least, min(default, max(logits, _SMALL_BYTES)))
    if scratch_bytes < least:
        raise ValueError(f"scratch_bytes={scratch_bytes} cannot hold {what}: at least {least} bytes are needed")
    return scratch_bytes
