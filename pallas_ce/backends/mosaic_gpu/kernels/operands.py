"""From a head and a block of rows to what a kernel takes: aligned matrices and padded vectors.

TMA reads rows whose length is a multiple of 16 bytes. The tiled layout of wgmma needs a little more: the number of a
matrix's rows must be a multiple of 8, their length one of 16 elements (32 bytes). Hidden states are padded where need
be, which costs little. The weight is not padded:

* Of a `[V, H]` weight a kernel works on the first `⌊V/8⌋·8` entries, a view. The other entries, at most seven, are the
  *tail* and are left to XLA.
* Where H, or V of a `[H, V]` weight, is no multiple of 16, a view does not help and a padded copy is made
  (`weight_copied`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import launch, layouts
from pallas_ce.backends.mosaic_gpu.gemm.launch import Numbers
from pallas_ce.backends.mosaic_gpu.gemm.pipeline import COUNTED, Epilogue, multiply
from pallas_ce.backends.mosaic_gpu.kernels.epilogues import LogitSpec
from pallas_ce.backends.mosaic_gpu.schedule.config import PARTIALS_BYTES, Config, Product, schedule
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.statistics.row import Partial, partial_of_tile
from pallas_ce.streaming.tiles import pad as pad

ROW_MULTIPLE = 8
LENGTH_MULTIPLE = 16

# Padding is computed for nothing.
_VOCABULARY_PER_PADDING = 64

# Bytes at whose multiples Mosaic wants all arrays to begin.
ALIGNMENT = 256


def padded_spec(spec: HeadSpec) -> HeadSpec:
    """The head as the kernels work on it best: a little padding for vocabulary, where that makes rows of 32 bytes.

    Products then read stored logits and weight where they are.
    """
    padding = spec.weight_rows - spec.vocab_size
    aligned = spec.weight_rows % LENGTH_MULTIPLE == 0
    pays = aligned and 0 < padding <= spec.vocab_size // _VOCABULARY_PER_PADDING
    return spec.with_padding() if pays else spec


def padded_head(head: Head) -> Head:
    """That head; the logits of padding do not count, and of a low-rank term padding is 0, as products will read it."""
    if padded_spec(head.spec) == head.spec:
        return head
    up = None if head.up is None else pad(head.up[: head.spec.vocab_size], head.up.shape)
    return dataclasses.replace(head.with_padding(), up=up)


def weight_copied(spec: HeadSpec) -> bool:
    """Whether the kernels need a padded copy of the weight."""
    if spec.vocab_axis == 0:
        return spec.hidden_size % LENGTH_MULTIPLE != 0 or spec.weight_rows < ROW_MULTIPLE
    return spec.weight_rows % LENGTH_MULTIPLE != 0 or spec.hidden_size % LENGTH_MULTIPLE != 0


def weight_copy_bytes(spec: HeadSpec) -> int:
    """What that copy takes, or 0."""
    return spec.dtype.itemsize * spec.weight_rows * spec.hidden_size * weight_copied(spec)


def covered(spec: HeadSpec) -> int:
    """How many of the V vocabulary entries the kernels work on; the rest is the tail."""
    if spec.vocab_axis == 1 or weight_copied(spec):
        return spec.vocab_size
    return min(spec.vocab_size, spec.weight_rows // ROW_MULTIPLE * ROW_MULTIPLE)


class Tail(NamedTuple):
    """The entries that the kernels leave to XLA.

    Attributes:
        head: theirs.
        columns: `[c]` int32, their ids.
        logits: `[n, c]`.
    """

    head: Head
    columns: jax.Array
    logits: jax.Array

    def partial(self, names: frozenset[str]) -> Partial:
        """Their `Partial`, no targets."""
        return partial_of_tile(self.logits, self.columns, None, None, self.head.logit_weights, names)


def tail(head: Head, hidden: jax.Array) -> Tail | None:
    """The entries that are not `covered`, and their logits of `hidden [n, H]`; None where there are none."""
    spec = head.spec
    first = covered(spec)
    assert head.valid_columns is None or first == spec.vocab_size, "a shard of a padded vocabulary has no tail"
    if first == spec.vocab_size:
        return None
    ids = slice(first, spec.vocab_size)
    left = spec.vocab_size - first
    rest = dataclasses.replace(
        head,
        weight=own_weight(head)[ids],
        bias=None if head.bias is None else head.bias[ids],
        up=None if head.up is None else head.up[ids],
        logit_weights=head.tile_logit_weights(first, left),
        spec=dataclasses.replace(spec, weight_rows=left, vocab_size=left),
    )
    return Tail(rest, first + jnp.arange(left, dtype=jnp.int32), rest.logits(rest.with_low(Batch(hidden))))


def apart(x: jax.Array) -> jax.Array:
    """`x` as an array of its own, which begins at a multiple of `ALIGNMENT`.

    What is sliced, by us or by a user, XLA hands to a kernel where it lies, Mosaic's or cuBLAS's, and does not look at
    its address, for which cuBLAS may refuse the algorithm that XLA has chosen. Behind a barrier it copies slices; whole
    arrays it does not.
    """
    return jax.lax.optimization_barrier(x)


def round_up(size: int, multiple: int) -> int:
    """The first multiple that is not less than `size`."""
    return -(-size // multiple) * multiple


def own_weight(head: Head) -> jax.Array:
    """The weight in the compute dtype, `apart`."""
    return apart(head.weight.astype(head.spec.dtype))


def weight_of(head: Head) -> jax.Array:
    """The weight in the compute dtype, of a shape the kernels can read."""
    spec, weight = head.spec, own_weight(head)
    width = round_up(spec.hidden_size, LENGTH_MULTIPLE)
    if spec.vocab_axis == 1:
        return pad(weight, (width, round_up(spec.weight_rows, LENGTH_MULTIPLE)))
    if weight_copied(spec):
        return pad(weight, (round_up(spec.weight_rows, ROW_MULTIPLE), width))
    rows = spec.weight_rows // ROW_MULTIPLE * ROW_MULTIPLE
    return weight if rows == spec.weight_rows else weight[:rows]


def term_of(head: Head, hidden: jax.Array, weight: jax.Array, depth: int) -> tuple[jax.Array, ...]:
    """A low-rank term's operands for `hidden [N, H]`, laid out like hidden states and `weight`, in whole steps."""
    if head.up is None:
        return ()
    spec, width = head.spec, round_up(head.spec.rank, depth)
    low, entries = head.with_low(Batch(hidden)).low, weight.shape[spec.vocab_axis]
    assert low is not None
    up = pad(head.up[:entries].astype(spec.dtype), (entries, width))
    low = pad(low, (round_up(hidden.shape[0], ROW_MULTIPLE), width))
    return apart(low), apart(up if spec.vocab_axis == 0 else up.T)


class Part(NamedTuple):
    """Vocabulary entries that a launch works on; what it stores begins with the first of them.

    Attributes:
        width: how many at most; static.
        first: `[]` int32, the first, a multiple of `walk.STEP`.
        valid: `[]` int32, how many.
    """

    width: int
    first: jax.Array
    valid: jax.Array


@dataclasses.dataclass(frozen=True)
class Operands:
    """One kernel call's operands.

    Attributes:
        product: sizes, tiles and how they are handed out.
        logits: how products become logits.
        hidden: `[N', H']`, padded.
        weight: aligned.
        term: a low-rank term's operands, see `term_of`.
        inputs: vectors by name: "bias" and "u" by column, "scale" and "valid" `[1]`.
        rows: N.
    """

    product: Product
    logits: LogitSpec
    hidden: jax.Array
    weight: jax.Array
    term: tuple[jax.Array, ...]
    inputs: dict[str, jax.Array]
    rows: int

    @property
    def padded_rows(self) -> int:
        """Rows of the schedule's blocks: what vectors by row are padded to."""
        return self.product.schedule.row_blocks * self.product.config.block_rows

    @property
    def slots(self) -> int:
        """Partial results of a row."""
        return self.product.schedule.windows * self.product.config.partials

    def by_row(self, x: jax.Array, value: float = 0) -> jax.Array:
        """A vector by row, padded."""
        return pad(x, (self.padded_rows,), value)

    def run(
        self,
        name: str,
        epilogue: Epilogue,
        outputs: dict[str, Any],
        inputs: dict[str, Any] | None = None,
        numbers: Numbers | None = None,
        *,
        paced: bool = False,
    ) -> dict[str, jax.Array]:
        """The kernel's outputs by name: of those that are arrays, after it has changed them in place.

        `inputs` are others than its own; see `launch.run`. Where it is `paced`, its thread blocks keep `pace`.
        """
        matrices, inputs = (self.hidden, self.weight, *self.term), self.inputs | (inputs or {})
        start = functools.partial(launch.run, multiply, name, self.product, matrices, epilogue, numbers=numbers)
        if not (paced or any(isinstance(x, jax.Array) for x in outputs.values())):
            return start(inputs, outputs)
        before = {k: x if isinstance(x, jax.Array) else lax.empty(x.shape, x.dtype) for k, x in outputs.items()}
        if paced:
            before[COUNTED] = jnp.zeros(1, jnp.int32)

        def write(refs: dict[str, Any]) -> None:
            start({**inputs, **refs}, {})

        after = pl.run_state(write)(before)
        return {key: after[key] for key in outputs}


def stored_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of an array with a number for each logit: `[rows, columns]`, padded to what TMA can write.

    Rows that are exactly as long as one of the blocks in which tiles are stored are made longer: along an axis of one
    block the copy engine does not look at the block's number, and would write a tile's second block over its first.
    """
    padded = round_up(columns, LENGTH_MULTIPLE)
    return round_up(rows, ROW_MULTIPLE), padded + LENGTH_MULTIPLE * (padded == layouts.BLOCK)


def operands(
    head: Head,
    hidden: jax.Array,
    config: Config,
    weighted_mean: bool,
    bytes_per_row: int,
    *,
    partial_bytes: int = PARTIALS_BYTES,
    width: int | None = None,
) -> Operands:
    """Operands for `hidden [N, H]` and the vocabulary entries that are `covered`.

    Args:
        head: the head.
        hidden: `[N, H]`.
        config: of the kernel.
        weighted_mean: whether the kernel reads a given u.
        bytes_per_row: bytes a window leaves for each row.
        partial_bytes: what all windows may leave at most.
        width: how many entries a launch works on at most; None: all.
    """
    spec = head.spec
    columns, rows = covered(spec), hidden.shape[0]
    found = schedule(config, rows, width or columns, bytes_per_row, partial_bytes)
    padded = round_up(columns, config.block_columns)
    logits = LogitSpec(
        columns=columns,
        ragged=padded > columns or head.valid_columns is not None,
        counted=head.valid_columns is not None,
        bias=head.bias is not None,
        scale=head.logit_scale is not None,
        softcap=spec.softcap,
        uniform_weight=spec.uniform_weight,
    )
    if width is not None:  # a launch's last block may reach beyond the vocabulary's
        padded += config.block_columns
    inputs: dict[str, jax.Array] = {}
    if head.bias is not None:
        inputs["bias"] = pad(head.bias[:columns].astype(jnp.float32), (padded,))
    if head.logit_scale is not None:
        inputs["scale"] = head.logit_scale.astype(jnp.float32).reshape(1)
    if head.valid_columns is not None:
        inputs["valid"] = head.valid_columns.astype(jnp.int32).reshape(1)
    if weighted_mean and head.logit_weights is not None:
        inputs["u"] = pad(head.logit_weights[:columns].astype(jnp.float32), (padded,))
    length, weight = round_up(spec.hidden_size, LENGTH_MULTIPLE), weight_of(head)
    return Operands(
        product=Product(length, 0, spec.vocab_axis, config, found, spec.rank),
        logits=logits,
        hidden=pad(apart(hidden.astype(spec.dtype)), (round_up(rows, ROW_MULTIPLE), length)),
        weight=weight,
        term=term_of(head, hidden, weight, config.depth),
        inputs=inputs,
        rows=rows,
    )
