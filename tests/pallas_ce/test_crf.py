"""`linear_chain_crf` against the sum over all sequences, in float64."""

import functools
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_ce import linear_chain_crf, linear_log_probs
from tests.pallas_ce.checks import assert_close


def _scores(emissions: Any, transitions: Any, paths: Any) -> Any:
    """Of sequences `[..., T]`, from emissions `[T, K]` and transitions `[T-1, K, K]`."""
    t = np.arange(len(emissions))
    return emissions[t, paths].sum(-1) + transitions[t[:-1], paths[..., :-1], paths[..., 1:]].sum(-1)


def _every_path(emissions: Any) -> np.ndarray:
    length, k = emissions.shape
    return np.array([*itertools.product(range(k), repeat=length)])


def _by_enumeration(emissions: np.ndarray, tags: np.ndarray, transitions: np.ndarray) -> tuple[Any, ...]:
    """The loss of one sequence, and its gradients: how often paths come by, less the tags' own."""
    paths, t = _every_path(emissions), np.arange(len(emissions))
    scores = _scores(emissions, transitions, paths)
    log_z = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
    gradients = np.zeros(emissions.shape), np.zeros(transitions.shape)
    for path, share in ((paths, np.exp(scores - log_z)[:, None]), (tags, -1)):
        np.add.at(gradients[0], (t, path), share)
        np.add.at(gradients[1], (t[:-1], path[..., :-1], path[..., 1:]), share)
    return log_z - _scores(emissions, transitions, tags), *gradients


@hypothesis.given(data=st.data())
def test_loss_and_gradients_match_the_sum_over_all_sequences(data: Any) -> None:
    batch, k, length = (data.draw(st.integers(1, most)) for most in (3, 4, 5))  # the first example has one position
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    emissions = rng.normal(size=(batch, length, k)).astype(np.float32) * data.draw(st.sampled_from([1.0, 30.0]))
    tags = rng.integers(0, k, (batch, length))
    shared, several = (k, k), (batch, length - 1, k, k)
    transitions = rng.normal(size=data.draw(st.sampled_from([several, shared]))).astype(np.float32)
    lengths = rng.integers(1, length + 1, batch)
    mask = np.arange(length) < lengths[:, None]

    wide, between = emissions.astype(np.float64), np.broadcast_to(transitions, several).astype(np.float64)
    loss, d_emissions, d_transitions = 0.0, np.zeros(emissions.shape), np.zeros(several)
    for b, t in enumerate(lengths):
        of_one, d_emissions[b, :t], d_transitions[b, : t - 1] = _by_enumeration(
            wide[b, :t], tags[b, :t], between[b, : t - 1]
        )
        loss += of_one
    d_transitions = d_transitions.sum((0, 1)) if transitions.ndim == 2 else d_transitions
    want = jax.tree.map(lambda x: x / batch, (loss, (d_emissions, d_transitions)))
    ours = jax.jit(jax.value_and_grad(lambda e, t: linear_chain_crf(e, tags, t, mask=mask), (0, 1)))
    # A loss is a small difference of scores of up to 30 for each position.
    assert_close(ours(emissions, transitions), want, 1e-5, floor=1e-5)


def _tagger(padded: bool) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Head, transitions between all 50 tags and candidates `[2, 4, 3]` among them; padded, the last of some is -100."""
    rng = np.random.default_rng(0)
    shapes = {"hidden": (2, 4, 6), "weight": (50, 6), "between": (50, 50)}
    arrays = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    candidates = np.stack([rng.choice(50, 3, replace=False) for _ in range(8)]).reshape(2, 4, 3)
    if padded:
        candidates[[0, 0, 1, 1], [0, 2, 2, 3], 2] = -100
    return arrays, jnp.asarray(candidates), jnp.asarray(rng.integers(0, 2, (2, 4)))


def _between(arrays: dict[str, Any], candidates: Any) -> Any:
    known = jnp.maximum(candidates, 0)
    return arrays["between"][known[:, :-1, :, None], known[:, 1:, None, :]]


def _from_streamed_head(arrays: dict[str, Any], candidates: Any, tags: Any, **options: Any) -> Any:
    # 800 bytes hold a tile of a few columns: the head is read in several.
    emissions = linear_log_probs(arrays["hidden"], arrays["weight"], candidates, scratch_bytes=800)
    emissions = jnp.where(candidates < 0, -jnp.inf, emissions)
    return linear_chain_crf(emissions, tags, _between(arrays, candidates), **options)


def _from_stored_scores(arrays: dict[str, Any], candidates: Any, tags: Any, normalised: bool) -> Any:
    """The loss from all log-probabilities, or logits, and the score of every sequence of candidates."""
    table = arrays["hidden"] @ arrays["weight"].T
    table = jax.nn.log_softmax(table) if normalised else table
    scores = jnp.take_along_axis(table, jnp.maximum(candidates, 0), axis=2)
    given = jnp.where(candidates < 0, -jnp.inf, scores), _between(arrays, candidates), np.asarray(tags)
    return (
        sum(
            jax.nn.logsumexp(_scores(e, between, _every_path(e))) - _scores(e, between, own)
            for e, between, own in zip(*given, strict=True)
        )
        / 2
    )


@pytest.mark.parametrize("padded", [False, True])
def test_emissions_read_by_id_from_a_streamed_head_train_it(padded: bool) -> None:
    """K candidates for each position out of a vocabulary: the gradient reaches their weights and no others."""
    with jax.enable_x64(True):
        arrays, candidates, tags = _tagger(padded)
        got = jax.jit(jax.value_and_grad(_from_streamed_head))(arrays, candidates, tags)
        for normalised in (True, False):  # a position's log-sum-exp is the same for all its candidates
            want = jax.value_and_grad(_from_stored_scores)(arrays, candidates, tags, normalised)
            assert_close(got, want, 1e-12)
        touched = np.isin(np.arange(50), candidates)
        by_tag = np.abs(got[1]["weight"]).max(axis=1)
        # The log-sum-exp's gradient reaches every tag: times the sum of marginals minus one-hot, 0 but for rounding.
        assert by_tag[~touched].max() < 1e-14 < 1e-3 < by_tag[touched].min()
        assert got[0] > 0


def test_positions_behind_the_mask_may_hold_anything() -> None:
    with jax.enable_x64(True):
        arrays, candidates, tags = _tagger(False)
        valid = jnp.arange(4) < jnp.array([[4], [2]])
        run = jax.jit(jax.value_and_grad(functools.partial(_from_streamed_head, mask=valid)))
        hidden = jnp.where(valid[..., None], arrays["hidden"], jnp.nan)
        padded = jnp.where(valid[..., None], candidates, -100)
        got = run({**arrays, "hidden": hidden}, padded, jnp.where(valid, tags, -100))
        assert_close(got, run(arrays, candidates, tags), 1e-12)


def test_forbidden_candidates_and_transitions_leave_finite_gradients() -> None:
    emissions = jnp.zeros((3, 2)).at[1, 0].set(-jnp.inf)
    transitions = jnp.array([[0.0, 0.0], [-jnp.inf, 0.0]])
    run: Any = jax.value_and_grad(linear_chain_crf, (0, 2))
    value, gradients = run(emissions, jnp.array([0, 1, 1]), transitions)
    # Left are 0-1-1 and 1-1-1.
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    assert all(np.all(np.isfinite(g)) for g in gradients)
    value, gradients = run(emissions, jnp.array([0, 1, 0]), transitions)
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


def test_transitions_alone_may_vary_over_a_mesh() -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    emissions, tags, transitions = jnp.zeros((2, 4, 3)), jnp.zeros((2, 4), int), jnp.ones((2, 3, 3, 3))

    def loss(transitions: jax.Array) -> jax.Array:
        return linear_chain_crf(emissions, tags, transitions, reduction="none")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(sharded)(transitions), loss(transitions))
