"""A block of rows of materialized logits: statistics and dlogits. How large blocks are, and what works on them."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.backends.protocol import Gradient, Materialized
from pallas_ce.dispatch import select
from pallas_ce.dispatch.select import Default
from pallas_ce.head import LogitsSpec
from pallas_ce.modes.forward import Statistics
from pallas_ce.statistics import gradient as coef
from pallas_ce.statistics.row import Partial, fields_for, fields_of, finalise, needs_labels, partial_of_tile
from pallas_ce.streaming.loops import varying
from pallas_ce.streaming.rows import RowBlock, RowBlocks, Rows

# Elements of a block of rows: 8 MiB of float32.
_BLOCK_ELEMENTS = 2**21


class MaterializedRows(NamedTuple):
    """Logits that the caller holds, all rows or a block of them.

    Attributes:
        logits: `[n, columns]`, as stored.
        labels: `[n]` or `[n, K]` int32, -1 for no target; None where none is read.
        mask: `[n]` bool, which rows count; None: all.
        logit_weights: `[columns]` in the accumulator dtype, the u of `mean_logit`; None where it is not read.
    """

    logits: jax.Array
    labels: jax.Array | None = None
    mask: jax.Array | None = None
    logit_weights: jax.Array | None = None

    def of(self, block: RowBlock) -> "MaterializedRows":
        """The rows of a block."""
        by_row = jax.tree.map(block.take, self._replace(logit_weights=None))
        return by_row._replace(logit_weights=self.logit_weights)


@dataclasses.dataclass(frozen=True)
class MaterializedSettings:
    """How a call is carried out; static and hashable.

    Attributes:
        spec: the logits' static facts.
        chunk: the most rows of a block; None for no bound but the cache's.
        implementation: "xla", or "mosaic_gpu": Hopper kernels do the work. They take all rows at once, as nothing of a
            block's size is made beside dlogits; labels have one target a row.
        default: what else may do it; None where the implementation was asked for by name, or is the only one.
    """

    spec: LogitsSpec
    chunk: int | None = None
    implementation: str = "xla"
    default: Default | None = None

    def variants(self, rows: int) -> tuple["MaterializedSettings", ...]:
        """How the `rows` that a device holds are worked on; see `entry.at_lowering`."""
        if self.default is None:
            return (self,)
        chosen, instead = (
            dataclasses.replace(self, implementation=name, default=None)
            for name in (self.implementation, self.default.instead)
        )
        return self.default.variants(chosen, instead, refusal(self.implementation, self.spec, rows) is None)

    @property
    def kernels(self) -> Materialized | None:
        """The kernels that do the work; None where XLA does it."""
        return select.load(self.implementation).materialized

    def blocks(self, tokens: int) -> RowBlocks:
        """All of `tokens` rows, at least one: rows that do not count need their zeros written too."""
        if self.kernels is not None:
            return Rows.counted(None).blocks(tokens, tokens)
        rows = max(1, _BLOCK_ELEMENTS // self.spec.columns)
        return Rows.counted(None).blocks(tokens, min(rows, tokens, self.chunk or tokens))

    @property
    def normalises(self) -> bool:
        """Whether dlogits, whose entries are p/N, could underflow in the logits' dtype before the upstream scalar."""
        return self.spec.dtype == np.float16


def decide(
    spec: LogitsSpec, logits: jax.Array, implementation: str | None, *, chunk: int | None = None, several: bool = False
) -> MaterializedSettings:
    """How a call is carried out.

    Args:
        spec: the logits' static facts.
        logits: they may know their device.
        implementation: the one asked for; None to choose.
        chunk: the most rows of a block.
        several: whether each row has several targets.

    Raises:
        ValueError: the implementation asked for cannot serve the call.
    """
    if implementation not in (None, "xla", "mosaic_gpu"):
        raise ValueError(
            f"implementation={implementation!r} does not serve materialized logits: choose 'xla' or 'mosaic_gpu'"
        )

    def refused(name: str) -> str | None:
        if several and name == "mosaic_gpu":
            return "its kernels read one index for each row, and index holds several; use 'xla'"
        backend = select.load(name)
        if backend.materialized is None and backend.capabilities.cuda_only:
            return "it has no kernels for materialized logits"
        # How many rows a device works on, under vmap and on a mesh, is known only there.
        return refusal(name, spec)

    name, _, default = select.select(implementation, refused, logits, checked=bool(varying(logits)))
    return MaterializedSettings(spec, chunk, name, default)


def refusal(implementation: str, spec: LogitsSpec, rows: int | None = None) -> str | None:
    """Why an implementation cannot serve such logits, `rows` of them if known, as the end of a sentence; else None."""
    kernels = select.load(implementation).materialized
    return None if kernels is None else kernels.refusal(spec, rows)


def block_statistics(settings: MaterializedSettings, names: frozenset[str], block: MaterializedRows) -> Statistics:
    """Primitive statistics of a block of rows; a target's has the labels' shape, and is 0 where no target is."""
    spec, (logits, labels, *_) = settings.spec, block
    partial = _partial(settings, block, names)
    if "target_logit" not in fields_of(names):
        return finalise(partial, names)
    assert labels is not None
    ids = jnp.maximum(labels, 0).reshape(labels.shape[0], -1)
    picked = spec.capped(jnp.take_along_axis(logits, ids, axis=1, mode="promise_in_bounds"))
    found = finalise(partial._replace(target_logit=picked.reshape(labels.shape)), names)
    return {name: jnp.where(labels >= 0, x, 0.0) if needs_labels(name) else x for name, x in found.items()}


def _partial(settings: MaterializedSettings, block: MaterializedRows, names: frozenset[str]) -> Partial:
    """The `Partial` over the whole vocabulary, of statistics that need no target."""
    if settings.kernels is not None and fields_for(names):
        return settings.kernels.statistics(settings.spec, block.logits, block.logit_weights, names)
    columns, valid = _columns(settings.spec)
    return partial_of_tile(settings.spec.capped(block.logits), columns, valid, None, block.logit_weights, names)


def block_gradient(
    settings: MaterializedSettings, coefficients: coef.Coefficients, block: MaterializedRows, statistics: Statistics
) -> jax.Array:
    """dlogits `[n, columns]` of a block of rows, before or after rounding; exactly 0 in rows that do not count.

    With labels `[n, K]` the target's coefficient is `[n, K]` too, and all of an id's stands at its first occurrence.
    """
    spec, (logits, labels, mask, logit_weights) = settings.spec, block
    coefficients = coef.measured_from_largest(coefficients, statistics.get("log_sum"))
    reference = statistics["max_logit"] if coefficients.need_probabilities else None
    if settings.kernels is not None:
        made_of = Gradient(coefficients, reference, statistics.get("argmax"))
        return settings.kernels.dlogits(spec, made_of, logits, logit_weights, labels, mask)
    columns, valid = _columns(spec)
    gradient = coef.dlogits(
        coefficients,
        spec.capped(logits),
        reference,
        columns,
        valid,
        labels,
        statistics.get("argmax"),
        logit_weights,
        spec.softcap,
    )
    return gradient if mask is None else jnp.where(mask[:, None], gradient, 0.0)


def _columns(spec: LogitsSpec) -> tuple[jax.Array, jax.Array | None]:
    columns = jnp.arange(spec.columns, dtype=jnp.int32)
    return columns, None if spec.columns == spec.vocab_size else columns < spec.vocab_size
