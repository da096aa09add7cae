"""How an axis is cut into tiles of one size: the ragged-edge rule, in one place.

The last of several tiles starts early, so that every tile has the same size and no operand is padded or copied; the
part that an earlier tile covered is marked not valid, contributes nothing and is left alone when results are written.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ce.streaming.loops import fori_loop

# Each is work for the compiler. With more there are enough rows that the host need not be quick: 32768 rows of 4096
# 16-bit numbers, in the forward's parts of 12 MiB, are 22.
_MOST_WITHOUT_LOOP = 22


def pad(x: jax.Array, sizes: tuple[int, ...], value: float = 0) -> jax.Array:
    """`x` padded at the end of each axis to `sizes`."""
    if x.shape == sizes:
        return x
    return jnp.pad(x, [(0, size - old) for old, size in zip(x.shape, sizes, strict=True)], constant_values=value)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Columns in tiles of one size."""

    total: int
    size: int
    limit: jax.Array | None = None  # `[]`; columns from there on are valid in no tile; None: all are
    # Whether a last tile that starts early is worked on outside of the loop over the others. XLA has a GPU's products
    # read and write slices in place where these are evenly spaced; else it copies them.
    last_apart: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.total:
            raise ValueError(f"size={self.size} must lie between 1 and total={self.total}")

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return -(-self.total // self.size)

    @property
    def few(self) -> bool:
        """Whether they are so few that programs may hold the work on each, in place of a loop.

        XLA answers a conditional on a GPU by itself where the branches hold no loop; else the host waits to be told.
        """
        return self.count <= _MOST_WITHOUT_LOOP

    def tile(self, index: jax.Array | int) -> "Tile":
        """The tile of that index; the index may be traced."""
        start = jnp.minimum(jnp.int32(index) * self.size, self.total - self.size)
        columns = start + jnp.arange(self.size, dtype=jnp.int32)
        first = None if self.total % self.size == 0 else jnp.int32(index) * self.size
        valid = None if first is None else columns >= first
        if self.limit is not None:
            valid = columns < self.limit if valid is None else valid & (columns < self.limit)
        return Tile(start, self.size, first, columns=columns, valid=valid, number=index)

    @property
    def _looped(self) -> int:
        """How many, the first ones, a loop goes over."""
        return self.total // self.size if self.last_apart else self.count

    def fold[State](
        self,
        part: Callable[["Tile"], State],
        merge: Callable[[State, State], State],
        neutral: Callable[[State], State] | None = None,
    ) -> State:
        """`part` of each tile, joined from the left. The first tile's columns are all its own.

        Where `neutral` makes a part without columns, like one whose shapes and dtypes it is given, the program holds
        the work on one tile of several only once: the first is one of the loop's.
        """

        def joined(i: jax.Array | int, done: State) -> State:
            return merge(done, part(self.tile(i)))

        if neutral is not None and self._looped > 1:
            done = self._loop(0, joined, neutral(jax.eval_shape(lambda: part(self.tile(0)))))
        else:
            done = self._loop(1, joined, part(self.tile(0)))
        return _behind(joined, self.count - 1, done) if self._looped < self.count else done

    def for_each[Carry](self, body: Callable[["Tile", Carry], Carry], init: Carry) -> Carry:
        """`init` carried through `body(tile, carry)`, from the last tile to the first.

        Where the last overlaps its neighbour, what it writes there is replaced.
        """
        if self._looped < self.count:
            init = body(self.tile(self.count - 1), init)
        return self._loop(0, lambda i, carry: body(self.tile(self._looped - 1 - i), carry), init)

    def _loop[Carry](self, start: int, body: Callable[[jax.Array | int, Carry], Carry], init: Carry) -> Carry:
        """A loop, or what XLA would make of one with a single trip."""
        alone = self.last_apart and self._looped - start == 1
        return _behind(body, start, init) if alone else fori_loop(start, self._looped, body, init)


def _behind[Carry](body: Callable[[jax.Array | int, Carry], Carry], index: int, carry: Carry) -> Carry:
    """`body(index, carry)`, all of it after what `carry` comes from, whose memory it is to use."""
    return body(*lax.optimization_barrier((jnp.int32(index), carry)))


@dataclasses.dataclass(frozen=True)
class Columns:
    """Neighbouring columns: a tile, which may start early, or a part, which may run over the end."""

    start: jax.Array | int  # `[]`, the first
    size: int  # how many
    first: jax.Array | None = None  # `[]`, the first that counts; None: `start`
    count: jax.Array | int | None = None  # `[]`, how many there are before the end; None: all


@dataclasses.dataclass(frozen=True)
class Tile(Columns):
    """One tile; `first` is the first column that no tile before has, None where it has all by itself."""

    _: dataclasses.KW_ONLY
    columns: jax.Array  # their ids `[size]`
    valid: jax.Array | None  # `[size]`, which of them are its own and below the limit; None: all
    number: jax.Array | int  # which tile it is

    def take(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """The tile's part of `x` along `axis`, columns that are not valid included."""
        return x if x.shape[axis] == self.size else lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, buffer: jax.Array, values: jax.Array, axis: int = 0) -> jax.Array:
        """`buffer` with the tile's part replaced, columns that are not valid included."""
        if buffer.shape == values.shape:
            return values
        return lax.dynamic_update_slice_in_dim(buffer, values, self.start, axis)

    def add(self, buffer: jax.Array, values: jax.Array, axis: int = 0) -> jax.Array:
        """Adds in `buffer`'s dtype. Values of columns that are not valid must be 0.

        On a GPU XLA adds in place where it need not know the place: where it does, it copies the buffer.
        """
        unknown = dataclasses.replace(self, start=lax.optimization_barrier(self.start))
        place = unknown if isinstance(self.number, int) else self
        return place.put(buffer, place.take(buffer, axis) + values.astype(buffer.dtype), axis)
