"""Under JAX's transformations: jit, vmap, scan, checkpoint, repeated and partial differentiation of every loss."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_ce import (
    MeshAxes,
    cross_entropy,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    linear_loss,
    linear_row_statistics,
    selective_log_softmax,
)
from pallas_ce.api.linear_cross_entropy import compute
from tests.pallas_ce.checks import assert_close

EXAMPLES, N, H, V = 3, 12, 8, 40
KEYS = jax.random.split(jax.random.key(0), 6)
HIDDEN, WEIGHT = jax.random.normal(KEYS[0], (EXAMPLES, N, H)), jax.random.normal(KEYS[1], (EXAMPLES, V, H))
# A third of the labels is ignored, differently in each example.
LABELS = jax.random.randint(KEYS[2], (EXAMPLES, N), 0, V)
LABELS = jnp.where(jax.random.bernoulli(KEYS[3], 0.3, LABELS.shape), -100, LABELS)
TEACHER_HIDDEN, TEACHER_WEIGHT = jax.random.normal(KEYS[4], (V, 7)), jax.random.normal(KEYS[5], (V, 7))

Loss = Callable[..., jax.Array]


def _distilled(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    """From a teacher whose hidden states belong to the labels: batched as these are, and not as the student's."""
    teacher = TEACHER_HIDDEN[labels], TEACHER_WEIGHT
    return linear_distillation(hidden, weight, *teacher, labels, divergence="reverse_kl", **options)


def _by_row(loss: Loss) -> Loss:
    return lambda *given, **options: jnp.sum(jnp.square(loss(*given, **options)))


def _statistics(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    names = ("log_prob", "entropy", "mean_logit")
    found = linear_row_statistics(hidden, weight, labels, statistics=names, row_mask=labels >= 0, **options)
    return jnp.sum(found.log_prob * found.entropy + jnp.square(found.mean_logit))


def _of_several_labels(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return linear_log_probs(hidden, weight, jnp.stack([labels, labels, labels + 1], -1), **options)


def _of_logits(loss: Loss) -> Loss:
    return lambda hidden, weight, labels, **options: loss(hidden @ weight.T, labels, **options)


def _by_reference(loss: Loss) -> Loss:
    return functools.partial(loss, implementation="reference")


def _and_by_reference(loss: Loss) -> tuple[Loss, Loss]:
    return loss, _by_reference(loss)


ce = functools.partial(functools.partial, linear_cross_entropy)
REFERENCE, BY_ROW = _by_reference(linear_cross_entropy), _by_row(ce(reduction="none"))
# Each loss, and what it must agree with.
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "in_forward": (ce(implementation="xla", backward="in_forward"), REFERENCE),
    "recompute": (ce(implementation="xla", backward="recompute"), REFERENCE),
    "by row": _and_by_reference(BY_ROW),
    "linear_loss": _and_by_reference(functools.partial(linear_loss, lambda s: 0.3 * s.entropy - s.log_prob)),
    "linear_row_statistics": _and_by_reference(_statistics),
    "linear_log_probs": _and_by_reference(_by_row(_of_several_labels)),
    "distillation": _and_by_reference(_distilled),
    "stored logits": (
        _of_logits(functools.partial(cross_entropy, z_loss=0.1)),
        functools.partial(REFERENCE, z_loss=0.1),
    ),
    "stored logits by row": (
        _by_row(_of_logits(functools.partial(cross_entropy, reduction="none"))),
        _by_reference(BY_ROW),
    ),
    "selective": (_by_row(_of_logits(selective_log_softmax)), _by_row(_by_reference(linear_log_probs))),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
MODES, STREAMED = ["in_forward", "recompute"], ["in_forward", "recompute", "by row", "linear_log_probs", "distillation"]


def rematerialised(f: Loss) -> Any:
    return jax.grad(lambda h, w: 3.7 * jax.checkpoint(lambda *a: f(*a, LABELS[0]))(h, w), (0, 1))(HIDDEN[0], WEIGHT[0])


def vmapped(f: Loss, *axes: int | None) -> Any:
    """Values, gradients of each example, and the gradients of the sum."""
    hidden, weight, labels = (x if axis == 0 else x[0] for x, axis in zip((HIDDEN, WEIGHT, LABELS), axes, strict=True))

    def summed(h: Any, w: Any) -> Any:
        return jax.vmap(f, axes)(h, w, labels).sum()

    @jax.jit
    def run(h: Any, w: Any) -> Any:
        return jax.vmap(jax.value_and_grad(f, (0, 1)), axes)(h, w, labels), jax.grad(summed, (0, 1))(h, w)

    return run(hidden, weight)


def vmapped_twice(f: Loss) -> Any:
    hidden, labels = HIDDEN.reshape(EXAMPLES, 2, -1, H), LABELS.reshape(EXAMPLES, 2, -1)
    inner = jax.vmap(jax.value_and_grad(f, (0, 1)), (0, None, 0))
    return jax.jit(jax.vmap(inner, (0, None, 0)))(hidden, WEIGHT[0], labels)


def scanned(f: Loss, tied: bool) -> Any:
    def total(hiddens: jax.Array, weight: jax.Array) -> jax.Array:
        def step(carry: jax.Array, x: Any) -> Any:
            hidden = jnp.tanh(x[0] @ weight[:H]) if tied else x[0]
            return carry + f(hidden, weight, x[1]), None

        return jax.lax.scan(step, jnp.float32(0), (hiddens, LABELS))[0]

    return jax.jit(lambda *a: [jax.value_and_grad(total, i)(*a) for i in ((0,), (1,), (0, 1))])(HIDDEN, WEIGHT[0])


def trained_in_a_scan(f: Loss) -> Any:
    """The weight and the sum of its gradients are carried."""

    def step(carry: Any, x: Any) -> Any:
        weight, summed = carry
        value, gradient = jax.value_and_grad(lambda w: jax.checkpoint(f)(x[0], w, x[1]))(weight)
        return (weight - 0.1 * gradient, summed + gradient), value

    return jax.lax.scan(step, (WEIGHT[0], jnp.zeros_like(WEIGHT[0])), (HIDDEN, LABELS))


def differentiated_for_each_side(f: Loss) -> Any:
    """JAX traces the jitted call once and its forward rule once for each set of inputs, but keeps one residual tree."""
    traced = jax.jit(lambda h, w: f(h, w, LABELS[1]))

    def step(h: jax.Array, w: jax.Array) -> Any:
        return jax.grad(lambda h: traced(h, w))(h), jax.grad(lambda w: traced(h, w))(w), jax.grad(traced, (0, 1))(h, w)

    return jax.jit(step)(HIDDEN[1], WEIGHT[1])


def vmapped_over_token_weights_alone(f: Loss) -> Any:
    token_weights = jnp.stack([jnp.ones(N), jnp.arange(N) % 3.0])

    def summed(h: Any, w: Any, token_weights: Any) -> Any:
        return jax.vmap(lambda x: f(h, w, LABELS[0], token_weights=x))(token_weights).sum()

    return jax.grad(summed, (0, 1, 2))(HIDDEN[0], WEIGHT[0], token_weights)


def vmapped_over_a_schedule_alone(f: Loss) -> Any:
    def of(name: str) -> Any:
        gradient = jax.grad(lambda w, x: f(HIDDEN[0], w, LABELS[0], **{name: x}))
        return jax.vmap(gradient, (None, 0))(WEIGHT[0], jnp.array([0.5, 0.1, 1.0]))

    return [of(name) for name in ("label_smoothing", "normalizer", "z_loss")]


TRANSFORMATIONS: dict[str, Callable[[Loss], Any]] = {
    "rematerialised": rematerialised,
    **{f"vmap {axes}": functools.partial(lambda f, axes: vmapped(f, *axes), axes=axes)
       for axes in ((0, None, 0), (0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0))},
    "vmap of vmap": vmapped_twice,
    "scan": functools.partial(scanned, tied=False),
    "scan with a tied weight": functools.partial(scanned, tied=True),
    "trained in a scan": trained_in_a_scan,
    "for each side": differentiated_for_each_side,
    "token weights": vmapped_over_token_weights_alone,
    "schedules": vmapped_over_a_schedule_alone,
}  # fmt: skip
# What only the linear loss and its two modes go through, and what sums its rows itself.
ONLY_OF_MODES = {"rematerialised", "scan", "scan with a tied weight", "vmap (None, 0, None)"}
SUMMED = {"by row", "linear_row_statistics", "linear_log_probs", "stored logits by row", "selective"}
CASES = [
    (name, transformation)
    for name in LOSSES
    for transformation in TRANSFORMATIONS
    if (name in MODES or transformation not in ONLY_OF_MODES)
    and (name not in SUMMED or transformation != "token weights")
    and (name in (*MODES, "stored logits") or transformation != "schedules")
]


@functools.cache
def _wanted(reference: Loss, transformation: str) -> Any:
    return TRANSFORMATIONS[transformation](reference)


@pytest.mark.parametrize(("name", "transformation"), CASES)
def test_a_transformed_loss_is_that_of_stored_logits(name: str, transformation: str) -> None:
    ours, reference = LOSSES[name]
    assert_close(TRANSFORMATIONS[transformation](ours), _wanted(reference, transformation), 1e-5, floor=2e-6)


@every_loss
def test_the_same_vjp_called_twice(name: str) -> None:
    _, vjp = jax.vjp(lambda h, w: LOSSES[name][0](h, w, LABELS[0]), HIDDEN[0], WEIGHT[0])
    once, again = vjp(jnp.float32(1.0)), vjp(jnp.float32(-2.0))
    assert_close(again, jax.tree.map(lambda g: -2 * g, once), 1e-6)


@pytest.mark.parametrize("name", MODES)
def test_a_checked_shard_map_of_one_device(name: str) -> None:
    """Every operation must tell over which mesh axes its results vary; `test_meshes` has more devices."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))

    def part(*given: jax.Array) -> jax.Array:
        return jax.lax.psum(LOSSES[name][0](*given, reduction="sum", mesh_axes=MeshAxes(rows="data")), "data")

    specs, given = (P("data"), P(), P("data")), (HIDDEN[0], WEIGHT[0], LABELS[0])
    sharded = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    got = jax.jit(jax.grad(sharded, argnums=(0, 1)))(*given)
    want = jax.grad(lambda *a: REFERENCE(*a, reduction="sum"), argnums=(0, 1))(*given)
    assert_close(got, want, 1e-5, floor=1e-6)


def test_labels_of_a_row_that_repeat_in_a_checked_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))

    def log_prob(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_log_probs(hidden, weight, labels).sum()

    specs, once = (P("data"), P(), P("data")), (HIDDEN[0], WEIGHT[0], LABELS[0])
    twice = (*once[:2], jnp.stack([LABELS[0], LABELS[0]], axis=-1))
    sharded = jax.shard_map(lambda *a: jax.lax.psum(log_prob(*a), "data"), mesh=mesh, in_specs=specs, out_specs=P())
    got, want = (jax.grad(f, argnums=(0, 1))(*given) for f, given in ((jax.jit(sharded), twice), (log_prob, once)))
    assert_close(got, jax.tree.map(lambda g: 2 * g, want), 1e-5, floor=1e-6)


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


@every_loss
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, h: jax.grad(lambda x: jax.grad(f)(x).sum())(h),
        lambda f, h: jax.jit(jax.grad(lambda x: jax.grad(f)(x).sum()))(h),
        lambda f, h: jax.hessian(f)(h),
        lambda f, h: jax.jacrev(jax.grad(f))(h),
        lambda f, h: jax.jvp(jax.grad(f), (h,), (h,)),
    ],
)
def test_second_derivatives_raise(name: str, derivative: Any) -> None:
    works = "jax.nn.log_softmax" if name.startswith(("stored", "selective")) else "implementation='reference'"
    with pytest.raises(NotImplementedError, match=f"first derivatives.*{works}"):
        derivative(lambda h: LOSSES[name][0](h, WEIGHT[0], LABELS[0]), HIDDEN[0])


@every_loss
@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, h: jax.jvp(f, (h,), (h,)),
        lambda f, h: jax.jacfwd(f)(h),
        lambda f, h: jax.linearize(f, h)[1](h),
        lambda f, h: jax.jit(lambda h: jax.linearize(jax.vmap(f), h[None])[1](h[None]))(h),
    ],
)
def test_forward_mode_raises(name: str, derivative: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"reverse mode only: in place of jax\.jvp.*use jax\.grad"):
        derivative(lambda h: LOSSES[name][0](h, WEIGHT[0], LABELS[0]), HIDDEN[0])


@pytest.mark.parametrize("name", ["recompute", "distillation"])
def test_the_reference_differentiates_to_any_order(name: str) -> None:
    hidden, step = HIDDEN[0], 1e-2
    gradient = jax.grad(lambda h: LOSSES[name][1](h, WEIGHT[0], LABELS[0]))
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
    for function in (LOSSES[name][0], jax.grad(LOSSES[name][0], (0, 1))):
        found = jax.vmap(function, (0, None, 0))(HIDDEN[:0], WEIGHT[0], LABELS[:0])
        assert {x.shape[0] for x in jax.tree.leaves(found)} == {0}


def test_constants_get_no_gradient_and_the_normalizer_does() -> None:
    def loss(class_weights: Any, normalizer: Any) -> jax.Array:
        return linear_cross_entropy(
            HIDDEN[0], WEIGHT[0], LABELS[0], class_weights=class_weights, label_smoothing=0.1, normalizer=normalizer
        )

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
