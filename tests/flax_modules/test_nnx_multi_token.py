"""Multi-token prediction in NNX: k losses, each the plain one on labels shifted further."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_modules.nnx import LossHead, MultiTokenLossHead
from tests.flax_modules.oracle import assert_close, mean_cross_entropy, shifted, stored_logits

FEATURES, VOCAB, K = 16, 37, 3


# The reference implementation compiles faster, and what is tested with it does not depend on which one runs.
def shared(implementation="reference", **options):
    rngs = nnx.Rngs(0)
    options.setdefault("projection_init", nnx.initializers.normal(0.2))
    head = LossHead(FEATURES, VOCAB, implementation=implementation, rngs=rngs)
    return MultiTokenLossHead(head, K, rngs=rngs, **options)


def separate(**options):
    heads = [LossHead(FEATURES, VOCAB, implementation="reference", rngs=nnx.Rngs(i)) for i in range(K)]
    return MultiTokenLossHead(heads, **options)


def test_a_shared_head_is_the_mean_of_k_losses_of_projected_hidden_states(hidden, labels):
    def canonical(mtp, hidden):
        kernel = mtp.heads[0].kernel[...]
        states = [hidden, *(hidden + hidden @ projection.kernel[...] for projection in mtp.projections)]
        losses = [mean_cross_entropy(stored_logits(x, kernel), shifted(labels, i)) for i, x in enumerate(states)]
        return sum(losses) / K

    mtp = shared(implementation=None)
    actual = nnx.value_and_grad(lambda mtp, hidden: mtp(hidden, labels), argnums=(0, 1))(mtp, hidden)
    assert_close(actual, nnx.value_and_grad(canonical, argnums=(0, 1))(mtp, hidden))


def test_separate_heads_read_the_same_hidden_states(hidden, labels):
    def canonical(mtp, hidden):
        losses = [
            mean_cross_entropy(stored_logits(hidden, head.kernel[...]), shifted(labels, i))
            for i, head in enumerate(mtp.heads)
        ]
        return 1.0 * losses[0] + 0.5 * losses[1] + 0.25 * losses[2]

    mtp = separate(head_weights=(1.0, 0.5, 0.25))
    actual = nnx.value_and_grad(lambda mtp, hidden: mtp(hidden, labels), argnums=(0, 1))(mtp, hidden)
    assert_close(actual, nnx.value_and_grad(canonical, argnums=(0, 1))(mtp, hidden))


def test_blocks_of_the_users_own_give_one_hidden_state_a_head(hidden, labels):
    head = LossHead(FEATURES, VOCAB, rngs=nnx.Rngs(0))
    mtp = MultiTokenLossHead(head, K, project_hidden=False)
    states = [hidden, jnp.tanh(hidden), -hidden]
    assert len(jax.tree.leaves(nnx.state(mtp))) == 1
    expected = [mean_cross_entropy(head.logits(x), shifted(labels, i)) for i, x in enumerate(states)]
    assert_close(mtp(states, labels, head_weights=1.0), sum(expected))
    with pytest.raises(ValueError, match="give a sequence of 3 hidden states"):
        mtp(hidden, labels)
    with pytest.raises(ValueError, match="hidden is a sequence of 2 arrays, but there are 3 heads"):
        mtp(states[:2], labels)


def test_labels_stop_at_the_row_end_and_at_ignored_labels():
    mtp = separate()
    labels = jnp.array([[1, 2, -100, 3, 4, 5], [6, 7, 8, 9, 10, 40]])  # a packed row; 40 is outside the vocabulary
    first, second, third = mtp.future_labels(labels)
    assert first is labels
    np.testing.assert_array_equal(second, [[2, -100, -100, 4, 5, -100], [7, 8, 9, 10, -100, -100]])
    np.testing.assert_array_equal(third, [[-100, -100, -100, 5, -100, -100], [8, 9, 10, -100, -100, -100]])


def test_unsigned_labels_are_shifted_as_signed_ones(hidden, labels):
    mtp = shared()
    tokens = jnp.maximum(labels, 0)
    assert_close(mtp(hidden, tokens.astype(jnp.uint16)), mtp(hidden, tokens))


def test_token_weights_move_with_their_labels(hidden, labels):
    mtp = separate()
    weights = jnp.linspace(0.0, 2.0, labels.size).reshape(labels.shape)
    expected = []
    for i, head in enumerate(mtp.heads):
        moved = jnp.zeros_like(weights).at[:, : 7 - i].set(weights[:, i:])
        expected.append(mean_cross_entropy(head.logits(hidden), shifted(labels, i), moved))
    assert_close(mtp(hidden, labels, token_weights=weights), sum(expected) / K)


def test_given_normalizers_replace_each_heads_count(hidden, labels):
    mtp = shared(head_weights=1.0)
    sums = [head_loss.sum() for head_loss in per_head(mtp, hidden, labels)]
    assert_close(mtp(hidden, labels, normalizer=10.0), sum(sums) / 10)
    expected = sums[0] / 10 + sums[1] / 9 + sums[2] / 8
    assert_close(mtp(hidden, labels, normalizer=(10.0, 9.0, 8.0)), expected)


def per_head(mtp, hidden, labels):
    """The losses of each head and token."""
    return [mtp(hidden, labels, head_weights=jnp.eye(K)[i], reduction="none") for i in range(K)]


def test_head_weights_may_be_a_traced_schedule(hidden, labels):
    mtp = shared()
    losses = [mtp(hidden, labels, head_weights=jnp.eye(K)[i]) for i in range(K)]
    scheduled = nnx.jit(lambda mtp, weight: mtp(hidden, labels, head_weights=jnp.array([1.0, weight, weight])))
    assert_close(scheduled(mtp, 0.3), losses[0] + 0.3 * (losses[1] + losses[2]))


def test_the_first_head_is_the_plain_next_token_head(hidden, labels):
    mtp = shared()
    head = mtp.heads[0]
    assert_close(mtp.logits(hidden), head.logits(hidden))
    assert_close(mtp(hidden, labels, head_weights=(1.0, 0.0, 0.0)), head(hidden, labels))
    # Projections start at zero by default: then every head begins as this one.
    fresh = shared(projection_init=nnx.initializers.zeros_init())
    assert_close(fresh.logits(hidden, head=2), fresh.logits(hidden))


def test_logits_and_metrics_of_each_head_agree_with_its_loss(hidden, labels):
    mtp = shared(head_weights=1.0)
    loss, metrics = mtp(hidden, labels, return_metrics=True)
    expected = [mean_cross_entropy(mtp.logits(hidden, head=i), shifted(labels, i)) for i in range(K)]
    assert_close(loss, sum(expected))
    assert len(metrics) == K
    for metric, count in zip(metrics, (12, 10, 8), strict=True):
        assert count in [int(value) for value in jax.tree.leaves(metric)]


def test_rows_shorter_than_the_number_of_tokens_have_nothing_to_count(hidden, labels):
    loss, grads = nnx.value_and_grad(lambda mtp: mtp(hidden[:, :1], labels[:, :1], head_weights=1.0))(shared())
    assert_close(loss, mean_cross_entropy(shared().logits(hidden[:, :1]), labels[:, :1]))
    assert not np.any(grads["projections"][0]["kernel"][...])


def test_tied_multi_token_model_trains(labels):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCAB, FEATURES, rngs=rngs)
            self.head = MultiTokenLossHead(LossHead.tied(self.embed), K, rngs=rngs)

        def __call__(self, tokens, labels):
            return self.head(self.embed(tokens), labels)

    model = Model(nnx.Rngs(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert size == VOCAB * FEATURES + (K - 1) * FEATURES**2
    optimizer = nnx.Optimizer(model, optax.adam(0.03), wrt=nnx.Param)
    tokens = jnp.arange(16).reshape(2, 8)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: model(tokens[:, :-1], tokens[:, 1:]))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]


def test_construction_and_calls_name_what_is_wrong(hidden, labels):
    rngs = nnx.Rngs(0)
    head = LossHead(FEATURES, VOCAB, rngs=rngs)
    with pytest.raises(ValueError, match="num_tokens=None: with one head shared"):
        MultiTokenLossHead(head, rngs=rngs)
    with pytest.raises(ValueError, match=r"pass rngs=nnx\.Rngs"):
        MultiTokenLossHead(head, K)
    with pytest.raises(ValueError, match="num_tokens=2, but head is a sequence of 3 heads"):
        MultiTokenLossHead([head] * 3, 2)
    with pytest.raises(ValueError, match="empty sequence"):
        MultiTokenLossHead([])
    with pytest.raises(ValueError, match=r"different vocab_size: \[37, 38\]"):
        MultiTokenLossHead([head, LossHead(FEATURES, VOCAB + 1, rngs=rngs)])
    with pytest.raises(ValueError, match="head=3 is not one of the 3 heads"):
        shared().logits(hidden, head=3)
    with pytest.raises(ValueError, match=r"head_weights has shape \(2,\)"):
        shared()(hidden, labels, head_weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="labels"):
        shared()(hidden, labels.at[0, 0].set(99), validate_labels=True)
