"""Under JAX's transformations: jit, vmap, scan, checkpoint, repeated and partial differentiation of every loss."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import (
    cross_entropy,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    linear_loss,
    linear_row_statistics,
    selective_log_softmax,
)
from pallas_ce.api.linear_cross_entropy import compute
from tests.pallas_ce.cases import HEADS, by_row, total
from tests.pallas_ce.checks import assert_close

EXAMPLES, N, H, V = 3, 12, 8, 40
RNG = np.random.default_rng(0)
SHAPES = (EXAMPLES, N, H), (EXAMPLES, V, H), (V, 7), (V, 7)
HIDDEN, WEIGHT, TEACHER_HIDDEN, TEACHER_WEIGHT = (
    jnp.asarray(RNG.normal(size=shape).astype(np.float32)) for shape in SHAPES
)
# A third of the labels is ignored, differently in each example.
LABELS = jnp.asarray(np.where(RNG.random((EXAMPLES, N)) < 0.3, -100, RNG.integers(0, V, (EXAMPLES, N))))

Loss = Callable[..., jax.Array]


def _distilled(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    """From a teacher whose hidden states belong to the labels: batched as these are, and not as the student's."""
    teacher = {"teacher_hidden": TEACHER_HIDDEN[labels], "teacher_weight": TEACHER_WEIGHT}
    return HEADS["reverse_kl"](hidden, weight, labels, **teacher, **options)


def _summed(function: Callable[..., Any]) -> Loss:
    return lambda *given, **options: total(function(*given, **options))


def _of_several_labels(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return linear_log_probs(hidden, weight, jnp.stack([labels, labels, labels + 1], -1), **options)


def _of_logits(loss: Loss) -> Loss:
    return lambda hidden, weight, labels, **options: loss(hidden @ weight.T, labels, **options)


def _and_by_reference(loss: Loss, **options: Any) -> tuple[Loss, Loss]:
    return functools.partial(loss, **options), functools.partial(loss, implementation="reference")


EACH = _summed(by_row("linear_cross_entropy"))
# Each loss, and what it must agree with.
LOSSES: dict[str, tuple[Loss, Loss]] = {
    **{
        mode: _and_by_reference(linear_cross_entropy, implementation="xla", backward=mode)
        for mode in ("in_forward", "recompute")
    },
    "stored logits": (
        _of_logits(cross_entropy),
        functools.partial(linear_cross_entropy, implementation="reference"),
    ),
    "linear_loss": _and_by_reference(HEADS["linear_loss"]),
    "distillation": _and_by_reference(_distilled),
    "by row": _and_by_reference(EACH),
    "linear_row_statistics": _and_by_reference(_summed(HEADS["linear_row_statistics"])),
    "linear_log_probs": _and_by_reference(_summed(_of_several_labels)),
    "stored logits by row": (
        _summed(_of_logits(functools.partial(cross_entropy, reduction="none"))),
        functools.partial(EACH, implementation="reference"),
    ),
    "selective": (
        _summed(_of_logits(selective_log_softmax)),
        functools.partial(_summed(linear_log_probs), implementation="reference"),
    ),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
MODES, STREAMED = ["in_forward", "recompute"], ["in_forward", "recompute", "by row", "linear_log_probs", "distillation"]


def differentiated(f: Loss) -> Any:
    return jax.value_and_grad(f, (0, 1))


def vmapped(f: Loss, axes: Any) -> Any:
    """Values, gradients of each example, and the gradients of the sum."""
    h, w, t = (x if axis == 0 else x[0] for x, axis in zip((HIDDEN, WEIGHT, LABELS), axes, strict=True))
    of_sum = jax.grad(lambda h, w: jax.vmap(f, axes)(h, w, t).sum(), (0, 1))
    return jax.vmap(differentiated(f), axes)(h, w, t), of_sum(h, w)


def vmapped_twice(f: Loss) -> Any:
    hidden, labels = HIDDEN.reshape(EXAMPLES, 2, -1, H), LABELS.reshape(EXAMPLES, 2, -1)
    axes = (0, None, 0)
    return jax.vmap(jax.vmap(differentiated(f), axes), axes)(hidden, WEIGHT[0], labels)


def trained_in_a_scan(f: Loss) -> Any:
    """The weight and the sum of its gradients are carried."""

    def step(carry: Any, x: Any) -> Any:
        weight, added = carry
        value, gradient = jax.value_and_grad(lambda w: jax.checkpoint(f)(x[0], w, x[1]))(weight)
        return (weight - 0.1 * gradient, added + gradient), value

    return jax.lax.scan(step, (WEIGHT[0], jnp.zeros_like(WEIGHT[0])), (HIDDEN, LABELS))


def differentiated_for_each_side(f: Loss) -> Any:
    """JAX traces the jitted call once and its forward rule once for each set of inputs, but keeps one residual tree."""
    traced = jax.jit(lambda h, w: f(h, w, LABELS[1]))
    return [jax.grad(traced, i)(HIDDEN[1], WEIGHT[1]) for i in (0, 1, (0, 1))]


def vmapped_over(f: Loss, **options: Any) -> Any:
    """One option alone."""
    gradient = jax.grad(lambda h, w, x: f(h, w, LABELS[0], **x), (0, 1, 2))
    return [jax.vmap(gradient, (None, None, 0))(HIDDEN[0], WEIGHT[0], {name: x}) for name, x in options.items()]


AXES = ((0, None, 0), (0, 0, 0), (None, None, 0), (0, None, None), (None, 0, None))
SCHEDULES = dict.fromkeys(("label_smoothing", "normalizer", "z_loss"), jnp.array([0.5, 0.1, 1.0]))
TRANSFORMATIONS: dict[str, Callable[[Loss], Any]] = {
    **{f"vmap {axes}": functools.partial(vmapped, axes=axes) for axes in AXES},
    "vmap of vmap": vmapped_twice,
    "trained in a scan": trained_in_a_scan,
    "for each side": differentiated_for_each_side,
    "token weights": functools.partial(vmapped_over, token_weights=jnp.stack([jnp.ones(N), jnp.arange(N) % 3.0])),
    "schedules": functools.partial(vmapped_over, **SCHEDULES),
}
# What takes no token weights.
SUMMED = {"by row", "linear_row_statistics", "linear_log_probs", "stored logits by row", "selective"}
CASES = [
    (name, transformation)
    for name in LOSSES
    for transformation in TRANSFORMATIONS
    if (name in MODES or transformation != "vmap (None, 0, None)")
    and (name not in SUMMED or transformation != "token weights")
    and (name in (*MODES, "stored logits") or transformation != "schedules")
]


@functools.cache
def transformed(loss: Loss, transformation: str) -> Any:
    return jax.jit(lambda: TRANSFORMATIONS[transformation](loss))()


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize(("name", "transformation"), CASES)
def test_a_transformed_loss_is_that_of_stored_logits(name: str, transformation: str) -> None:
    got, want = (transformed(loss, transformation) for loss in LOSSES[name])
    assert_close(got, want, 1e-5, floor=2e-6)


@pytest.mark.nightly(keep=4)
@every_loss
def test_the_same_vjp_called_twice(name: str) -> None:
    _, vjp = jax.vjp(lambda h, w: LOSSES[name][0](h, w, LABELS[0]), HIDDEN[0], WEIGHT[0])
    once, again = vjp(jnp.float32(1.0)), vjp(jnp.float32(-2.0))
    assert_close(again, jax.tree.map(lambda g: -2 * g, once), 1e-6)


@pytest.mark.parametrize("name", STREAMED)
def test_a_frozen_side_costs_no_product(name: str) -> None:
    def products(*argnums: int) -> int:
        gradient = jax.grad(lambda h, w: LOSSES[name][0](h, w, LABELS[0]), argnums)
        return jax.jit(gradient).lower(HIDDEN[0], WEIGHT[0]).as_text().count("stablehlo.dot_general")

    assert products(0) == products(1) == products(0, 1) - 1


def test_a_teacher_costs_no_product_of_a_gradient() -> None:
    given = HIDDEN[0], WEIGHT[0], TEACHER_HIDDEN[:N], TEACHER_WEIGHT

    def products(*argnums: int) -> int:
        return str(jax.make_jaxpr(jax.grad(linear_distillation, argnums))(*given)).count("dot_general")

    assert products(0) == products(0, 2, 3)


SECOND: dict[str, Callable[..., Any]] = {
    "grad of grad": lambda f, h: jax.jit(jax.grad(lambda x: jax.grad(f)(x).sum()))(h),
    "hessian": lambda f, h: jax.hessian(f)(h),
    "jacrev of grad": lambda f, h: jax.jacrev(jax.grad(f))(h),
    "jvp of grad": lambda f, h: jax.jvp(jax.grad(f), (h,), (h,)),
}
FORWARD: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, h: jax.jvp(f, (h,), (h,)),
    "jacfwd": lambda f, h: jax.jacfwd(f)(h),
    "linearize": lambda f, h: jax.jit(lambda h: jax.linearize(jax.vmap(f), h[None])[1](h[None]))(h),
}


@pytest.mark.nightly(keep=20)
@pytest.mark.parametrize("derivative", SECOND | FORWARD)
@every_loss
def test_what_is_no_first_derivative_in_reverse_mode_is_refused(name: str, derivative: str) -> None:
    works = "jax.nn.log_softmax" if name.startswith(("stored", "selective")) else "implementation='reference'"
    forward = r"reverse mode only: in place of jax\.jvp.*use jax\.grad"
    with pytest.raises(NotImplementedError, match=f"first derivatives.*{works}" if derivative in SECOND else forward):
        (SECOND | FORWARD)[derivative](lambda h: LOSSES[name][0](h, WEIGHT[0], LABELS[0]), HIDDEN[0])


@pytest.mark.parametrize("name", ["recompute", "distillation"])
def test_the_reference_differentiates_to_any_order(name: str) -> None:
    hidden, step = HIDDEN[0], 1e-2
    gradient = jax.jit(jax.grad(lambda h: LOSSES[name][1](h, WEIGHT[0], LABELS[0])))
    _, product = jax.jvp(gradient, (hidden,), (hidden,))
    numeric = (gradient(hidden * (1 + step)) - gradient(hidden * (1 - step))) / (2 * step)
    assert_close(product, numeric, 1e-2)


@pytest.mark.parametrize("name", ["z_loss", "label_smoothing", "logit_scale", "normalizer"])
def test_schedules_of_scalars_do_not_recompile(name: str) -> None:
    for kind in (float, np.float32, jnp.float32):
        linear_cross_entropy(HIDDEN[0], WEIGHT[0], LABELS[0], **{name: kind(0.75)})
        before = compute.__wrapped__._cache_size()
        values = (linear_cross_entropy(HIDDEN[0], WEIGHT[0], LABELS[0], **{name: kind(x)}) for x in (0.5, 0.25, 0.1))
        assert len({*map(float, values)}) == 3
        assert compute.__wrapped__._cache_size() == before


@every_loss
def test_vmap_over_no_examples(name: str) -> None:
    mapped = jax.vmap(differentiated(LOSSES[name][0]), (0, None, 0))
    assert {x.shape[0] for x in jax.tree.leaves(jax.eval_shape(mapped, HIDDEN[:0], WEIGHT[0], LABELS[:0]))} == {0}
    found = jax.jit(jax.vmap(LOSSES[name][0], (0, None, 0)))(HIDDEN[:0], WEIGHT[0], LABELS[:0])
    assert found.shape == (0,)


def test_constants_get_no_gradient_and_the_normalizer_does() -> None:
    def loss(class_weights: Any, normalizer: Any) -> jax.Array:
        options = {"class_weights": class_weights, "label_smoothing": 0.1, "normalizer": normalizer}
        return linear_cross_entropy(HIDDEN[0], WEIGHT[0], LABELS[0], **options)

    value, (d_class_weights, d_normalizer) = jax.value_and_grad(loss, (0, 1))(jnp.ones(V), 7.0)
    assert np.all(np.asarray(d_class_weights) == 0)
    np.testing.assert_allclose(d_normalizer, -value / 7.0, rtol=1e-5)


def test_a_stable_row_loss_is_traced_once() -> None:
    traces = []

    def row_loss(statistics: Any, scale: Any) -> Any:
        traces.append(statistics)
        return -statistics.log_prob * scale

    gradient = jax.grad(lambda h, scale: linear_loss(row_loss, h, WEIGHT[0], LABELS[0], scale))
    gradient(HIDDEN[0], 1.0)
    seen = len(traces)
    for scale in (0.5, 2.0):
        gradient(HIDDEN[0], scale)
    assert len(traces) == seen


def test_statistics_that_are_not_asked_for_are_not_computed() -> None:
    def exponentials(*names: str) -> int:
        run = jax.jit(lambda h: linear_row_statistics(h, WEIGHT[0], LABELS[0], statistics=names))
        return run.lower(HIDDEN[0]).as_text().count("stablehlo.exponential")

    assert exponentials("target_logit", "max_logit", "argmax", "mean_logit") == 0
    assert exponentials("lse") == exponentials("lse", "entropy", "sum_sq_probs") == 1


def _in_halves(hidden: Any, weight: Any, labels: Any) -> Any:
    """A batch within a batch."""
    return jax.vmap(_recompute, (0, None, 0))(hidden.reshape(2, -1, H), weight, labels.reshape(2, -1))


_recompute, ALL = LOSSES["recompute"][0], EXAMPLES * N


@pytest.mark.parametrize(
    ("function", "axes", "rows"),
    [
        *((_recompute, axes, {ALL if axes[1] is None else N}) for axes in AXES),
        (_in_halves, (0, None, 0), {ALL}),
        (_in_halves, (0, 0, 0), {N}),
        (jax.grad(_recompute), (0, None, 0), {ALL}),
        (jax.grad(_recompute, argnums=1), (0, None, 0), {ALL, N}),
    ],
)
def test_only_a_head_of_each_example_or_its_gradient_maps_over_the_batch(
    function: Any, axes: tuple[int | None, ...], rows: set[int]
) -> None:
    """Rows that share a head fold into one call: the rows of the products in the program."""
    given = (x if axis == 0 else x[0] for x, axis in zip((HIDDEN, WEIGHT, LABELS), axes, strict=True))
    text = jax.jit(jax.vmap(function, axes)).lower(*given).as_text()
    assert {int(found) for found in re.findall(rf"dot_general.*\(tensor<(\d+)x{H}xf32>", text)} == rows
