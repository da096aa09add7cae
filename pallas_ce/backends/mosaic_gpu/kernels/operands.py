"""A kernel's operands, from a head and a block of rows: aligned matrices and padded vectors.

TMA reads rows whose length is a multiple of 16 bytes. The tiled layout of wgmma needs a little more: a matrix's number
of rows must be a multiple of 8, and their length a multiple of 16 elements (32 bytes). Hidden states are padded where
need be, which costs little. The weight is padded only where nothing else helps:

* The kernels refuse a `[V, H]` weight whose V is no multiple of 8 (`refusal`): they could read a part only.
* Where H, or V of a `[H, V]` weight, is no multiple of 16, a padded copy is made (`weight_copied`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_ce.backends.mosaic_gpu.gemm import launch
from pallas_ce.backends.mosaic_gpu.gemm.launch import Numbers
from pallas_ce.backends.mosaic_gpu.gemm.loop import Epilogue
from pallas_ce.backends.mosaic_gpu.kernels.epilogues import LogitSpec
from pallas_ce.backends.mosaic_gpu.schedule import BLOCK, Config, Product
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.streaming.tiles import pad as pad

ROW_MULTIPLE = 8
LENGTH_MULTIPLE = 16

# Padding counts as vocabulary up to one entry in this many: its logits are computed for nothing.
_VOCABULARY_PER_PADDING = 64

# Mosaic wants every array to begin at a multiple of these bytes.
ALIGNMENT = 256


def padded_spec(spec: HeadSpec) -> HeadSpec:
    """The head that the kernels work on: a little padding counts as vocabulary where this aligns rows to 32 bytes.

    Products then read stored logits and weight in place.
    """
    padding = spec.weight_rows - spec.vocab_size
    aligned = spec.weight_rows % LENGTH_MULTIPLE == 0
    pays = aligned and 0 < padding <= spec.vocab_size // _VOCABULARY_PER_PADDING
    return spec.with_padding() if pays else spec


def padded_head(head: Head) -> Head:
    """The head of `padded_spec`. Padding's logits do not count; a low-rank term's padding is 0, as products read it."""
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
    """Bytes of the weight's padded copy; 0 without one."""
    return spec.dtype.itemsize * spec.weight_rows * spec.hidden_size * weight_copied(spec)


def refusal(spec: HeadSpec) -> str | None:
    """Why the kernels cannot read the weight where it lies, as the end of a sentence; None where they can."""
    readable = spec.weight_rows // ROW_MULTIPLE * ROW_MULTIPLE
    if spec.vocab_axis == 1 or weight_copied(spec) or readable >= spec.vocab_size:
        return None
    padded = round_up(spec.weight_rows, ROW_MULTIPLE)
    return (
        f"its kernels read a [V, H] weight whose V is a multiple of {ROW_MULTIPLE}, not {spec.weight_rows}; pad it to "
        f"{padded} and pass vocab_size={spec.vocab_size}, or use 'triton' or 'xla'"
    )


def apart(x: jax.Array) -> jax.Array:
    """`x` as an array of its own, which begins at a multiple of `ALIGNMENT`.

    XLA hands a slice, ours or a user's, in place to a kernel of Mosaic or cuBLAS, whatever its address. At some
    addresses cuBLAS refuses the algorithm that XLA has chosen. Behind a barrier XLA copies slices, but not whole
    arrays.
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
    """Vocabulary entries that a launch works on; the launch stores the first of them as column 0.

    Attributes:
        width: how many at most; static.
        first: `[]` int32, the first, a multiple of `loop.STEP`.
        valid: `[]` int32, how many.
    """

    width: int
    first: jax.Array
    valid: jax.Array


@dataclasses.dataclass(frozen=True)
class Operands:
    """One kernel call's operands.

    Attributes:
        product: sizes and tiles.
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
        """Rows of full tiles; vectors by row are padded to them."""
        return self.product.row_blocks * self.product.config.tile_rows

    def part(self, rows: int) -> "Operands":
        """The operands of a product of `rows` rows, which begins at the number "first_row"."""
        blocks = self.product.config.row_blocks(rows)
        return dataclasses.replace(self, product=dataclasses.replace(self.product, row_blocks=blocks))

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
    ) -> dict[str, jax.Array]:
        """Runs a kernel; returns its outputs by name.

        An output given as an array is changed in place. `inputs` come beside the operands' own; see `launch.run`.
        """
        matrices, inputs = (self.hidden, self.weight, *self.term), self.inputs | (inputs or {})
        start = functools.partial(launch.run, name, self.product, matrices, epilogue, numbers=numbers)
        if not any(isinstance(x, jax.Array) for x in outputs.values()):
            return start(inputs, outputs)
        before = {k: x if isinstance(x, jax.Array) else lax.empty(x.shape, x.dtype) for k, x in outputs.items()}

        def write(refs: dict[str, Any]) -> None:
            start({**inputs, **refs}, {})

        return pl.run_state(write)(before)


def stored_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of an array with a number for each logit: `[rows, columns]`, padded to what TMA can write.

    Rows exactly as long as a stored tile's block are made longer: along an axis of a single block the copy engine
    ignores the block's number, and would write a tile's second block over its first.
    """
    padded = round_up(columns, LENGTH_MULTIPLE)
    return round_up(rows, ROW_MULTIPLE), padded + LENGTH_MULTIPLE * (padded == BLOCK)


def operands(head: Head, hidden: jax.Array, config: Config, weighted_mean: bool, width: int | None = None) -> Operands:
    """Operands for `hidden [N, H]` and the vocabulary.

    Args:
        head: the head.
        hidden: `[N, H]`.
        config: of the kernel.
        weighted_mean: whether the kernel reads a given u.
        width: how many entries a launch works on at most; None: all.
    """
    spec = head.spec
    columns, rows = spec.vocab_size, hidden.shape[0]
    padded = round_up(columns, config.columns)
    logits = LogitSpec(
        columns=columns,
        ragged=padded > columns or head.valid_columns is not None,
        counted=head.valid_columns is not None,
        bias=head.bias is not None,
        scale=head.logit_scale is not None,
        softcap=spec.softcap,
        uniform_weight=spec.uniform_weight,
    )
    if width is not None:  # a launch's last tile may reach beyond the vocabulary's
        padded += config.columns
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
    blocks = config.row_blocks(rows), config.column_blocks(width or columns)
    return Operands(
        product=Product(config, *blocks, length, right_axis=spec.vocab_axis, rank=spec.rank),
        logits=logits,
        hidden=pad(apart(hidden.astype(spec.dtype)), (round_up(rows, ROW_MULTIPLE), length)),
        weight=weight,
        term=term_of(head, hidden, weight, config.depth),
        inputs=inputs,
        rows=rows,
    )
