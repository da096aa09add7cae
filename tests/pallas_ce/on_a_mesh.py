"""Any options and any layout on eight CPU devices; run by `make fuzz`, and by `test_meshes.py` in another process."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import (
    cross_entropy,
    explain,
    linear_chain_crf,
    linear_cross_entropy_and_gradients,
    selective_log_softmax,
)
from tests.pallas_ce import spoilt
from tests.pallas_ce.cases import BY_ROW, CASES, HEADS, SERVED, TEMPERED, Sizes, total
from tests.pallas_ce.checks import assert_near_oracle, library_results
from tests.pallas_ce.layouts import LAYOUTS, Layout, flat, mesh, same
from tests.pallas_ce.problems import Problem, problems
from tests.pallas_ce.sums import LOSS_SCALES, assert_adds


def by_name(layout: Layout) -> dict[str, P]:
    """How arrays of a call lie whose rows have one dimension."""
    specs = dataclasses.replace(layout, hidden=P(flat(layout.hidden))).specs
    return specs | {"row_input": specs["hidden"], **dict.fromkeys(("up", "vocab_scale"), specs["bias"])}


@hypothesis.given(
    p=problems(multiple=4, scaled=True),
    layout=st.sampled_from(LAYOUTS),
    backward=st.sampled_from(["recompute", "in_forward"]),
    loss_scale=st.none() | LOSS_SCALES,
)
def test_any_options_split_over_a_mesh(p: Problem, layout: Any, backward: Any, loss_scale: float | None) -> None:
    """Rows, vocabulary and width, as the parallelisms of training split them; with a loss scale, added to sums."""
    specs, on = by_name(layout), mesh(shape=(2, 2))
    p.arrays = {name: jax.device_put(x, NamedSharding(on, specs.get(name, P()))) for name, x in p.arrays.items()}
    if loss_scale is None or not p.arrays.keys().isdisjoint(("up", "vocab_scale")):
        assert_near_oracle(p, library_results(p, "xla", backward))
    else:
        assert_adds(p, loss_scale, implementation="xla", backward=backward)


WHOLE = P()
# A gradient's terms, up to 20 times as large as what they add up to, are rounded to float32 in another order; of one
# token's weight they cancel.
TOLERANCE = 20 * 32 * 2.0**-24
Call = Callable[..., Any]


def _of_head(name: str, hidden: Any, weight: Any, labels: Any, by_token: Any, **options: Any) -> Any:
    """A function of `HEADS`; the numbers by token are temperatures, or weights."""
    if name in TEMPERED:
        options["temperature"] = 0.5 + by_token
    elif name not in BY_ROW:
        options["token_weights"] = by_token
    return HEADS[name](hidden, weight, labels, **options)


def _added(hidden: Any, weight: Any, labels: Any, by_token: Any, **options: Any) -> Any:
    return linear_cross_entropy_and_gradients(
        hidden, weight, labels, 2 * weight, token_weights=by_token, normalizer=3.0, **options
    )


def _of_logits(function: Call, logits: Any, weight: Any, labels: Any, by_token: Any) -> Any:
    return function(logits, jnp.where(labels < 0, labels, labels % logits.shape[-1]), by_token, weight)


def _chain(emissions: Any, tags: Any, by_token: Any, weight: Any) -> Any:
    del weight  # explicit axes do not let it be sliced
    k = emissions.shape[-1]
    return linear_chain_crf(emissions, abs(tags), jnp.sin(jnp.arange(k * k)).reshape(k, k), mask=by_token > 0.2)


# Functions of hidden states, weight, labels and numbers by token; of the last three hidden states are the logits.
CALLS: dict[str, Call] = {
    **{name: functools.partial(_of_head, name) for name in HEADS},
    "recompute": functools.partial(_of_head, "linear_cross_entropy", backward="recompute", label_smoothing=0.1),
    "running": _added,
    "cross_entropy": functools.partial(_of_logits, lambda z, t, x, w: cross_entropy(z, t, token_weights=x)),
    "selective_log_softmax": functools.partial(_of_logits, lambda z, t, x, w: selective_log_softmax(z, t)),
    "linear_chain_crf": functools.partial(_of_logits, _chain),
}


def _alone(name: str) -> Call:
    """The function on one device: of materialised logits, where it can be told."""
    if "reference" in SERVED.get(name, ()):
        return functools.partial(CALLS[name], implementation="reference")
    if name == "recompute":
        return functools.partial(_of_head, "linear_cross_entropy", label_smoothing=0.1, implementation="reference")
    return CALLS[name]


def _results(name: str, function: Call, *given: Any) -> Any:
    """All results, and the gradients of hidden states, weight and numbers by token unless they are gradients."""
    hidden, weight, labels, by_token = given
    if name == "running":
        return function(*given)

    def summed(hidden: Any, weight: Any, by_token: Any) -> Any:
        found = function(hidden, weight, labels, by_token)
        return total(found), found

    return jax.value_and_grad(summed, (0, 1, 2), has_aux=True)(hidden, weight, by_token)


@dataclasses.dataclass(frozen=True)
class Laid:
    """How the arrays of a call lie: mesh axes "a" and "b", of these sizes and kinds, split these dimensions.

    A dimension that its axes do not divide is split unevenly, inside `jit`, by a constraint; not by explicit axes,
    which cannot.
    """

    sizes: tuple[int, ...]
    hidden: P = WHOLE
    weight: P = WHOLE
    labels: P = WHOLE
    by_token: P = WHOLE
    kinds: tuple[AxisType, ...] = (AxisType.Auto, AxisType.Auto)
    tokens: tuple[int, int] = (8, 4)
    vocabulary: int = 32
    width: int = 8

    @property
    def mesh(self) -> Mesh:
        count = len(self.sizes)
        devices = jax.devices()[: math.prod(self.sizes)]
        return jax.make_mesh(self.sizes, ("a", "b")[:count], axis_types=self.kinds[:count], devices=devices)

    def arrays(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(self.vocabulary)
        draws = (rng.normal(size=(*shape, self.width)) for shape in (self.tokens, (self.vocabulary,)))
        labels = rng.integers(-1, self.vocabulary, self.tokens)
        hidden, weight, by_token = (np.float32(x) for x in (*draws, rng.random(self.tokens)))
        return hidden, weight, np.where(labels < 0, -100, labels), by_token

    def placed(self, on: Mesh, arrays: Any) -> tuple[tuple[Any, ...], list[P | None]]:
        """The arrays as far as they can be laid evenly, and where that is not all how they are to lie."""
        given, constraints = [], list[P | None]()
        explicit = {axis for axis, kind in zip(on.axis_names, on.axis_types, strict=True) if kind == AxisType.Explicit}
        for x, spec in zip(arrays, (self.hidden, self.weight, self.labels, self.by_token), strict=True):
            even = [
                part if x.shape[i] % math.prod(on.shape[axis] for axis in flat((part,))) == 0 else None
                for i, part in enumerate(spec)
            ]
            given.append(jax.device_put(x, NamedSharding(on, P(*even))))
            constraints.append(None if explicit or tuple(even) == tuple(spec) else spec)
        return tuple(given), constraints

    def check(self, name: str) -> None:
        """The function, so laid, has the results and gradients that it has on one device."""
        on, arrays = self.mesh, self.arrays()
        given, constraints = self.placed(on, arrays)

        def function(*given: Any) -> Any:
            places = zip(given, constraints, strict=True)
            laid = [
                x if spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(on, spec))
                for x, spec in places
            ]
            return CALLS[name](*laid)

        explicit = AxisType.Explicit in on.axis_types
        with jax.set_mesh(on) if explicit else contextlib.nullcontext():
            got = jax.jit(functools.partial(_results, name, function))(*given)
        same(got, _results(name, _alone(name), *arrays), TOLERANCE, floor=0.1)


FSDP_AND_TP = P("b", "a")
REPORTED = {
    "one sequence, the weight FSDP x TP": Laid((4, 2), weight=FSDP_AND_TP, tokens=(1, 8)),
    "the same, explicit axes": Laid((4, 2), weight=FSDP_AND_TP, tokens=(1, 8), kinds=(AxisType.Explicit,) * 2),
    "6 rows over 4 devices": Laid((4, 2), P("a"), FSDP_AND_TP, P("a"), P("a"), tokens=(6, 1)),
    "more rows than the weight has entries": Laid((4, 2), weight=FSDP_AND_TP, tokens=(16, 4), vocabulary=8),
    "hidden split over its width": Laid((4, 2), P(None, None, "a"), FSDP_AND_TP, P("a"), P("a")),
    "tensor parallelism in two dimensions": Laid((4, 2), P(None, None, "a"), FSDP_AND_TP),
    "an uneven vocabulary": Laid((2, 2), P("b"), P("a"), P("b"), P("b"), vocabulary=33),
    "labels split over more axes, in another order": Laid(
        (4, 2), P("b", "a"), P("b"), P("a", "b"), P(None, ("a", "b")), tokens=(2, 8)
    ),
    "an uneven width": Laid((4, 2), P("b"), P(None, "a"), P("b"), P("b"), width=6),
    "nothing that divides": Laid((4, 2), weight=P(None, "a"), tokens=(1, 3), vocabulary=33),
}


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "linear_cross_entropy") for case in REPORTED),
        *(("the same, explicit axes", name) for name in CALLS if name != "linear_cross_entropy"),
        *(("labels split over more axes, in another order", name) for name in ("sampled_softmax", "running")),
        *(("an uneven vocabulary", name) for name in ("reverse_kl", "linear_row_statistics", "linear_top_k")),
    ],
)
def test_a_layout_that_was_refused(case: str, name: str) -> None:
    """Most were errors inside XLA once; and every function on explicit axes."""
    REPORTED[case].check(name)


def test_explain_tells_what_becomes_of_the_weight() -> None:
    """A part of its width that splits no rows."""

    def told(laid: Laid) -> Any:
        given, _ = laid.placed(laid.mesh, laid.arrays())
        return explain(*given[:3])

    one = told(REPORTED["one sequence, the weight FSDP x TP"])
    assert one.parallelism == (
        "vocabulary over b, a, statistics merged; "
        "weight exchanged over a: parts of its width for parts of the vocabulary"
    )
    assert "weight gathered over a, which" in told(REPORTED["nothing that divides"]).parallelism
    assert "rows and weight over a: weight gathered (FSDP)" in told(REPORTED["hidden split over its width"]).parallelism


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("hidden split over its width", "all-to-all"),
        ("one sequence, the weight FSDP x TP", "all-to-all"),
        ("nothing that divides", "all-gather"),
    ],
)
def test_parts_of_a_width_are_moved_once_in_each_pass(case: str, kind: str) -> None:
    """And neither hidden states nor a weight that was gathered are kept between forward and backward."""
    laid, scopes = REPORTED[case], ["pallas_ce.forward", "pallas_ce.recompute"]
    given, _ = laid.placed(laid.mesh, laid.arrays())
    step = jax.jit(functools.partial(_results, "recompute", CALLS["recompute"]))
    moved = [x for x in step.lower(*given).compile().as_text().splitlines() if re.search(rf" {kind}(-start)?\(", x)]
    found = [scope for x in moved for scope in scopes if scope in x]
    assert found == scopes, moved


@st.composite
def layouts(draw: st.DrawFn) -> Laid:
    """Of meshes of 2 x 2, 4 x 2 and 8 devices: each axis splits any dimension of each array, or none."""
    sizes = draw(st.sampled_from([(2, 2), (4, 2), (8,)]))

    def spec(dimensions: int) -> P:
        parts: list[tuple[str, ...]] = [()] * dimensions
        for axis in draw(st.permutations(("a", "b")[: len(sizes)])):
            place = draw(st.integers(-1, dimensions - 1))
            if place >= 0:
                parts[place] += (axis,)
        return P(*(part or None for part in parts))

    return Laid(
        sizes,
        *(spec(dimensions) for dimensions in (3, 2, 2, 2)),
        kinds=draw(st.tuples(*[st.sampled_from([AxisType.Auto, AxisType.Explicit])] * 2)),
        tokens=draw(st.tuples(st.sampled_from([1, 2, 6, 8]), st.sampled_from([1, 3, 4, 8]))),
        vocabulary=draw(st.sampled_from([16, 32, 33])),
        width=draw(st.sampled_from([6, 8])),
    )


@hypothesis.settings(max_examples=24)
@hypothesis.given(name=st.sampled_from([*CALLS]), laid=layouts())
def test_any_layout_of_the_arrays(name: str, laid: Laid) -> None:
    """Results and gradients equal one device's."""
    laid.check(name)


# Sizes that four devices share; of heads that are told which implementation, each with what it makes of rows.
EVEN = Sizes(rows=12, width=8, classes=1008, padded=1024, scratch_bytes=None)
SPREAD = [
    (name, way)
    for name in ("linear_cross_entropy", "linear_row_statistics", "linear_loss", "linear_distillation, jsd")
    for way in CASES[name].ways
    if way[0] == "xla"
] + [("linear_top_k", ("", "")), ("linear_sample, {'top_p': 0.9}", ("", ""))]


@hypothesis.given(case=st.sampled_from(SPREAD), layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 2**16))
def test_what_is_not_finite_on_a_mesh_is_where_plain_jax_has_it(case: Any, layout: Any, seed: int) -> None:
    (name, way), specs, on = case, by_name(layout), mesh(shape=(2, 2))

    def put(name: str, x: Any) -> Any:
        spec = specs.get(name, P())
        fits = all(size % 4 == 0 for size, axes in zip(x.shape, spec, strict=False) if axes)
        return jax.device_put(x, NamedSharding(on, spec if fits else P()))

    spoilt.check(CASES[name], EVEN, way, seed, put=put)
