"""What a backend fills in: seven functions, what memory is worth to it, and what it may offer besides.

A backend is a module or a folder. It knows nothing of losses, cotangents' origins, masks, chunk loops,
differentiation or sharding: the modes in `modes/` bring rows block by block and take statistics or gradients back.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import numpy as np

from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec
from pallas_ce.statistics.gradient import Coefficients
from pallas_ce.statistics.logits import Distances
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.budget import default_bytes
from pallas_ce.streaming.gradient_products import NO_GRADIENT, Arrays, PerInput, TileStep, WeightGradient
from pallas_ce.streaming.rows import RowBlock
from pallas_ce.streaming.selection import Largest
from pallas_ce.streaming.tiles import Columns

Implementation = Literal["mosaic_gpu", "triton", "xla", "reference"]
Mode = Literal["recompute", "in_forward"]
Backward = Literal["auto", "recompute", "in_forward"]

IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


class Plan(NamedTuple):
    """Block sizes of a call; static."""

    rows: int  # of a block
    columns: int  # vocabulary columns of a tile
    scratch_bytes: int  # what the blocks take at their largest, beside inputs, outputs and accumulators
    vocab_size: int  # entries that the tiles cover: V, or with some of the weight's padding, whose logits do not count
    skips_rows: bool = False  # whether work on a block skips the rows behind its `filled` ones by itself
    # Whether there is room for a product of few rows in parts, which fill the chip and are added up.
    splits: bool = True
    slower: str | None = None  # why the other mode is faster however large the blocks, as the end of a sentence
    last_apart: bool = False  # see `Tiles`


class Gradient(NamedTuple):
    """What the gradients of n rows are made of.

    In the batch that comes with it no target of a row repeats: later places have `NO_TARGET`, and a coefficient of 0.
    """

    coefficients: Coefficients  # `[n]` each, normalised and `measured_from_largest`; 0 in rows that are not valid
    reference: jax.Array | None = None  # `[n]`, each row's largest logit, which others are measured from, if needed
    argmax: jax.Array | None = None  # `[n]`, if needed
    needs: PerInput[bool] = NO_GRADIENT  # which products, see `HeadSpec.needed_products`
    factor: jax.Array | float = 1.0  # `[]`, what undoes the normalisation
    weight_sum: WeightGradient | None = None  # in_forward's, where the weight's share goes, if it is needed
    hidden_dtype: np.dtype | None = None  # hidden's share of in_forward may be rounded to it; None: the accumulator's


class Launch(NamedTuple):
    """A kernel that makes a block's logits, as `explain` tells it."""

    kernel: str  # its name, as profilers show it
    tile_rows: int  # of the tile that a thread block works on
    tile_columns: int


class TopKFinder(Protocol):
    """How the k largest logits of a block of rows are found, and how large blocks are; hashable."""

    def block_sizes(self, tokens: int) -> Plan:
        """Block sizes for `tokens` rows, at least one.

        Raises:
            ValueError: the budget cannot hold one row.
        """

    def find(self, head: Head, batch: Batch, plan: Plan) -> tuple[Largest, Partial]:
        """Of a block's rows: the k largest logits before temperature with their ids, and the `Partial` after it."""


class Materialized(Protocol):
    """Kernels for logits `[n, V']` that the caller holds, hidden states of a head of `NO_WEIGHT`; all rows at once."""

    def refusal(self, spec: HeadSpec, rows: int | None = None) -> str | None:
        """Why it cannot serve such logits, `rows` of them if known, as the end of a sentence; None where it can."""

    def statistics(self, head: Head, logits: jax.Array, names: frozenset[str]) -> Partial:
        """The `Partial` over the vocabulary, of statistics that need no target."""

    def dlogits(self, head: Head, gradient: Gradient, batch: Batch, valid: jax.Array | None) -> jax.Array:
        """dlogits in the logits' dtype; exactly 0 in rows where `valid [n]` is False, whatever they hold.

        There is at least one coefficient, and labels `[n]` are -1 for no target.
        """


# `(part, filled)` -> dlogits `[n, c]` of a part's columns, 0 in those that do not count and in rows from `filled` on.
PairDlogits = Callable[[Columns, jax.Array | None], jax.Array]


class Pairs(Protocol):
    """Kernels for a student's head and a teacher's, whose logits are stored for a block of rows and read together."""

    def minimum_scratch(self, heads: tuple[HeadSpec, HeadSpec]) -> int:
        """The fewest bytes `plan` can work with."""

    def plan(self, heads: tuple[HeadSpec, HeadSpec], tokens: int, mode: Mode | None, scratch_bytes: int) -> Plan:
        """Block sizes for the forward (`mode=None`), whose blocks have all columns, or for the recompute backward."""

    def logits(
        self, heads: Sequence[Head], batches: Sequence[Batch], part: Columns | None, filled: jax.Array | None
    ) -> list[Distances]:
        """Each head's logits of all columns or of a part, in the same tiles; rows from `filled []` on are undefined."""

    def recompute(
        self, head: Head, batch: Batch, dlogits: PairDlogits, gradient: Gradient, plan: Plan, block: RowBlock
    ) -> TileStep:
        """As `Backend.recompute`, for the student's `dlogits`; the `gradient` has no coefficients."""


class Backend(Protocol):
    """The functions of a backend. A `batch` is one block of n rows.

    Attributes:
        name: as in `Implementation`.
        checked_regions: whether it can be traced inside a `shard_map` with `check_vma=True`.
        top_k: `(spec, k, scratch_bytes)` to a finder, if it has one of its own.
        materialized: kernels for materialized logits, if it has any.
        pairs: kernels for two heads, if it has any.
        describe: `(spec, options, mode, rows)` to the kernel that makes logits of plain cross entropy for as many rows,
            for `explain`, if one does; `options` is how many of bias, scale and soft cap the head has.
    """

    name: str
    checked_regions: bool = True
    top_k: Callable[[HeadSpec, int, int | None], TopKFinder] | None = None
    materialized: Materialized | None = None
    pairs: Pairs | None = None
    describe: Callable[[HeadSpec, int, Mode | None, int], Launch] | None = None

    def on(self, platform: str | None) -> "Backend":
        """The backend as it works for that platform; None: for the one that is traced for."""
        return self

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN, *, padded_share: bool = False) -> str | None:
        """Why this backend cannot serve such a head or such rows, as the end of a sentence; None where it can.

        `padded_share`: the head is a device's share of a padded vocabulary, with `Head.valid_columns`.
        """
        return None

    def slower(self, spec: HeadSpec, targets: int = 0, tokens: int = 1) -> str | None:
        """Why XLA is faster for such a head and K `targets` a row, which this one serves by name only; None if not."""
        return None

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """The fewest bytes `plan` can work with."""

    def default_scratch(self, spec: HeadSpec, mode: Mode | None, *, alone: bool = False) -> tuple[int, int]:
        """Bytes that blocks may take where the caller sets no bound: in all, and for each logit.

        `alone`: a single block of in_forward, beside what it spares of the weight's sum; 0 if larger blocks gain
        nothing. Float32 operands get twice the bytes: their rows are to be as many.
        """
        return (2 if spec.dtype.itemsize > 2 else 1) * default_bytes(spec.vocab_size), spec.accumulator.itemsize

    def copy_bytes(self, spec: HeadSpec, dtype: np.dtype) -> int:
        """Bytes of a copy of a weight in `dtype`, where it is made whole and beside the scratch."""
        return 0

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """Block sizes for the plain forward (`mode=None`) or for a backward mode.

        They fit within `scratch_bytes`, which is at least `minimum_scratch`. Where there are several blocks, an array
        of up to `spare_bytes` costs nothing beside: it lies where the gradient will, once all blocks are done.
        """

    def weight_bits(self, spec: HeadSpec) -> tuple[int, int] | None:
        """The shape of an array kept beside a bfloat16 gradient of the weight while blocks of rows are added to it.

        The array is bfloat16; the backend decides what its bits mean. None: sums are in the accumulator dtype.
        """
        return None

    def empty_sum(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """What in_forward's sum for the weight begins as, over several blocks: anything, if the first replaces it."""
        return jax.lax.empty(shape, dtype)

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, filled: jax.Array | None = None
    ) -> Partial:
        """Partial statistics over the whole vocabulary; nothing of size n·V is stored.

        Statistics of rows from `filled []` on are undefined.
        """

    def recompute(self, head: Head, batch: Batch, gradient: Gradient, plan: Plan, block: RowBlock) -> TileStep:
        """For the recompute mode: prepares a block for the step that recomputes one tile of its logits.

        The step returns hidden's sum `[N, H]`, by place, with the block's `dlogits·weight_tile` added; the weight's
        array with `dlogitsᵀ·hidden`; and the tile's other products, all before the scale and the normalisation. Tiles
        come from the last to the first. The caller applies `gradient.factor`, which a `WeightGradient.scale` contains.
        """

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, Any]:
        """For the in-forward mode: statistics of one block, and whatever `stash_products` needs of its logits.

        Statistics of rows that are not valid may be anything finite.
        """

    def stash_products(
        self, head: Head, batch: Batch, gradient: Gradient, stash: Any, sums: Arrays, plan: Plan, block: RowBlock
    ) -> tuple[Arrays, jax.Array | None]:
        """Products of one block from its stash, before the scale; and the bits of the weight's sum.

        `factor` times the block's share is added to the `sums` by column, `[V', ...]`, and the weight's goes where
        `gradient.weight_sum` says. The other `sums` are not read. The weight's array is in the accumulator dtype or, if
        it is rounded at once or has bits, the weight's; if it is replaced, the weight's padding stays. See also
        `empty_sum`. The products by row, for hidden and down, are undefined in rows that are not valid.
        """
