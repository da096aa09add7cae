"""Static facts of a kernel launch: tile shapes, the problem's sizes, and how the work is cut into windows.

The unit of work is a *(row block, window)* pair: one block of rows of the hidden states against one contiguous range of
vocabulary tiles. Its running statistics never leave the chip; only its result is written. Few rows with many windows
fill the chip as well as many rows with few windows do.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import numpy as np

from pallas_ce.backends import device as targets

Kernel = Literal["forward", "stash", "dlogits"]

COMPUTE_WARPGROUPS = 2

# Shared memory of one thread block on sm_90, and what barriers, alignment and vectors by row may take of it.
SHARED_MEMORY_BYTES = 227 * 1024
RESERVED_BYTES = 3072

# A block of 64 rows of 128 bytes on its way to memory, for each warpgroup.
_STAGED_BYTES = COMPUTE_WARPGROUPS * 64 * 128

# Partial statistics are the forward's only temporary memory; there are no more windows than fit in this.
PARTIALS_BYTES = 12 * 2**20

_COMPUTE_CAPABILITY = "9.0"

_MOST_WINDOWS = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape and schedule of a kernel; what a tuner varies.

    Attributes:
        rows: rows of hidden states that one compute warpgroup multiplies, a multiple of 64; two are stacked in a tile,
            unless they work in ping-pong.
        columns: vocabulary entries of a tile.
        depth: hidden elements of one pipeline stage.
        stages: pipeline stages in shared memory.
        cluster: which tile the two thread blocks of a cluster share by multicast: "columns" when they work on the same
            vocabulary tile and different rows, "rows" for the reverse, None for clusters of one.
        in_flight: asynchronous products that may be outstanding when a stage is given back, 0 or 1.
        lead: pipeline stages by which the first warpgroup keeps ahead of the second, so that one multiplies while the
            other is in its epilogue; 0 leaves them to themselves.
        ping_pong: whether each warpgroup multiplies every second tile, alone, and works on its product
            while the other multiplies. The registers must hold all of a tile. Each makes a partial result.
        row_group: row blocks that are worked on at the same time; their hidden states should stay in the L2 cache.
        windows: windows the vocabulary is cut into; None to choose.
        piece: columns of a tile that an epilogue works on at a time; it divides `columns`. None: all.
        sms: how many thread blocks may run at once; None: as many as the GPU has multiprocessors.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    stages: int = 4
    cluster: Literal["rows", "columns"] | None = "columns"
    in_flight: int = 0
    lead: int = 0
    ping_pong: bool = False
    row_group: int = 8
    windows: int | None = None
    piece: int | None = None
    sms: int | None = None

    def __post_init__(self) -> None:
        if self.rows % 64:
            raise ValueError(f"rows={self.rows} must be a multiple of 64, the rows of one wgmma instruction")
        if self.columns % 16 or not 64 <= self.columns <= 256:
            raise ValueError(f"columns={self.columns} must be a multiple of 16 from 64 to 256")
        if self.width % 16 or self.columns % self.width:
            raise ValueError(f"piece={self.piece} must be a multiple of 16 that divides columns={self.columns}")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        if not 0 <= self.lead <= self.stages:
            raise ValueError(f"lead={self.lead} must be between 0 and stages={self.stages}")
        if self.ping_pong and self.lead:
            raise ValueError(f"ping_pong goes with lead=0, not {self.lead}")
        if self.in_flight not in (0, 1):
            raise ValueError(f"in_flight={self.in_flight} must be 0 or 1")

    @property
    def width(self) -> int:
        """Columns that an epilogue works on at a time."""
        return self.piece or self.columns

    @property
    def staged(self) -> int:
        """Where an epilogue stores: blocks of 64 rows of 128 bytes that a warpgroup may have on their way to memory.

        Four in exchange for a pipeline stage measured slower. Beside the other's product there is time to wait for one.
        """
        return 1 if self.ping_pong else 2

    @property
    def tile_rows(self) -> int:
        """Rows of a thread block's tile."""
        return self.rows * (1 if self.ping_pong else COMPUTE_WARPGROUPS)

    @property
    def partials(self) -> int:
        """Partial results of an item: of blocks of a cluster that share its rows, of warpgroups in ping-pong."""
        return (2 if self.cluster == "rows" else 1) * (COMPUTE_WARPGROUPS if self.ping_pong else 1)

    @property
    def cluster_size(self) -> int:
        """Thread blocks of a cluster."""
        return 1 if self.cluster is None else 2

    @property
    def clusters(self) -> int:
        """How many clusters work at once."""
        return max(1, (self.sms or targets.multiprocessors()) // self.cluster_size)

    @property
    def block_rows(self) -> int:
        """Rows of a work item: a cluster's."""
        return self.tile_rows * (2 if self.cluster == "columns" else 1)

    @property
    def block_columns(self) -> int:
        """Vocabulary entries that a cluster works on at once."""
        return self.columns * (2 if self.cluster == "rows" else 1)


# Tiles (rows, columns, piece, ping_pong) of a kernel with few vectors by row, with which no register spills.
TILES: dict[Kernel, tuple[tuple[int, int, int | None, bool], ...]] = {
    "forward": ((64, 256, None, False), (128, 192, 64, True), (128, 128, None, False)),
    "stash": ((64, 256, 128, False), (64, 256, None, False), (128, 192, 64, True)),
    "dlogits": ((64, 256, 64, False), (128, 128, None, False), (128, 192, 64, True)),
}


# The fastest tiles. An H200's 132 sms are 12 row blocks by 11 windows, whose operands are the least to read.
PING_PONG = Config(128, 192, stages=5, cluster=None, in_flight=1, ping_pong=True, row_group=12, piece=64)

# The same for pairs of blocks that load the vocabulary's tiles once: 6 of their row blocks by 11 windows.
IN_PAIRS = dataclasses.replace(PING_PONG, cluster="columns", row_group=6)

# In a long forward thread blocks that share no loads drift so far apart that the L2 cache no longer holds a tile until
# the last of them has read it. On an H200 they keep `pace` from so many multiplications on, a launch of 3 ms. An H100's
# lose by that, and share loads in pairs from so many logits on; few rows are not rounded up to pairs of blocks.
_KEEPS_PACE = "H200"
PACED_MULTIPLICATIONS = 2**40
_PAIRED_LOGITS, _PAIRED_ROWS = 2**29, 2048

# What an epilogue that is hidden saves of a product, on an H200.
_COST_PING_PONG = 0.96

# With how many vectors by row none of its registers spills: without options, and with some.
_VECTORS_IN_TURNS: dict[Kernel, tuple[int, int]] = {"forward": (3, 1), "stash": (3, 0), "dlogits": (3, 0)}


def most_stages(kernel: Kernel, config: Config) -> int:
    """Pipeline stages that fit into shared memory beside what the epilogue stages, for 16-bit operands."""
    fixed = RESERVED_BYTES + (0 if kernel == "forward" else config.staged * _STAGED_BYTES)
    return (SHARED_MEMORY_BYTES - fixed) // (2 * config.depth * (config.tile_rows + config.columns))


def default_tiles(kernel: Kernel, vectors: int, options: int) -> Config:
    """Tiles with which no register spills, for `rule`.

    Args:
        kernel: which one.
        vectors: how many statistics or coefficients it keeps by row.
        options: how many of bias, scale, soft cap and given u the head has.
    """
    if vectors <= _VECTORS_IN_TURNS[kernel][options > 0]:
        return PING_PONG
    if options >= 2 or (kernel != "forward" and vectors > 4):
        return Config(rows=64, columns=128, stages=5, piece=64)
    plain: dict[Kernel, Config] = {
        "forward": Config(rows=64, columns=256, in_flight=1),
        "stash": Config(rows=64, columns=256, piece=128, in_flight=1, lead=2),
        "dlogits": Config(rows=64, columns=256, piece=64, in_flight=1),
    }
    return plain[kernel]


def rule(kernel: Kernel, rows: int, columns: int, vectors: int, options: int) -> Config:
    """`default_tiles` for `rows` × `columns` logits on the GPU traced for."""
    tiles = default_tiles(kernel, vectors, options)
    paired = kernel == "forward" and rows * columns >= _PAIRED_LOGITS and rows >= _PAIRED_ROWS
    if tiles == PING_PONG and paired and not _device_keeps_pace():
        return IN_PAIRS
    return with_least_padding(tiles, rows)


def keeps_pace(config: Config, rows: int, columns: int, length: int) -> bool:
    """Whether the thread blocks of a forward with those tiles keep `pace` on the GPU traced for."""
    alone = config.ping_pong and config.cluster is None
    return alone and rows * columns * length >= PACED_MULTIPLICATIONS and _device_keeps_pace()


def _device_keeps_pace() -> bool:
    return _KEEPS_PACE in (targets.cuda_kind() or _KEEPS_PACE)


def with_least_padding(config: Config, rows: int) -> Config:
    """The cluster whose blocks of rows reach least beyond `rows`; what lies beyond is computed for nothing."""
    if config.cluster != "columns":
        return config
    lower = dataclasses.replace(config, cluster="rows")
    return min(config, lower, key=lambda c: -rows % c.block_rows)


class GradientConfigs(NamedTuple):
    """Tiles of the kernels that make gradients: dlogits, and the products for hidden states and weight."""

    dlogits: Config
    hidden: Config
    weight: Config


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the tiles of a problem are handed out; see `schedule`.

    Attributes:
        row_blocks: work items along the rows.
        column_blocks: steps of a cluster along the columns.
        windows: work items along the columns or, if split, parts of the length.
        clusters: how many work at once.
        split: whether windows cut the length, and tiles are work items.
    """

    row_blocks: int
    column_blocks: int
    windows: int
    clusters: int
    split: bool = False

    @property
    def items(self) -> int:
        """Work items in all."""
        return self.row_blocks * self.windows * (self.column_blocks if self.split else 1)


class Product(NamedTuple):
    """Static facts of a kernel's product.

    Attributes:
        length: how many numbers each entry of the product sums over.
        left_axis: 0 for a left operand `[rows, length]`, 1 for `[length, rows]`.
        right_axis: 0 for a right operand `[columns, length]`, 1 for `[length, columns]`.
        config: tiles.
        schedule: how they are handed out.
        rank: how many numbers of a low-rank term each entry sums over besides, from operands of its own.
    """

    length: int
    left_axis: int
    right_axis: int
    config: Config
    schedule: Schedule
    rank: int = 0

    @property
    def own_steps(self) -> int:
        """Steps along the operands' rows, without those along the term's."""
        return -(-self.length // self.config.depth)

    @property
    def steps(self) -> int:
        """All steps of a tile."""
        return self.own_steps - (-self.rank // self.config.depth)


def device_refusal() -> str | None:
    """Why what is lowered for cannot run the kernels; None where it can, as Pallas' interpreter does."""
    compiled_for = jax.sharding.get_abstract_mesh().abstract_device
    if compiled_for is None and targets.interpreted():
        return None
    if (kind := targets.cuda_kind()) is None:
        return "its kernels are for Hopper GPUs, and this process has no CUDA device; use 'xla'"
    capability = targets.compute_capability(kind)
    if capability == _COMPUTE_CAPABILITY:
        return None
    told = kind if capability is None else f"{kind}, of {capability}"
    return f"its kernels are for Hopper GPUs, of compute capability 9.0, and this one is {told}; use 'xla'"


def schedule(
    config: Config,
    rows: int,
    vocab_size: int,
    bytes_per_row: int,
    partial_bytes: int = PARTIALS_BYTES,
) -> Schedule:
    """The schedule of `rows` × `vocab_size` logits.

    Args:
        config: tile shapes; its `windows` if given.
        rows: N.
        vocab_size: V.
        bytes_per_row: bytes of partial statistics of one row and window; 0 if a window leaves none.
        partial_bytes: what partial statistics may take in all.
    """
    row_blocks = -(-rows // config.block_rows)
    column_blocks = -(-vocab_size // config.block_columns)
    clusters = config.clusters
    if config.windows is not None:
        windows = min(config.windows, column_blocks)
    else:
        # What runs at one time is to be one group of row blocks: more of them, and the cache would not hold their rows.
        least = -(-clusters // config.row_group) if row_blocks > config.row_group else 1
        row_bytes = config.partials * bytes_per_row * row_blocks * config.block_rows
        most = _MOST_WINDOWS if row_bytes == 0 else min(_MOST_WINDOWS, max(1, partial_bytes // row_bytes))
        least = min(least, most, column_blocks)
        windows = choose_windows(row_blocks, column_blocks, min(config.row_group, row_blocks), clusters, least, most)
    return Schedule(row_blocks, column_blocks, windows, min(clusters, row_blocks * windows))


def cost(config: Config, rows: int, columns: int) -> float:
    """Time of a product of `rows` × `columns` for each number it sums over; 1 for each entry of full blocks together.

    Blocks and rounds of all SMs are made full, if no round is wasted.
    """
    blocks = -(-rows // config.block_rows) * -(-columns // config.block_columns)
    entries = -(-blocks // config.clusters) * config.clusters * config.block_rows * config.block_columns
    return entries * (_COST_PING_PONG if config.ping_pong else 1.0)


@functools.cache
def choose_windows(row_blocks: int, column_blocks: int, row_group: int, clusters: int, least: int, most: int) -> int:
    """The number of windows from `least` to `most` that lets all clusters finish soonest; the fewest within 0.4 %.

    Starting and finishing a window costs about a twentieth of a tile, so that windows are no shorter than they need be.
    """
    times = []
    for windows in range(least, min(most, column_blocks) + 1):
        tiles = np.diff(np.arange(windows + 1) * column_blocks // windows)
        times.append(busiest(tiles + 0.05, row_blocks, row_group, clusters))
    return least + next(i for i, time in enumerate(times) if time <= 1.004 * min(times))


def busiest(window_times: np.ndarray, row_blocks: int, row_group: int, clusters: int) -> float:
    """Work of the busiest cluster, in the unit of `window_times [windows]`; clusters take items in turn."""
    groups, last = divmod(row_blocks, row_group)
    times = np.concatenate([np.tile(np.repeat(window_times, row_group), groups), np.repeat(window_times, last)])
    rounds = -(-times.size // clusters)
    padded = np.zeros(rounds * clusters)
    padded[: times.size] = times
    return float(padded.reshape(rounds, clusters).sum(axis=0).max())
