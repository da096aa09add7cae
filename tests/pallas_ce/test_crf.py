"""`linear_chain_crf` against the forward algorithm position by position, in float64."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_ce import linear_chain_crf
from tests.pallas_ce import plain
from tests.pallas_ce.checks import assert_close

with_gradients: Any = jax.jit(jax.value_and_grad(linear_chain_crf, (0, 2)))


@hypothesis.given(data=st.data())
def test_loss_and_gradients_match_the_forward_algorithm(data: Any) -> None:
    batch, k, length = (data.draw(st.integers(1, most)) for most in (3, 4, 5))  # the first example has one position
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    emissions = rng.normal(size=(batch, length, k)).astype(np.float32) * data.draw(st.sampled_from([1.0, 30.0]))
    tags = rng.integers(0, k, (batch, length))
    shared, several = (k, k), (batch, length - 1, k, k)
    transitions = rng.normal(size=data.draw(st.sampled_from([several, shared]))).astype(np.float32)
    lengths = rng.integers(1, length + 1, batch)
    mask = np.arange(length) < lengths[:, None]

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def exact(emissions: Any, transitions: Any) -> Any:
        return jnp.mean(plain.chains(emissions, tags, transitions, lengths, plain.FORMS["logsumexp"]))

    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, exact(np.float64(emissions), np.float64(transitions)))
    ours = jax.jit(jax.value_and_grad(lambda e, t: linear_chain_crf(e, tags, t, mask=mask), (0, 1)))
    # A loss is a small difference of scores of up to 30 for each position.
    assert_close(ours(emissions, transitions), want, 1e-5, floor=1e-5)


def test_forbidden_candidates_and_transitions_leave_finite_gradients() -> None:
    emissions = jnp.zeros((3, 2)).at[1, 0].set(-jnp.inf)
    transitions = jnp.array([[0.0, 0.0], [-jnp.inf, 0.0]])
    value, gradients = with_gradients(emissions, jnp.array([0, 1, 1]), transitions)
    # Left are 0-1-1 and 1-1-1.
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    assert all(np.all(np.isfinite(g)) for g in gradients)
    value, gradients = with_gradients(emissions, jnp.array([0, 1, 0]), transitions)
    assert value == np.inf
    assert all(np.all(np.asarray(g) == 0) for g in gradients)


def test_which_sequences_count() -> None:
    rng = np.random.default_rng(0)
    emissions, transitions = rng.normal(size=(3, 4, 2)).astype(np.float32), np.zeros((2, 2), np.float32)
    mask = np.array([[True] * 4, [False] * 4, [True, True, False, True]])
    tags = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, -100, 7]])
    each = linear_chain_crf(emissions, tags, transitions, mask=mask, reduction="none")
    want = [jax.nn.logsumexp(emissions[b, t]) - emissions[b, t, tags[b, t]] for b, t in ((2, 0), (2, 1))]
    np.testing.assert_allclose(each[2], sum(want), rtol=1e-6)
    assert each[1] == 0
    assert each[0] > 0
    np.testing.assert_allclose(linear_chain_crf(emissions, tags, transitions, mask=mask), each.sum() / 2, rtol=1e-6)
    unknown = linear_chain_crf(emissions, np.full((3, 4), 2), transitions, mask=mask)
    assert unknown == 0


def _sure(apart: float, offset: float, right: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Emissions, tags and transitions of 200 positions, one tag's emission `apart` from the others': the tags' own."""
    rng = np.random.default_rng(3)
    length, k = 200, 4
    tags = rng.integers(0, k, length)
    emissions, transitions = rng.normal(size=(length, k)), rng.normal(size=(k, k))
    emissions[np.arange(length), tags if right else (tags + 1) % k] += apart
    return np.float32(emissions + offset), tags, np.float32(transitions + offset / 10)


@pytest.mark.parametrize("offset", [0.0, 100.0, -1e4, 1e5])
@pytest.mark.parametrize(("apart", "right"), [(50.0, True), (50.0, False), (10.0, True), (1.0, True)])
def test_what_scores_have_in_common_costs_no_accuracy(apart: float, right: bool, offset: float) -> None:
    emissions, tags, transitions = _sure(apart, offset, right)
    loss, gradients = with_gradients(emissions, tags, transitions)
    with jax.enable_x64(True):
        want, exact = jax.tree.map(np.asarray, with_gradients(np.float64(emissions), tags, np.float64(transitions)))
    assert loss.dtype == np.float32
    assert loss >= 0
    # Each of 200 positions rounds a number of order 1, or of the loss so far.
    np.testing.assert_allclose(loss, want, rtol=1e-6, atol=1e-6)
    for got, x in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-5)  # a dozen marginals near 1, less as many


@pytest.mark.parametrize("name", ["emission", "transition"])
def test_a_nan_wins_over_tags_that_are_forbidden(name: str) -> None:
    emissions, transitions = jnp.zeros((3, 2)).at[0, 0].set(-jnp.inf), jnp.zeros((2, 2))
    spoilt = {"emission": (emissions.at[2, 1].set(jnp.nan), transitions)}
    spoilt["transition"] = emissions, transitions.at[:, 1].set(jnp.nan)
    emissions, transitions = spoilt[name]
    loss, gradients = with_gradients(emissions, jnp.array([0, 0, 0]), transitions)
    assert np.isnan(loss)
    assert all(np.isnan(x).any() for x in gradients)


@pytest.mark.parametrize("unused", ["one position", "no position", "an unknown tag"])
def test_transitions_that_no_sequence_uses_are_not_read(unused: str) -> None:
    """Nor are emissions."""
    emissions, mask, tags = jnp.full((1, 3, 2), jnp.nan), jnp.array([[True, False, False]]), jnp.array([[1, 0, 0]])
    if unused == "one position":
        emissions = emissions.at[:, 0].set(1.0)
    elif unused == "no position":
        mask = jnp.zeros_like(mask)
    elif unused == "an unknown tag":
        mask, tags = jnp.ones_like(mask), tags.at[0, 1].set(2)
    for shape in ((2, 2), (1, 2, 2, 2)):
        run: Any = jax.value_and_grad(functools.partial(linear_chain_crf, mask=mask), (0, 2))
        loss, gradients = run(emissions, tags, jnp.full(shape, jnp.nan))
        np.testing.assert_allclose(loss, np.log(2) if unused == "one position" else 0.0, rtol=1e-6)
        assert all(np.isfinite(x).all() for x in gradients)


def test_transitions_alone_may_vary_over_a_mesh() -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    emissions, tags, transitions = jnp.zeros((2, 4, 3)), jnp.zeros((2, 4), int), jnp.ones((2, 3, 3, 3))

    def loss(transitions: jax.Array) -> jax.Array:
        return linear_chain_crf(emissions, tags, transitions, reduction="none")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(sharded)(transitions), loss(transitions))


def test_tags_of_any_integer_dtype_are_compared_with_k_as_they_are() -> None:
    emissions, transitions = jnp.zeros((1, 2, 200)), jnp.zeros((200, 200))
    for dtype in (np.int8, np.uint8, np.int32, np.uint64):
        np.testing.assert_allclose(
            linear_chain_crf(emissions, np.array([[0, 1]], dtype), transitions), 2 * np.log(200), rtol=1e-6
        )
    for beyond in (np.array([[0, 2**32 + 1]]), [[0, 2**32 + 1]], np.array([[0, 255]], np.uint8)):
        assert linear_chain_crf(emissions, beyond, transitions) == 0
