"""Static facts of a kernel: the shape of its tiles, how many there are, and the rule that chooses the shape."""

import dataclasses
from typing import Literal

import jax

from pallas_ce.backends import device as targets
from pallas_ce.head import HeadSpec

Kernel = Literal["forward", "stash", "dlogits", "logits"]

WARPGROUPS = 2

# Bytes of partial statistics, the forward's only temporary memory: a launch works on as many rows as fit.
PARTIALS_BYTES = 48 * 2**20

# Shared memory of a thread block on sm_90, without what barriers and alignment may take of it.
FREE_BYTES = 227 * 1024 - 3072

# Numbers of each row of the operands in one step. Copies may begin at multiples of it, whatever the operands' layouts.
STEP = 64

# Tiles are stored in blocks: a block's rows, and bytes of each row.
BLOCK = 64
BLOCK_BYTES = 128

# Parts of the vocabulary are multiples of this wide, and tiles of the weight's gradient divide it, so that a part's
# product ends where the next part's begins, or padding that nothing may be written to.
COLUMN_STEP = 256


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a kernel's tiles."""

    rows: int = 64  # of a warpgroup's half of a tile, a multiple of 64; two halves are stacked
    columns: int = 256  # of a tile, a multiple of 16 up to 256
    stages: int = 4  # slots of the ring, in shared memory
    row_group: int = 16  # row blocks that are worked on at one time; their rows should stay in the L2 cache
    piece: int | None = None  # columns that an epilogue works on at a time; it divides `columns`; None: all
    staged: int = 2  # blocks of a tile, 8 KiB each, that a warpgroup may have on their way to memory
    sms: int | None = None  # how many thread blocks run at once; None: as many as the GPU has multiprocessors

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.rows * WARPGROUPS

    @property
    def workers(self) -> int:
        """How many thread blocks run at once."""
        return self.sms or targets.multiprocessors()

    def row_blocks(self, rows: int) -> int:
        """How many tiles it takes along `rows` rows."""
        return -(-rows // self.tile_rows)

    def column_blocks(self, columns: int) -> int:
        """How many tiles it takes along `columns` columns."""
        return -(-columns // self.columns)


# 256 x 192 reads a quarter less than 128 x 256 for each product, and leaves the epilogue fewer registers.
TALL = Config(rows=128, columns=192, stages=3, row_group=8, piece=64, staged=3)
WIDE = Config()

# Of the kernel that stores logits: two blocks of float32 on their way to memory leave shared memory for three stages.
LOGITS = Config(rows=128, columns=128, stages=3)

# Half as tall, for rows that fill few rounds of the multiprocessors; it takes longer for each product.
_HALF = dataclasses.replace(TALL, rows=64, stages=4, row_group=16)
_HALF_COST = 1.03

# Tall tiles pay from these sizes: a shorter sum does not hide their epilogue, and fewer entries fill few rounds.
_TALL_HIDDEN_SIZE, _TALL_VOCAB_SIZE = 2048, 2**15

# Most vectors by row with which a kernel's tall tiles spill no register: without options of a head, and with some.
_VECTORS: dict[Kernel, tuple[int, int]] = {"forward": (3, 1), "stash": (3, 0), "dlogits": (3, 0)}
_PIECES: dict[Kernel, int | None] = {"forward": None, "stash": 128, "dlogits": 64}
_MANY = Config(columns=128, stages=5, piece=64)


def rule(kernel: Kernel, spec: HeadSpec, rows: int, vectors: int, options: int) -> Config:
    """Tiles of a kernel that makes logits. Only their height depends on the number of rows, so a row's bits do not.

    It has `vectors` statistics or coefficients by row, and the head `options` of bias, scale, soft cap and given u.
    """
    if kernel == "logits":
        return LOGITS
    long = spec.hidden_size >= _TALL_HIDDEN_SIZE and spec.vocab_size >= _TALL_VOCAB_SIZE
    if long and vectors <= _VECTORS[kernel][options > 0]:
        return min((TALL, _HALF), key=lambda c: cost(c, rows, spec.vocab_size) * (1 if c is TALL else _HALF_COST))
    if options >= 2 or (kernel != "forward" and vectors > 4):
        return _MANY
    return dataclasses.replace(WIDE, piece=_PIECES[kernel])


def cost(config: Config, rows: int, columns: int) -> int:
    """Time of a product `[rows, columns]` per number summed over: the entries of full tiles in full rounds."""
    tiles, workers = config.row_blocks(rows) * config.column_blocks(columns), config.workers
    return -(-tiles // workers) * workers * config.tile_rows * config.columns


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product `[rows, columns]`, or stored numbers of that shape, in tiles."""

    config: Config
    row_blocks: int  # tiles along the rows
    column_blocks: int  # and along the columns
    length: int = 0  # how many numbers each entry of the product sums over
    left_axis: int = 0  # 0 for a left operand `[rows, length]`, 1 for `[length, rows]`
    right_axis: int = 0  # 0 for a right operand `[columns, length]`, 1 for `[length, columns]`
    rank: int = 0  # numbers of a low-rank term, which has operands of its own, that each entry sums over besides
    parts: int = 1  # parts that the length is cut into; each makes a partial product, from tiles of its own
    stored: int = 0  # tiles, side by side, that are read from memory and worked on as one; 0: operands are multiplied
    held: bool = False  # whether the sum that a tile is added to comes through the ring after its operands

    @property
    def padded_rows(self) -> int:
        """Rows of full tiles; vectors by row are padded to them."""
        return self.row_blocks * self.config.tile_rows

    @property
    def own_steps(self) -> int:
        """Steps along the operands' length, without those along the term's."""
        return -(-self.length // STEP)

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.stored or -(-(self.own_steps - (-self.rank // STEP)) // self.parts)

    @property
    def workers(self) -> int:
        """Thread blocks of a launch."""
        return min(self.config.workers, self.row_blocks * self.column_blocks * self.parts)
