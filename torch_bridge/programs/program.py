"""Differentiable JAX functions as pairs of compiled programs, forward and backward.

Between the two PyTorch's autograd keeps arrays, not closures: `pallas_ce`'s `keep` says which, `compute` takes them.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from torch_bridge.dlpack.exchange import words_to_int32
from torch_bridge.programs.functions import NAMES, Arrays, Function, Options, needs_grad

# The weight is the second array of every signature.
WEIGHT = 1

# What forward and backward exchange is the same for any number of rows.
ANY_ROWS = 1024


class Shape(NamedTuple):
    """Shape and dtype of an array; an axis as long as the rows is None, and rows that pad it hold `fill`."""

    axes: tuple[int | None, ...]
    dtype: np.dtype
    fill: float = 0

    @property
    def by_row(self) -> bool:
        """Whether the first axis is as long as the rows."""
        return bool(self.axes) and self.axes[0] is None

    @property
    def in_words(self) -> bool:
        """Whether it is passed as 32-bit words (see `torch_bridge.dlpack.exchange.share`)."""
        return self.dtype == np.int64

    def struct(self, rows: int) -> jax.ShapeDtypeStruct:
        """How it is passed for a number of rows."""
        sizes = [rows if axis is None else axis for axis in self.axes]
        if self.in_words:
            return jax.ShapeDtypeStruct((*sizes[:-1], 2 * sizes[-1]), np.int32)
        return jax.ShapeDtypeStruct(tuple(sizes), self.dtype)


class Signature(NamedTuple):
    """All that a program is compiled for, except the number of rows; with nothing to differentiate nothing is kept."""

    function: Function
    options: Options
    arrays: tuple[tuple[str, Shape], ...]
    differentiated: tuple[str, ...]


class Backward(NamedTuple):
    """The compiled backward of some gradients; `run` takes what stands at the positions `reads` of `Program.taken`."""

    reads: tuple[int, ...]
    run: Callable[..., list[jax.Array]]


class Program:
    """The programs of one signature and number of rows; compiled when first called.

    Attributes:
        forward: `(*inputs) -> (*outputs, *kept)`.
        found: what the forward returns: outputs, differentiable ones first, and what else a backward needs.
        outputs: how many outputs there are.
        differentiable: how many of them have gradients.
        unread: indices of the outputs that the backward does not need.
        taken: all that a backward can take, named: inputs, `found`, cotangents, and a sum for the weight's gradient.
        staying: indices of what only a backward reads and takes a number a row. Where autograd need not see it, it
            stays with JAX, which saves two exchanges each.
        scaled: the places of gradients that the forward returns, in their inputs' dtypes, without the loss's cotangent.
        sums: how many of the gradients of hidden states and weight the forward has made.
        adds: names of inputs; where no other gradients are asked for, a backward can add the weight's to a sum.
    """

    def __init__(self, signature: Signature, rows: int) -> None:
        self.signature, self.rows = signature, rows
        self._backwards: dict[Hashable, Backward] = {}
        self.forward = jax.jit(self._forward, keep_unused=True)
        # Tracing sets the attributes that `_forward` does.
        found = jax.eval_shape(self.forward, *[shape.struct(rows) for _, shape in signature.arrays])
        sums = None if self._known is None else self._known.sums
        self.sums = 0 if sums is None else sum(x is not None for x in (sums.hidden, sums.weight))
        # Of the head. Hidden's sum is by row, like the statistics.
        of_head = () if sums is None else jax.tree.leaves(sums._replace(hidden=None))
        self.found = tuple(
            Shape((None, *x.shape[1:]) if x.shape and place not in of_head else x.shape, np.dtype(x.dtype))
            for place, x in enumerate(found)
        )
        known, cotangents = jax.tree.leaves(self._known), self.found[: self.differentiable]
        self.unread = frozenset(range(self.outputs)).difference(known)
        self.staying = frozenset(i for i in known if i >= self.outputs and self.found[i].axes == (None,))
        taken = [("what the forward kept", x) for x in self.found] + [("a cotangent", x) for x in cotangents]
        total = signature.arrays[WEIGHT][1]._replace(dtype=np.dtype(np.float32))
        self.taken: tuple[tuple[str, Shape], ...] = (*signature.arrays, *taken, ("main_grad", total))

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """How all of `taken` is passed."""
        return [shape.struct(self.rows) for _, shape in self.taken]

    def backward(self, asked: tuple[str, ...], given: tuple[bool, ...], *, adds: bool = False) -> Backward:
        """The gradients of the inputs in `asked`, from the cotangents that are `given`; no other work is done.

        With `adds` the last of `taken` is donated, and the weight's is added to it.
        """
        if (asked, given, adds) in self._backwards:
            return self._backwards[asked, given, adds]
        flat: list[Any] = self.structs()
        inputs, cotangents = len(self.signature.arrays), len(flat) - 1 - len(given)
        absent = [inputs + i for i in self.unread]
        absent += [cotangents + i for i, is_given in enumerate((*given, adds)) if not is_given]
        for place in absent:
            flat[place] = None
        traced = jax.make_jaxpr(functools.partial(self._backward, asked, adds))(*flat)
        jaxpr, used = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
        there = (position for position, struct in enumerate(flat) if struct is not None)
        reads = tuple(position for position, is_used in zip(there, used, strict=True) if is_used)
        closed = jax.extend.core.ClosedJaxpr(jaxpr, traced.consts)
        donated = len(reads) - 1 if adds else ()
        run = jax.jit(jax.extend.core.jaxpr_as_fun(closed), keep_unused=True, donate_argnums=donated)
        return self._backwards.setdefault((asked, given, adds), Backward(reads, run))

    def _named(self, inputs: Sequence[jax.Array]) -> dict[str, jax.Array]:
        return {
            name: words_to_int32(x) if shape.in_words else x
            for (name, shape), x in zip(self.signature.arrays, inputs, strict=True)
        }

    def _forward(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        function, differentiated = self.signature.function, self.signature.differentiated
        arrays = self._named(inputs)
        problem = function.read(self.signature.options, arrays)
        known = function.steps.keep(*problem, needs_grad(differentiated)) if differentiated else None
        differentiable, others = function.compute(problem, known)
        outputs = [*differentiable, *others]
        self.differentiable, self.outputs = len(differentiable), len(outputs)
        # An array is returned once: two outputs would share memory.
        found = {id(x): i for i, x in reversed(list(enumerate(outputs)))}

        def index(x: jax.Array) -> int:
            if id(x) not in found:
                found[id(x)] = len(outputs)
                outputs.append(x)
            return found[id(x)]

        # What the backward needs: indices into outputs and kept.
        self._known = jax.tree.map(index, known)
        scaled, self.adds = function.shortcuts(problem, known)
        self.scaled: dict[str, int] = {name: index(x) for name, x in scaled.items() if x.dtype == arrays[name].dtype}
        return tuple(outputs)

    def _backward(self, asked: tuple[str, ...], adds: bool, *flat: Any) -> tuple[jax.Array, ...]:
        function, options, inputs = self.signature.function, self.signature.options, len(self.signature.arrays)
        arrays, (*cotangents, total) = self._named(flat[:inputs]), flat[inputs + len(self.found) :]
        known = jax.tree.map(lambda i: flat[inputs + i], self._known)
        if adds:
            # In place of the weight's gradient the float32 `total`, with it added where it lies.
            problem, needed = function.read(options, arrays), needs_grad(asked)
            of_sum = function.steps.add_gradients(*problem, known, needed, *cotangents, total)
            return tuple(getattr(of_sum, NAMES[name]) for name in asked)

        def differentiable(varied: Arrays) -> tuple[jax.Array, ...]:
            problem = function.read(options, {**arrays, **varied})
            return function.compute(problem, known)[0]

        found, pull = jax.vjp(differentiable, {name: arrays[name] for name in asked})
        given = (
            jnp.zeros_like(x) if cotangent is None else cotangent.astype(x.dtype)
            for x, cotangent in zip(found, cotangents, strict=True)
        )
        gradients = pull(tuple(given))[0]
        return tuple(gradients[name] for name in asked)


# The program of a signature for a number of rows.
program = functools.lru_cache(maxsize=1024)(Program)
