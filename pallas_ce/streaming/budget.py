"""The memory that blocks and tiles may take beside a call's inputs and outputs."""

# A call's by default.
DEFAULT_SCRATCH_BYTES = 512 * 2**20

# A small problem's, however few its logits: otherwise its blocks would shrink to nothing.
_SMALL_BYTES = 2**20


def budget(scratch_bytes: int | None, least: int, logits: int, what: str, default: int = DEFAULT_SCRATCH_BYTES) -> int:
    """The bytes that blocks and tiles may take.

    Args:
        scratch_bytes: the caller's bound, or None for the default, which is never more than the logits would take.
        least: the fewest bytes that will do.
        logits: bytes of the logits.
        what: what the fewest bytes hold.
        default: the default.
    """
    if scratch_bytes is None:
        return max(least, min(default, max(logits, _SMALL_BYTES)))
    if scratch_bytes < least:
        raise ValueError(f"scratch_bytes={scratch_bytes} cannot hold {what}: at least {least} bytes are needed")
    return scratch_bytes
