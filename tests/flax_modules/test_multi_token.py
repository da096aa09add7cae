"""Multi-token prediction in either framework: k losses, each the plain one on labels shifted further."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_modules import nnx as on_nnx
from tests.flax_modules.oracle import (
    ADAPTER,
    FEATURES,
    RANK,
    VOCAB,
    assert_agrees,
    assert_close,
    initialised,
    logits_of,
    mean_cross_entropy,
    of,
    shifted,
)

K = 3


# The reference implementation compiles faster, and tests with it do not depend on which one runs.
def head(framework, features=FEATURES, vocab_size=VOCAB, implementation="reference", **options):
    return of(framework, "LossHead", features, vocab_size, implementation=implementation, **options)


def shared(framework, one=None, **options):
    options = {"projection_init": jax.nn.initializers.normal(0.2)} | options
    return of(framework, "MultiTokenLossHead", one or head(framework), K, **options)


def of_head(params, i=None):
    """The parameters of the head that is shared, or of one of several."""
    if "heads" in params:
        return params["heads"][i or 0]
    return params["head" if i is None else f"head_{i}"]


def projections(params):
    if "projections" in params:
        return [params["projections"][i]["kernel"][...] for i in range(K - 1)]
    return [params[f"projections_{i}"]["kernel"] for i in range(K - 1)]


def losses(states, heads, labels):
    """The loss of each head, by stored logits."""
    stored = [logits_of(head, x) for head, x in zip(heads, states, strict=True)]
    return [mean_cross_entropy(z, shifted(labels, i)) for i, z in enumerate(stored)]


@pytest.fixture
def mtp(framework, hidden, labels):
    """Parameters of heads that share a kernel, and how they are applied."""
    return initialised(shared(framework), hidden, labels)


def test_a_shared_head_is_the_mean_of_k_losses_of_projected_hidden_states(framework, hidden, labels):
    """And has one adapter for all of them."""
    one = head(framework, implementation=None, **ADAPTER)
    params, apply = initialised(shared(framework, one), hidden, labels)
    shapes = sorted(x.shape for x in jax.tree.leaves(params))
    assert shapes == sorted([*[(FEATURES, FEATURES)] * (K - 1), (FEATURES, VOCAB), (FEATURES, RANK), (RANK, VOCAB)])

    def canonical(params, hidden):
        states = [hidden, *(hidden + hidden @ p for p in projections(params))]
        return sum(losses(states, [of_head(params)] * K, labels)) / K

    assert_agrees(apply, canonical, params, hidden, labels)


def test_separate_heads_read_the_same_hidden_states(framework, hidden, labels):
    heads = [head(framework) for _ in range(K)]
    params, apply = initialised(framework.MultiTokenLossHead(heads, head_weights=(1.0, 0.5, 0.25)), hidden, labels)

    def canonical(params, hidden):
        first, second, third = losses([hidden] * K, [of_head(params, i) for i in range(K)], labels)
        return first + 0.5 * second + 0.25 * third

    assert_agrees(apply, canonical, params, hidden, labels)
    assert_close(apply(params, hidden, head=1, method="logits"), logits_of(of_head(params, 1), hidden))


def test_blocks_of_the_users_own_give_one_hidden_state_a_head(framework, hidden, labels):
    states = [hidden, jnp.tanh(hidden), -hidden]
    params, apply = initialised(shared(framework, project_hidden=False, head_weights=1.0), states, labels)
    assert len(jax.tree.leaves(params)) == 1
    expected = losses(states, [of_head(params)] * K, labels)
    loss, metrics = apply(params, states, labels, normalizer=(12.0, 10.0, 8.0), return_metrics=True)
    assert_close(loss, sum(expected))
    for metric, count in zip(metrics, (12, 10, 8), strict=True):
        assert count in [int(value) for value in jax.tree.leaves(metric)]
    assert_close(apply(params, states, labels, head_weights=jnp.array([0.0, 1.0, 0.0])), expected[1])
    with pytest.raises(ValueError, match="give a sequence of 3 hidden states"):
        apply(params, hidden, labels)
    with pytest.raises(ValueError, match="hidden is a sequence of 2 arrays, but there are 3 heads"):
        apply(params, states[:2], labels)


def test_labels_stop_at_the_row_end_and_at_ignored_labels(framework):
    labels = jnp.array([[1, 2, -100, 3, 4, 5], [6, 7, 8, 9, 10, 40]])  # a packed row; 40 is outside the vocabulary
    first, second, third = shared(framework).future_labels(labels)
    assert first is labels
    np.testing.assert_array_equal(second, [[2, -100, -100, 4, 5, -100], [7, 8, 9, 10, -100, -100]])
    np.testing.assert_array_equal(third, [[-100, -100, -100, 5, -100, -100], [8, 9, 10, -100, -100, -100]])


def test_token_weights_move_with_their_labels(mtp, hidden, labels):
    params, apply = mtp
    weights = jnp.linspace(0.0, 2.0, labels.size).reshape(labels.shape)
    expected = []
    for i in range(K):
        moved = jnp.zeros_like(weights).at[:, : 7 - i].set(weights[:, i:])
        logits = apply(params, hidden, head=i, method="logits")
        expected.append(mean_cross_entropy(logits, shifted(labels, i), moved))
    assert_close(apply(params, hidden, labels, token_weights=weights), sum(expected) / K)


def test_weights_of_the_heads_may_be_traced_and_normalizers_replace_each_heads_count(mtp, hidden, labels):
    params, apply = mtp
    each = [apply(params, hidden, labels, head_weights=jnp.eye(K)[i], reduction="none").sum() for i in range(K)]
    a, b, c = (apply(params, hidden, labels, head_weights=jnp.eye(K)[i]) for i in range(K))
    scheduled = jax.jit(lambda p, weight: apply(p, hidden, labels, head_weights=jnp.array([1.0, weight, weight])))
    assert_close(scheduled(params, 0.3), a + 0.3 * (b + c))
    assert_close(apply(params, hidden, labels, head_weights=1.0, normalizer=10.0), sum(each) / 10)
    several = apply(params, hidden, labels, head_weights=1.0, normalizer=(10.0, 9.0, 8.0))
    assert_close(several, each[0] / 10 + each[1] / 9 + each[2] / 8)


def test_the_first_head_is_the_plain_next_token_head(framework, mtp, hidden, labels):
    params, apply = mtp
    logits = logits_of(of_head(params), hidden)
    assert_close(apply(params, hidden, method="logits"), logits)
    assert_close(apply(params, hidden, labels, head_weights=(1.0, 0.0, 0.0)), mean_cross_entropy(logits, labels))
    # Projections start at zero by default: then every head begins as this one.
    params, apply = initialised(of(framework, "MultiTokenLossHead", head(framework), K), hidden, labels)
    assert_close(apply(params, hidden, head=2, method="logits"), apply(params, hidden, method="logits"))


def test_rows_shorter_than_the_number_of_tokens_have_nothing_to_count(mtp, hidden, labels):
    (params, apply), row, first = mtp, hidden[:, :1], labels[:, :1]
    loss, grads = jax.value_and_grad(lambda params: apply(params, row, first, head_weights=1.0))(params)
    assert_close(loss, mean_cross_entropy(logits_of(of_head(params), row), first))
    assert not np.any(projections(grads)[0])


def test_weights_of_the_heads_are_as_wide_as_their_losses(hidden, labels):
    with jax.enable_x64(True):
        heads = [on_nnx.LossHead(FEATURES, VOCAB, param_dtype=jnp.float64, rngs=nnx.Rngs(i)) for i in range(K)]
        several = on_nnx.MultiTokenLossHead(heads)
        x = jnp.asarray(hidden, jnp.float64)
        want = sum(head(x, y) for head, y in zip(heads, several.future_labels(labels), strict=True)) / 3
        np.testing.assert_allclose(several(x, labels), want, rtol=1e-14)


def test_construction_names_what_is_wrong(framework, hidden, labels):
    one, other = head(framework), head(framework, vocab_size=VOCAB + 1)
    for message, given in (
        ("num_tokens=None must be an int, at least 1", (one,)),
        ("num_tokens=2, but head is a sequence of 3 heads", ([one] * 3, 2)),
        ("empty sequence", ([],)),
        (r"different vocab_size: \[37, 38\]", ([one, other],)),
        ("different features", ([one, head(framework, 8)],)),
    ):
        with pytest.raises(ValueError, match=message):
            initialised(of(framework, "MultiTokenLossHead", *given), hidden, labels)
    with pytest.raises(TypeError, match="head is a int; it must be a LossHead"):
        initialised(of(framework, "MultiTokenLossHead", 3), hidden, labels)
    with pytest.raises(ValueError, match=r"pass rngs=nnx\.Rngs"):
        on_nnx.MultiTokenLossHead(head(on_nnx), K)


def test_calls_name_what_is_wrong(mtp, hidden, labels):
    params, apply = mtp
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"head={wrong} is not one of the 3 heads"):
            apply(params, hidden, head=wrong, method="logits")
    with pytest.raises(ValueError, match=r"head_weights has shape \(2,\)"):
        apply(params, hidden, labels, head_weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="labels"):
        apply(params, hidden, labels.at[0, 0].set(99), validate_labels=True)
