"""Losses split in every way. Run by `test_meshes.py` with eight CPU devices; prints the checks that passed.

Every check compares a sharded call with the materialised loss on one device: its value and all gradients.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_ce import (
    MeshAxes,
    linear_chain_crf,
    linear_distillation,
    linear_sample,
    linear_top_k,
)
from tests.pallas_ce.layouts import (
    ALL,
    DIFFERENTIATED,
    LAYOUTS,
    MODES,
    B,
    H,
    T,
    arrays,
    expected,
    gradients,
    loss,
    mesh,
    placed,
    same,
    sampled,
)  # fmt: skip

OF_HEAD = (1, 2, 3)  # of the arguments of the loss: weight, bias and scale


def auto() -> Iterator[str]:
    """Under jit, from the arrays' shardings alone; results lie as their inputs, and repeats are equal in every bit."""
    for i, (layout, mode, padded) in enumerate(itertools.product(LAYOUTS, MODES, (True, False))):
        if i % 8 in (1, 7):  # without padding in one of the modes
            continue
        layout = layout.with_term(padded)
        given = placed(layout, mesh(), padded)
        step = jax.jit(gradients(functools.partial(loss, padded=padded, backward=mode)))
        got = step(*given)
        same(got, expected(layout.vocabulary, padded, layout.low_rank))
        of = [given[place] for place in DIFFERENTIATED]
        for gradient, x in zip(*map(jax.tree.leaves, (got[1], of)), strict=True):
            assert gradient.sharding.is_equivalent_to(x.sharding, x.ndim), (layout, mode, x.shape)
        jax.tree.map(np.testing.assert_array_equal, step(*given), got)
        yield f"{layout.name}, {mode}, padded={padded}"


def explicit() -> Iterator[str]:
    """On explicit axes, eager and jitted, with gradients typed as their inputs."""
    on = mesh(AxisType.Explicit)
    with jax.set_mesh(on):
        for layout, mode in itertools.product(LAYOUTS, MODES):
            layout = layout.with_term(mode == "in_forward")
            given = placed(layout, on, True)
            function = gradients(functools.partial(loss, padded=True, backward=mode))
            for step in (jax.jit(function), *((function,) if layout.name == LAYOUTS[2].name else ())):
                got = step(*given)
                same(got, expected(layout.vocabulary, True, layout.low_rank))
                of = [given[i] for i in DIFFERENTIATED]
                for gradient, x in zip(*map(jax.tree.leaves, (got[1], of)), strict=True):
                    assert jax.typeof(gradient) == jax.typeof(x)
            yield f"{layout.name}, {mode}"
        hidden, weight, *_ = placed(LAYOUTS[2], on, False)
        alone = arrays(LAYOUTS[2].vocabulary, False)[:2]
        key = jax.random.key(0)
        for function in (
            lambda h, w: linear_top_k(h, w, 3),
            lambda h, w: linear_sample(key, h, w),
            lambda h, w: linear_sample(key, h, w, top_k=3),
            lambda h, w: linear_sample(key, h, w, top_p=0.8, min_p=0.01),
            jax.value_and_grad(sampled),
            jax.value_and_grad(lambda h, w: linear_chain_crf(h, jnp.argmax(h, axis=-1), w[:H])),
            jax.value_and_grad(lambda h, w: linear_distillation(h, w, h[..., ::-1], w)),
        ):
            same(jax.jit(function)(hidden, weight), function(*alone))
        yield "top-k, samples, distillation, sampled softmax, random field"


def differentiated(
    local: Callable[..., Any], axes: tuple[str, ...], specs: Any, argnums: Any, inside: bool, checked: bool
) -> Callable[..., Any]:
    """Value and gradients of `local`'s sum over the axes that split the rows, taken inside a shard_map or outside."""

    def add(x: Any) -> Any:
        return jax.lax.psum(x, axes) if axes else x

    def part(*args: Any) -> Any:
        return add(local(*args))

    def part_with_gradients(*args: Any) -> Any:
        if checked:
            return jax.value_and_grad(part, argnums)(*args)
        value, found = jax.value_and_grad(local, argnums)(*args)
        added = (jax.tree.map(add, x) if i in OF_HEAD else x for i, x in zip(argnums, found, strict=True))
        return add(value), tuple(added)

    if inside:
        out_specs = P(), tuple(specs[i] for i in argnums)
        return jax.shard_map(part_with_gradients, mesh=mesh(), in_specs=specs, out_specs=out_specs, check_vma=checked)
    mapped = jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=checked)
    return jax.value_and_grad(mapped, argnums)


def manual(checked: bool) -> Iterator[str]:
    """Inside shard_map, by axis name, differentiated inside and outside."""
    for i, (layout, mode, inside) in enumerate(itertools.product(LAYOUTS, MODES, (False, True))):
        layout = layout.with_term(i % 8 in (0, 1, 6, 7))  # in one of the modes
        grad: Any = None if checked else "inside" if inside else "outside"
        given = arrays(layout.vocabulary, True, layout.low_rank)
        count = jnp.sum(jnp.where(given[4] >= 0, given[5] * (0.5 + given[4] % 3), 0))
        local = functools.partial(
            loss, padded=True, vocabulary=layout.vocabulary, backward=mode, normalizer=count,
            mesh_axes=MeshAxes(**layout.axes, grad=grad),
        )  # fmt: skip
        function = differentiated(local, layout.only_rows, layout.specs, DIFFERENTIATED, inside, checked)
        reference = functools.partial(loss, padded=True, implementation="reference", normalizer=count)
        same(jax.jit(function)(*given), gradients(reference)(*given))
        yield f"{layout.name}, {mode}, inside={inside}"
    hidden, weight = arrays(64, False)[:2]
    given = hidden, weight, hidden[..., ::-1], weight
    for inside in (False, True):
        distilled = functools.partial(linear_distillation, normalizer=B * T)
        function = differentiated(distilled, ALL, (P(ALL), P(), P(ALL), P()), (0, 1), inside, checked)
        same(jax.jit(function)(*given), jax.value_and_grad(distilled, (0, 1))(*given))
        yield f"distillation, inside={inside}"
    if checked:
        local = functools.partial(sampled, normalizer=B * T)
        function = differentiated(local, ALL, (P(ALL), P()), (0, 1), inside=False, checked=True)
        same(jax.jit(function)(hidden, weight), jax.value_and_grad(sampled, (0, 1))(hidden, weight))
        yield "sampled softmax"


if __name__ == "__main__":
    sections = {
        "auto": auto,
        "explicit": explicit,
        "checked": functools.partial(manual, True),
        "unchecked": functools.partial(manual, False),
    }
    for passed in sections[sys.argv[1]]():
        print(f"passed: {passed}", flush=True)
