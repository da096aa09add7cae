"""Under JAX's transformations: jit, vmap, scan, checkpoint, repeated and partial differentiation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_ce import MeshAxes, linear_cross_entropy, linear_loss, linear_row_statistics
from pallas_ce.api.linear_cross_entropy import compute
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.problems import STREAMED

N, H, V = 30, 8, 50
Loss = Callable[..., jax.Array]


def _loss(implementation: str, backward: Any) -> Loss:
    return lambda hidden, weight, labels: linear_cross_entropy(
        hidden, weight, labels, implementation=implementation, backward=backward
    )


REFERENCE = _loss("reference", "auto")
streamed = pytest.mark.parametrize("loss", [_loss(*way) for way in STREAMED], ids=[way[1] for way in STREAMED])


@pytest.fixture(scope="module")
def batch() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three examples of hidden states, weights and labels; a third of the labels ignored, differently in each."""
    k = jax.random.split(jax.random.key(0), 4)
    labels = jax.random.randint(k[2], (3, N), 0, V)
    labels = jnp.where(jax.random.bernoulli(k[3], 0.3, labels.shape), -100, labels)
    return jax.random.normal(k[0], (3, N, H)), jax.random.normal(k[1], (3, V, H)), labels


def _same(transformed: Callable[[Loss], Any], loss: Loss, bound: float = 1e-5) -> None:
    assert_close(transformed(loss), jax.tree.map(np.asarray, transformed(REFERENCE)), bound, floor=1e-6)


@streamed
def test_upstream_scalar(loss: Loss, batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    _same(lambda f: jax.grad(lambda *a: 3.7 * f(*a, labels), argnums=(0, 1))(hidden, weight), loss)


@streamed
def test_the_same_vjp_called_twice(loss: Loss, batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    _, vjp = jax.vjp(lambda h, w: loss(h, w, labels), hidden, weight)
    once, again = vjp(jnp.float32(1.0)), vjp(jnp.float32(-2.0))
    assert_close(again, jax.tree.map(lambda g: -2 * np.asarray(g), once), 1e-6)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_a_checked_shard_map_of_one_device(backward: Any, batch: Any) -> None:
    """Every operation must tell over which mesh axes its results vary; `test_meshes` has more devices."""
    hidden, weight, labels = (x[0] for x in batch)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))

    def part(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        axes = MeshAxes(rows="data")
        loss = linear_cross_entropy(
            hidden, weight, labels, implementation="xla", backward=backward, reduction="sum", mesh_axes=axes
        )
        return jax.lax.psum(loss, "data")

    specs = P("data"), P(), P("data")
    sharded = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    got = jax.jit(jax.grad(sharded, argnums=(0, 1)))(hidden, weight, labels)
    count = jnp.sum(labels >= 0)
    want = jax.grad(lambda h, w: count * REFERENCE(h, w, labels), argnums=(0, 1))(hidden, weight)
    assert_close(got, jax.tree.map(np.asarray, want), 1e-5, floor=1e-6)


@streamed
def test_checkpoint(loss: Loss, batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    _same(lambda f: jax.grad(jax.checkpoint(lambda *a: f(*a, labels)), argnums=(0, 1))(hidden, weight), loss)


@streamed
@pytest.mark.parametrize("axes", [(0, None, 0), (0, 0, 0), (None, 0, None), (None, None, 0)])
def test_vmap_and_its_gradients(loss: Loss, batch: Any, axes: tuple[int | None, ...]) -> None:
    arguments = [x if axis == 0 else x[0] for x, axis in zip(batch, axes, strict=True)]
    _same(lambda f: jax.vmap(f, axes)(*arguments), loss)
    _same(lambda f: jax.jit(jax.vmap(jax.grad(f, argnums=(0, 1)), axes))(*arguments), loss)
    labels = arguments.pop()

    def summed(f: Loss) -> Any:
        return jax.grad(lambda h, w: jax.vmap(f, axes)(h, w, labels).sum(), argnums=(0, 1))(*arguments)

    _same(summed, loss)


def test_vmap_over_token_weights_alone(batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    token_weights = jnp.stack([jnp.ones(N), jnp.arange(N) % 3.0])

    def gradients(backward: Any, implementation: str) -> Any:
        def f(h: jax.Array, w: jax.Array, tw: jax.Array) -> Any:
            return linear_cross_entropy(
                h, w, labels, token_weights=tw, backward=backward, implementation=implementation
            )

        return jax.grad(lambda h, w: jax.vmap(f, (None, None, 0))(h, w, token_weights).sum(), argnums=(0, 1))(
            hidden, weight
        )

    want = jax.tree.map(np.asarray, gradients("auto", "reference"))
    assert_close(gradients("in_forward", "xla"), want, 1e-5)
    assert_close(gradients("recompute", "xla"), want, 1e-5)


@streamed
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1)])
def test_scan_with_a_shared_or_tied_weight(loss: Loss, batch: Any, tied: bool, argnums: tuple[int, ...]) -> None:
    hiddens, weights, labels = batch

    def total(f: Loss) -> Any:
        def whole(hiddens: jax.Array, weight: jax.Array) -> jax.Array:
            def step(carry: jax.Array, x: Any) -> Any:
                hidden = jnp.tanh(x[0] @ weight[:H]) if tied else x[0]
                return carry + f(hidden, weight, x[1]), None

            return jax.lax.scan(step, jnp.float32(0), (hiddens, labels))[0]

        return jax.jit(jax.value_and_grad(whole, argnums))(hiddens, weights[0])

    _same(total, loss)


@streamed
def test_scan_carrying_the_weight_gradient(loss: Loss, batch: Any) -> None:
    hiddens, weights, labels = batch

    def train(f: Loss) -> Any:
        def step(carry: Any, x: Any) -> Any:
            weight, summed = carry
            gradient = jax.grad(lambda w: f(x[0], w, x[1]))(weight)
            return (weight - 0.1 * gradient, summed + gradient), None

        return jax.lax.scan(step, (weights[0], jnp.zeros_like(weights[0])), (hiddens, labels))[0]

    _same(train, loss)


@streamed
def test_one_traced_loss_differentiated_for_one_side_and_then_for_the_other(loss: Loss, batch: Any) -> None:
    """JAX traces the jitted call once and its forward rule once for each set of inputs, but keeps one residual tree."""
    hidden, weight, labels = (x[1] for x in batch)

    def both(f: Loss) -> Any:
        traced = jax.jit(lambda h, w: f(h, w, labels))

        def step(h: jax.Array, w: jax.Array) -> Any:
            frozen_weight = jax.grad(lambda h: traced(h, w))(h)
            frozen_hidden = jax.grad(lambda w: traced(h, w))(w)
            return frozen_weight, frozen_hidden, jax.grad(traced, argnums=(0, 1))(h, w)

        return jax.jit(step)(hidden, weight)

    _same(both, loss)


@streamed
def test_a_frozen_side_costs_no_product(loss: Loss, batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)

    def products(argnums: tuple[int, ...]) -> int:
        text = jax.jit(jax.grad(lambda h, w: loss(h, w, labels), argnums)).lower(hidden, weight).as_text()
        return text.count("stablehlo.dot_general")

    assert products((0,)) == products((1,)) == products((0, 1)) - 1


@streamed
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
def test_second_derivatives_raise(loss: Loss, batch: Any, derivative: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    message = r"first derivatives in reverse mode only.*implementation='reference'"
    with pytest.raises(NotImplementedError, match=message):
        derivative(lambda h: loss(h, weight, labels), hidden)


@streamed
@pytest.mark.parametrize("derivative", [lambda f, h: jax.jvp(f, (h,), (h,)), lambda f, h: jax.jacfwd(f)(h)])
def test_forward_mode_raises(loss: Loss, batch: Any, derivative: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    with pytest.raises(TypeError, match="forward-mode"):
        derivative(lambda h: loss(h, weight, labels), hidden)


def test_the_reference_differentiates_to_any_order(batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    gradient = jax.grad(lambda h: REFERENCE(h, weight, labels))
    _, product = jax.jvp(gradient, (hidden,), (hidden,))
    step = 1e-2
    numeric = (gradient(hidden * (1 + step)) - gradient(hidden * (1 - step))) / (2 * step)
    assert_close(product, np.asarray(numeric), 1e-2)


@pytest.mark.parametrize("name", ["z_loss", "label_smoothing", "logit_scale", "normalizer"])
@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32])
def test_schedules_of_scalars_do_not_recompile(batch: Any, name: str, kind: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    linear_cross_entropy(hidden, weight, labels, **{name: kind(0.75)})
    before = compute._cache_size()
    losses = {float(linear_cross_entropy(hidden, weight, labels, **{name: kind(x)})) for x in (0.5, 0.25, 0.1)}
    assert compute._cache_size() == before
    assert len(losses) == 3


def test_vmap_over_no_examples(batch: Any) -> None:
    hidden, weight, labels = batch
    for transform in (lambda f: f, lambda f: jax.grad(f, argnums=(0, 1))):
        for way in STREAMED:
            found = jax.vmap(transform(_loss(*way)), (0, None, 0))(hidden[:0], weight[0], labels[:0])
            assert {x.shape[0] for x in jax.tree.leaves(found)} == {0}


def test_second_and_forward_derivatives_of_the_other_functions_raise(batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)

    def statistic(h: jax.Array) -> Any:
        return jnp.sum(linear_row_statistics(h, weight, statistics=("entropy",)).entropy)

    def loss(h: jax.Array) -> jax.Array:
        return linear_loss(lambda s: -s.log_prob, h, weight, labels)

    for function in (statistic, loss):
        with pytest.raises(NotImplementedError, match="first derivatives in reverse mode only"):
            jax.hessian(function)(hidden)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(function, (hidden,), (hidden,))


def test_constants_get_no_gradient_and_the_normalizer_does(batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)

    def loss(class_weights: Any, normalizer: Any) -> jax.Array:
        return linear_cross_entropy(
            hidden, weight, labels, class_weights=class_weights, label_smoothing=0.1, normalizer=normalizer
        )

    value = loss(jnp.ones(V), 7.0)
    d_class_weights, d_normalizer = jax.grad(loss, (0, 1))(jnp.ones(V), 7.0)
    assert np.all(np.asarray(d_class_weights) == 0)
    np.testing.assert_allclose(d_normalizer, -value / 7.0, rtol=1e-5)


def test_a_stable_row_loss_is_traced_once(batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)
    traces = []

    def row_loss(statistics: Any, scale: Any) -> Any:
        traces.append(statistics)
        return -statistics.log_prob * scale

    gradient = jax.grad(lambda h, scale: linear_loss(row_loss, h, weight, labels, scale))
    gradient(hidden, 1.0)
    seen = len(traces)
    for scale in (0.5, 2.0):
        gradient(hidden, scale)
    assert len(traces) == seen


def test_statistics_that_are_not_asked_for_are_not_computed(batch: Any) -> None:
    hidden, weight, labels = (x[0] for x in batch)

    def exponentials(*names: str) -> int:
        run = jax.jit(lambda h: linear_row_statistics(h, weight, labels, statistics=names))
        return run.lower(hidden).as_text().count("stablehlo.exponential")

    assert exponentials("target_logit", "max_logit", "argmax", "mean_logit") == 0
    assert exponentials("lse") == exponentials("lse", "entropy", "sum_sq_probs") == 1
