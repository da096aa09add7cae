"""How a call will be carried out: implementation, backward mode, block sizes, and the reason for each choice."""

import dataclasses
from typing import Any

from pallas_ce import arguments, backends
from pallas_ce.backends import Backend, Backward, Mode, Plan
from pallas_ce.head import PLAIN, BatchSpec, HeadSpec

DEFAULT_SCRATCH_BYTES = 512 * 2**20

# What small problems may take however few their logits: otherwise their blocks would shrink to nothing.
_SMALL_BYTES = 2**20

# Below this many rows a block, in_forward's products run far below the machine's rate and recompute is faster.
_USEFUL_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a call is carried out; static and hashable.

    Attributes:
        implementation: a backend's name, or "reference".
        mode: the backward mode; None for the reference, which has JAX's own differentiation.
        scratch_bytes: the caller's bound, or None for the default.
    """

    implementation: str
    mode: Mode | None
    scratch_bytes: int | None

    @property
    def backend(self) -> Backend:
        """The backend itself; not for "reference", which is none."""
        return backends.load(self.implementation)

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None) -> Plan:
        """Block sizes of the plain forward (`mode=None`) or of a backward mode for `tokens` rows, at least one."""
        return self.backend.plan(spec, tokens, mode, self._budget(spec, tokens, mode))

    def _budget(self, spec: HeadSpec, tokens: int, mode: Mode | None) -> int:
        least = self.backend.minimum_scratch(spec, mode)
        if self.scratch_bytes is None:
            logits = tokens * spec.vocab_size * spec.accumulator.itemsize
            return max(least, min(DEFAULT_SCRATCH_BYTES, max(logits, _SMALL_BYTES)))
        if self.scratch_bytes < least:
            raise ValueError(
                f"scratch_bytes={self.scratch_bytes} cannot hold one row of this head in the {mode or 'forward'} "
                f"pass: at least {least} bytes are needed"
            )
        return self.scratch_bytes


@dataclasses.dataclass(frozen=True)
class Choice:
    """`Settings` with their reasons, for `explain`."""

    settings: Settings
    implementation_reason: str
    mode_reason: str


def choose(
    spec: HeadSpec,
    tokens: int,
    *,
    scalar_loss: bool,
    rows: BatchSpec = PLAIN,
    backward: Backward = "auto",
    implementation: str | None = None,
    scratch_bytes: Any | None = None,
) -> Choice:
    """Chooses for `tokens` rows of a head; `scalar_loss` says whether a summed row-wise loss is what is differentiated.

    Raises:
        ValueError: the named implementation, mode or budget cannot serve the call.
    """
    scratch_bytes = arguments.check_scratch_bytes(scratch_bytes)
    name, reason = backends.choose(implementation, spec, rows)
    if name == "reference":
        if backward != "auto":
            raise ValueError(
                f"backward={backward!r} does not apply to implementation='reference', which differentiates "
                "materialised logits; leave backward='auto'"
            )
        return Choice(Settings(name, None, None), reason, "JAX differentiates the materialised logits")
    tokens = max(tokens, 1)
    undecided = Settings(name, None, scratch_bytes)
    mode, mode_reason = _mode(undecided, spec, tokens, scalar_loss, backward)
    for needed in (None, mode):
        undecided.plan(spec, tokens, needed)  # raises where the budget is too small
    return Choice(dataclasses.replace(undecided, mode=mode), reason, mode_reason)


def _mode(settings: Settings, spec: HeadSpec, tokens: int, scalar_loss: bool, backward: Backward) -> tuple[Mode, str]:
    if backward == "in_forward":
        return "in_forward", "asked for by name"
    if backward == "recompute":
        return "recompute", "asked for by name"
    if not scalar_loss:
        return "recompute", "each row has a cotangent of its own, known only in the backward"
    useful = min(-(-tokens // 4), _USEFUL_ROWS)
    try:
        rows = settings.plan(spec, tokens, "in_forward").rows
    except ValueError:
        rows = 0
    if rows >= useful:
        return "in_forward", "a scalar loss: three products instead of four, within the scratch budget"
    return "recompute", f"the scratch budget holds {rows} rows of logits, fewer than the {useful} that in_forward needs"
