"""Differentiable JAX functions as pairs of compiled programs, forward and backward, that exchange arrays only.

PyTorch's autograd keeps arrays between the two, not closures: `pallas_ce`'s `keep` says which, and `compute` takes them
back (`pallas_ce.modes.differentiation.Known`).
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

Arrays = Mapping[str, jax.Array]
Outputs = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]

# A number of rows that no other axis has: what grows with the rows is recognised by it.
_PROBE_ROWS = 1_000_003


class Function(NamedTuple):
    """A function of named arrays in the three steps of `pallas_ce`; each a function of a module, not a closure.

    Attributes:
        read: `(options, arrays) -> problem`: checks.
        keep: `(problem, names of inputs to differentiate) -> known`, a pytree of what the backward needs.
        compute: `(problem, known or None) -> (differentiable outputs, other outputs)`.
    """

    read: Callable[[Any, Arrays], Any]
    keep: Callable[[Any, frozenset[str]], Any]
    compute: Callable[[Any, Any], Outputs]


class Shape(NamedTuple):
    """Shape and dtype of an array; an axis as long as the rows is None."""

    axes: tuple[int | None, ...]
    dtype: np.dtype

    @property
    def by_row(self) -> bool:
        """Whether the first axis is as long as the rows."""
        return bool(self.axes) and self.axes[0] is None

    def struct(self, rows: int) -> jax.ShapeDtypeStruct:
        """The same for a number of rows."""
        return jax.ShapeDtypeStruct(tuple(rows if axis is None else axis for axis in self.axes), self.dtype)


@dataclasses.dataclass(frozen=True)
class Signature:
    """All that a program is compiled for, but the number of rows; static and hashable.

    Attributes:
        function: what is computed.
        options: its static options.
        arrays: name and shape of each input.
        differentiated: names of the inputs to differentiate; none of them: nothing is kept.
    """

    function: Function
    options: Hashable
    arrays: tuple[tuple[str, Shape], ...]
    differentiated: frozenset[str]


class Layout(NamedTuple):
    """What a forward returns, for any number of rows.

    Attributes:
        outputs: the function's outputs, differentiable ones first.
        differentiable: how many of them have gradients.
        reread: indices of the outputs that the backward needs.
        kept: what it needs beside those and the inputs.
    """

    outputs: tuple[Shape, ...]
    differentiable: int
    reread: frozenset[int]
    kept: tuple[Shape, ...]


class Backward(NamedTuple):
    """The compiled backward of some gradients.

    Attributes:
        reads: names of the inputs that it takes; of the others it needs nothing but their shapes.
        reads_kept: of each array kept, whether it takes it.
        run: `(arrays, outputs, kept, cotangents) -> gradients`. What it does not take may be missing or None, as may
            outputs that are not in `Layout.reread`; a cotangent of None is zero.
    """

    reads: frozenset[str]
    reads_kept: tuple[bool, ...]
    run: Callable[..., dict[str, jax.Array]]


class Program:
    """The programs of one signature and number of rows; compiled when first called."""

    def __init__(self, signature: Signature, rows: int) -> None:
        self._signature = signature
        self._known: Any = None  # tree of what the backward needs: indices into outputs and kept
        self._backwards: dict[tuple[str, ...], Backward] = {}
        self.differentiable = 0
        self.forward = jax.jit(self._forward)
        self._structs = {name: shape.struct(rows) for name, shape in signature.arrays}
        self.outputs, self.kept = jax.eval_shape(self.forward, self._structs)

    @property
    def reread(self) -> frozenset[int]:
        """Indices of the outputs that the backward needs."""
        return frozenset(i for i in jax.tree.leaves(self._known) if i < len(self.outputs))

    def backward(self, asked: tuple[str, ...]) -> Backward:
        """The gradients of the inputs in `asked`; the others' work is not done."""
        if asked not in self._backwards:
            outputs = [x if i in self.reread else None for i, x in enumerate(self.outputs)]
            given = (self._structs, outputs, self.kept, self.outputs[: self.differentiable])
            jaxpr = jax.make_jaxpr(functools.partial(self._backward, asked))(*given).jaxpr
            _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
            arrays, _, kept, _ = jax.tree.unflatten(jax.tree.structure(given), used)
            reads = frozenset(name for name, is_read in arrays.items() if is_read)
            self._backwards[asked] = Backward(reads, tuple(kept), jax.jit(functools.partial(self._backward, asked)))
        return self._backwards[asked]

    def _forward(self, arrays: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
        function, differentiated = self._signature.function, self._signature.differentiated
        problem = function.read(self._signature.options, arrays)
        known = function.keep(problem, differentiated) if differentiated else None
        differentiable, others = function.compute(problem, known)
        self.differentiable = len(differentiable)
        outputs: list[jax.Array] = [*differentiable, *others]
        # What is an output already is not returned twice: the two would share memory.
        found = {id(x): i for i, x in reversed(list(enumerate(outputs)))}
        kept: list[jax.Array] = []

        def index(x: jax.Array) -> int:
            if id(x) not in found:
                found[id(x)] = len(outputs) + len(kept)
                kept.append(x)
            return found[id(x)]

        self._known = jax.tree.map(index, known)
        return outputs, kept

    def _backward(
        self,
        asked: tuple[str, ...],
        arrays: Arrays,
        outputs: Sequence[jax.Array | None],
        kept: Sequence[jax.Array | None],
        cotangents: Sequence[jax.Array | None],
    ) -> dict[str, jax.Array]:
        function, options = self._signature.function, self._signature.options
        arrays = {name: _or_zeros(arrays.get(name), struct) for name, struct in self._structs.items()}
        saved = [*outputs, *map(_or_zeros, kept, self.kept)]
        known = jax.tree.map(lambda i: saved[i], self._known)

        def differentiable(varied: Arrays) -> tuple[jax.Array, ...]:
            return function.compute(function.read(options, {**arrays, **varied}), known)[0]

        found, pull = jax.vjp(differentiable, {name: arrays[name] for name in asked})
        given = (
            jnp.zeros_like(x) if cotangent is None else cotangent.astype(x.dtype)
            for x, cotangent in zip(found, cotangents, strict=True)
        )
        return pull(tuple(given))[0]


def _or_zeros(array: jax.Array | None, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros stand for what nothing is computed from."""
    return jnp.zeros(struct.shape, struct.dtype) if array is None else array


@functools.lru_cache(maxsize=1024)
def program(signature: Signature, rows: int) -> Program:
    """The program of a signature for a number of rows."""
    return Program(signature, rows)


@functools.lru_cache(maxsize=1024)
def layout(signature: Signature) -> Layout:
    """What the signature's forward returns."""
    probed = Program(signature, _PROBE_ROWS)

    def shape(struct: Any) -> Shape:
        return Shape(tuple(None if n == _PROBE_ROWS else n for n in struct.shape), np.dtype(struct.dtype))

    outputs, kept = tuple(map(shape, probed.outputs)), tuple(map(shape, probed.kept))
    return Layout(outputs, probed.differentiable, probed.reread, kept)
