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

from pallas_ce import linear_chain_crf, linear_log_probs
from tests.pallas_ce.checks import assert_close
from tests.pallas_ce.streamed import no_stored_logits


def _by_enumeration(emissions: np.ndarray, tags: np.ndarray, transitions: np.ndarray, length: int) -> tuple[Any, Any]:
    """The loss of one sequence, and its gradient of the emissions: marginal probabilities minus the tags' one-hots."""
    k = emissions.shape[1]
    paths = list(itertools.product(range(k), repeat=length))

    def score(path: Any) -> float:
        moves = (transitions if transitions.ndim == 2 else transitions[i] for i in range(length - 1))
        return sum(emissions[t, y] for t, y in enumerate(path)) + sum(
            m[a, b] for m, a, b in zip(moves, path[:-1], path[1:], strict=True)
        )

    scores = np.array([score(path) for path in paths], np.float64)
    log_z = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
    gradient = np.zeros(emissions.shape)
    for path, s in zip(paths, scores, strict=True):
        gradient[np.arange(length), path] += np.exp(s - log_z)
    gradient[np.arange(length), tags[:length]] -= 1
    return log_z - score(tags[:length]), gradient


@hypothesis.given(data=st.data())
def test_loss_and_gradient_match_the_sum_over_all_sequences(data: Any) -> None:
    batch, length, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    emissions = rng.normal(size=(batch, length, k)).astype(np.float32) * data.draw(st.sampled_from([1.0, 30.0]))
    tags = rng.integers(0, k, (batch, length))
    shape = data.draw(st.sampled_from([(k, k), (batch, length - 1, k, k)]))
    transitions = rng.normal(size=shape).astype(np.float32)
    lengths = rng.integers(1, length + 1, batch)
    mask = np.arange(length) < lengths[:, None]

    @jax.jit
    @jax.value_and_grad
    def ours(emissions: Any) -> Any:
        return linear_chain_crf(emissions, tags, transitions, mask=mask)

    each = [
        _by_enumeration(emissions[b], tags[b], transitions if len(shape) == 2 else transitions[b], lengths[b])
        for b in range(batch)
    ]
    want = np.mean([loss for loss, _ in each]), np.stack([gradient for _, gradient in each]) / batch
    # A loss is a small difference of scores of up to 30 for each position.
    assert_close(ours(jnp.asarray(emissions)), want, 1e-5, floor=1e-5)


def test_a_sequence_of_one_position_has_no_transitions() -> None:
    rng = np.random.default_rng(0)
    emissions, tags = rng.normal(size=(2, 1, 3)).astype(np.float32), np.array([[1], [2]])
    want = jax.nn.logsumexp(emissions[:, 0], axis=1) - np.take_along_axis(emissions[:, 0], tags, 1)[:, 0]
    run: Any = jax.value_and_grad(lambda t: jnp.sum(linear_chain_crf(emissions, tags, t, reduction="none")))
    for shape in ((3, 3), (2, 0, 3, 3)):
        value, gradient = run(jnp.zeros(shape))
        np.testing.assert_allclose(value, want.sum(), rtol=1e-6)
        np.testing.assert_array_equal(gradient, np.zeros(shape))
    one = linear_chain_crf(emissions[0], tags[0], jnp.zeros((0, 3, 3)))
    np.testing.assert_allclose(one, want[0], rtol=1e-6)


def test_the_transitions_gradient_is_that_of_finite_differences() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        emissions, tags = rng.normal(size=(2, 5, 3)), rng.integers(0, 3, (2, 5))
        for shape in ((3, 3), (2, 4, 3, 3)):
            transitions, direction = rng.normal(size=shape), rng.normal(size=shape)
            run = jax.jit(lambda t: linear_chain_crf(emissions, tags, t))
            slope = (run(transitions + 1e-6 * direction) - run(transitions - 1e-6 * direction)) / 2e-6
            gradient = jax.jit(jax.grad(run))(transitions)
            np.testing.assert_allclose((np.asarray(gradient) * direction).sum(), slope, rtol=1e-6)


def _tagger(padded: bool) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Head, transitions between all 50 tags and candidates `[2, 4, 3]` among them; padded, the last of some is -100."""
    rng = np.random.default_rng(0)
    shapes = {"hidden": (2, 4, 6), "weight": (50, 6), "between": (50, 50)}
    arrays = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    candidates = np.stack([rng.choice(50, 3, replace=False) for _ in range(8)]).reshape(2, 4, 3)
    if padded:
        candidates[[0, 0, 1, 1], [0, 2, 2, 3], 2] = -100
    return arrays, jnp.asarray(candidates), jnp.asarray(rng.integers(0, 2, (2, 4)))


def _from_streamed_head(arrays: dict[str, Any], candidates: Any, tags: Any, **options: Any) -> Any:
    # 800 bytes hold a tile of a few columns: the head is read in several.
    emissions = linear_log_probs(arrays["hidden"], arrays["weight"], candidates, scratch_bytes=800)
    emissions = jnp.where(candidates < 0, -jnp.inf, emissions)
    known = jnp.maximum(candidates, 0)
    transitions = arrays["between"][known[:, :-1, :, None], known[:, 1:, None, :]]
    return linear_chain_crf(emissions, tags, transitions, **options)


def _from_stored_scores(arrays: dict[str, Any], candidates: Any, tags: Any, normalised: bool) -> Any:
    """The loss from all log-probabilities, or logits, and the score of every sequence of candidates, -100 left out."""
    table = arrays["hidden"] @ arrays["weight"].T
    table = jax.nn.log_softmax(table) if normalised else table
    losses = []
    for scores, ids, own in zip(table, np.asarray(candidates), np.asarray(tags), strict=True):
        paths = np.array(list(itertools.product(*([c for c in of_place if c >= 0] for of_place in ids))))

        def score(path: Any, scores: Any = scores) -> Any:
            return scores[jnp.arange(4), path].sum(-1) + arrays["between"][path[..., :-1], path[..., 1:]].sum(-1)

        losses.append(jax.nn.logsumexp(score(paths)) - score(ids[np.arange(4), own]))
    return sum(losses) / 2


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


def test_a_padded_candidate_is_as_if_absent() -> None:
    with jax.enable_x64(True):
        arrays, candidates, tags = _tagger(False)
        run = jax.jit(jax.value_and_grad(_from_streamed_head))
        padding = jnp.full((2, 4, 2), -100)
        wide = jnp.concatenate([candidates, padding], axis=2)
        assert_close(run(arrays, wide, tags), run(arrays, candidates, tags), 1e-13)
        # Left as it is, 0 takes the padding for the likeliest candidate.
        emissions = linear_log_probs(arrays["hidden"], arrays["weight"], wide)
        assert np.all(np.argmax(emissions, axis=2) == 3)


def test_positions_behind_the_mask_may_hold_anything() -> None:
    with jax.enable_x64(True):
        arrays, candidates, tags = _tagger(False)
        valid = jnp.arange(4) < jnp.array([[4], [2]])
        run = jax.jit(jax.value_and_grad(functools.partial(_from_streamed_head, mask=valid)))
        hidden = jnp.where(valid[..., None], arrays["hidden"], jnp.nan)
        padded = jnp.where(valid[..., None], candidates, -100)
        got = run({**arrays, "hidden": hidden}, padded, jnp.where(valid, tags, -100))
        assert_close(got, run(arrays, candidates, tags), 1e-12)


def test_training_on_a_streamed_heads_emissions_stores_no_logits() -> None:
    n, length, h, v, k = 4096, 64, 64, 40_000, 4

    def loss(hidden: Any, weight: Any, candidates: Any) -> Any:
        emissions = linear_log_probs(hidden, weight, candidates).reshape(-1, length, k)
        return linear_chain_crf(emissions, jnp.zeros((n // length, length), int), jnp.zeros((k, k)))

    shapes = ((n, h), jnp.float32), ((v, h), jnp.float32), ((n, k), jnp.int32)
    no_stored_logits(jax.grad(loss, (0, 1)), n, v, 160 * 2**20, *shapes)


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
