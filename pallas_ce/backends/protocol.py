"""What a backend fills in, and how one is chosen.

A backend is a module with a folder of its own. It knows nothing of losses, cotangents' origins, masks, chunk loops,
differentiation or sharding: the modes in `modes/` bring rows block by block and take statistics or gradients back.
"""

from typing import Any, Literal, NamedTuple, Protocol, get_args

import jax
import numpy as np

from pallas_ce.head import PLAIN, Batch, BatchSpec, Head, HeadSpec, NeedsGrad, TileStep
from pallas_ce.statistics.gradient import Coefficients
from pallas_ce.statistics.row import Partial
from pallas_ce.streaming.rows import RowBlock

Implementation = Literal["mosaic_gpu", "xla", "reference"]
Mode = Literal["recompute", "in_forward"]
Backward = Literal["auto", "recompute", "in_forward"]

IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


class Plan(NamedTuple):
    """Block sizes of a call; static.

    Attributes:
        rows: rows a block of the chunk loop holds.
        columns: vocabulary columns of a tile.
        scratch_bytes: what the blocks take at their largest, beside inputs, outputs and accumulators.
        splits: whether that has room for a product of few rows in parts, which fill the chip and are added up.
    """

    rows: int
    columns: int
    scratch_bytes: int
    splits: bool = True


class Launch(NamedTuple):
    """A kernel that makes a block's logits, as `explain` tells it.

    Attributes:
        kernel: its name, as profilers show it.
        tile_rows: rows of the tile that a thread block works on.
        tile_columns: its vocabulary columns.
        cluster: thread blocks that share loads.
        windows: parts of the vocabulary that are worked on independently.
        source: where tile and cluster come from.
    """

    kernel: str
    tile_rows: int
    tile_columns: int
    cluster: int
    windows: int
    source: str


class Accumulators(NamedTuple):
    """Gradients under way, in the accumulator dtype or, in a single block, the weight's; None where not needed.

    Attributes:
        weight: the weight's shape.
        bias: `[V']`.
    """

    weight: jax.Array | None
    bias: jax.Array | None


class Residual(NamedTuple):
    """What the backward reads of each row beside the coefficients, `[n]` each; None where no term needs it."""

    lse: jax.Array | None
    argmax: jax.Array | None


class Backend(Protocol):
    """The functions of a backend. A `batch` is one block of n rows.

    Attributes:
        name: as in `Implementation`.
        in_checked_regions: whether it can be traced inside a `shard_map` with `check_vma=True`.
        counts_on_device: whether `statistics` skips the rows behind `valid_rows` by itself, so that the host need not
            wait for the device to tell how many rows count.
        few_launches: whether launches are what work on a few thousand numbers costs, as on a GPU, and not its
            operations: then the order of few rows takes two launches, and n² comparisons.
        narrow_stash: whether `stash` takes less than half of the wide logits' bytes, so that room is well used.
    """

    name: str
    in_checked_regions: bool
    counts_on_device: bool
    few_launches: bool
    narrow_stash: bool

    def refusal(self, spec: HeadSpec, rows: BatchSpec = PLAIN) -> str | None:
        """Why this backend cannot serve such a head or such rows, as the end of a sentence; None where it can."""

    def serves_padding(self, spec: HeadSpec) -> bool:
        """Whether it serves a device's share of a padded vocabulary, a head of `spec` with `Head.valid_columns`."""

    def takes_padding(self, spec: HeadSpec) -> bool:
        """Whether it is better at padding for vocabulary (`Head.with_padding`) than at a smaller one."""

    def minimum_scratch(self, spec: HeadSpec, mode: Mode | None) -> int:
        """The fewest bytes `plan` can work with."""

    def plan(self, spec: HeadSpec, tokens: int, mode: Mode | None, scratch_bytes: int, spare_bytes: int = 0) -> Plan:
        """Block sizes for the plain forward (`mode=None`) or for a backward mode.

        They fit within `scratch_bytes`, which is at least `minimum_scratch`. Where there are several blocks, an array
        of up to `spare_bytes` costs nothing beside: it lies where the gradient will, once all blocks are done.
        """

    def launches(self, spec: HeadSpec, options: int, mode: Mode | None, plan: Plan) -> tuple[Launch, ...]:
        """The kernels that make one block's logits for the plain cross entropy; none where XLA does.

        `options` is how many of bias, scale and soft cap the head has. Gradient products are not told.
        """

    def weight_copy_bytes(self, spec: HeadSpec) -> int:
        """Bytes of the copy that is made of a weight whose rows cannot be read where they are; 0 where none is."""

    def statistics(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, valid_rows: jax.Array | None = None
    ) -> Partial:
        """Partial statistics over the whole vocabulary; nothing of size n·V is stored.

        With `valid_rows []`, those of rows from there on may be anything.
        """

    def recompute(
        self,
        head: Head,
        batch: Batch,
        residual: Residual,
        coefficients: Coefficients,
        needs_grad: NeedsGrad,
        plan: Plan,
        block: RowBlock,
    ) -> TileStep:
        """For the recompute mode: prepares a block for the step that recomputes one tile of its logits.

        The step returns hidden's sum `[N, H]`, in visiting order, with the block's `dlogits·weight_tile` added; the
        weight's with `dlogitsᵀ·hidden`; and `Σ_i dlogits [c]`, all before the scale and the normalisation, None where
        not needs_grad. Tiles come from the last to the first. The coefficients of rows that are not valid are 0.
        """

    def replaced_weight(self, head: Head, plan: Plan, dtype: np.dtype) -> jax.Array:
        """What a whole gradient of the weight starts from: undefined, if `recompute`'s steps fill all of it."""

    def skips_rows(self, spec: HeadSpec, plan: Plan) -> bool:
        """Whether work on blocks of the plan's size skips the rows behind a block's `valid_rows` by itself."""

    def against_in_forward(self, spec: HeadSpec) -> str | None:
        """Why recompute is faster than in_forward with any scratch, as the end of a sentence; None where it is not."""

    def gathers_in_vain(self, spec: HeadSpec, plan: Plan) -> bool:
        """Whether in_forward does better not to gather rows where every row counts."""

    def accumulators(self, head: Head, needs_grad: NeedsGrad, dtype: np.dtype, *, replaced: bool) -> Accumulators:
        """What the first block's `stash_products` starts from; where there is but one block, `dtype` is the weight's.

        It may be undefined where that call `replaced` it: where rows are skipped, and so the first block is visited.
        """

    def stash(
        self, head: Head, batch: Batch, names: frozenset[str], plan: Plan, block: RowBlock
    ) -> tuple[Partial, Any]:
        """For the in-forward mode: statistics of one block, and whatever `stash_products` needs of its logits.

        Statistics of rows that are not valid may be anything finite.
        """

    def stash_products(
        self,
        head: Head,
        batch: Batch,
        residual: Residual,
        coefficients: Coefficients,
        factor: jax.Array,
        stash: Any,
        accumulators: Accumulators,
        needs_grad: NeedsGrad,
        plan: Plan,
        block: RowBlock,
    ) -> tuple[jax.Array | None, Accumulators]:
        """Gradients of one block from its stash.

        Returns `dlogits·weight [n, H]`, undefined in rows that are not valid, and the accumulators with
        `factor·dlogitsᵀ·hidden` and `factor·Σ_i dlogits` added, before the scale; `factor []` undoes the coefficients'
        normalisation, and the coefficients of rows that are not valid are 0.
        """
