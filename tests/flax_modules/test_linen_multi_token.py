"""Multi-token prediction in Linen: k losses, each the plain one on labels shifted further."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_modules.linen import LossHead, MultiTokenLossHead
from tests.flax_modules.oracle import assert_close, mean_cross_entropy, shifted, stored_logits

FEATURES, VOCAB, K = 16, 37, 3


def shared(**options):
    options.setdefault("projection_init", nn.initializers.normal(0.2))
    # The reference implementation compiles faster, and what is tested with it does not depend on which one runs.
    return MultiTokenLossHead(LossHead(FEATURES, VOCAB, implementation="reference"), K, **options)


def test_a_shared_head_is_the_mean_of_k_losses_of_projected_hidden_states(hidden, labels):
    mtp = shared()
    variables = mtp.init(jax.random.key(0), hidden, labels)
    assert jax.tree.map(jnp.shape, variables["params"]) == {
        "head": {"kernel": (FEATURES, VOCAB)},
        "projections_0": {"kernel": (FEATURES, FEATURES)},
        "projections_1": {"kernel": (FEATURES, FEATURES)},
    }

    def canonical(variables, hidden):
        params = variables["params"]
        states = [hidden, *(hidden + hidden @ params[f"projections_{i}"]["kernel"] for i in range(K - 1))]
        kernel = params["head"]["kernel"]
        return sum(mean_cross_entropy(stored_logits(x, kernel), shifted(labels, i)) / K for i, x in enumerate(states))

    actual = jax.value_and_grad(lambda v, x: mtp.apply(v, x, labels), argnums=(0, 1))(variables, hidden)
    assert_close(actual, jax.value_and_grad(canonical, argnums=(0, 1))(variables, hidden))


def test_separate_heads_read_the_same_hidden_states(hidden, labels):
    mtp = MultiTokenLossHead([LossHead(FEATURES, VOCAB) for _ in range(K)], head_weights=(1.0, 0.5, 0.25))
    variables = mtp.init(jax.random.key(0), hidden, labels)
    kernels = [variables["params"][f"head_{i}"]["kernel"] for i in range(K)]
    losses = [mean_cross_entropy(stored_logits(hidden, kernel), shifted(labels, i)) for i, kernel in enumerate(kernels)]
    assert_close(mtp.apply(variables, hidden, labels), losses[0] + 0.5 * losses[1] + 0.25 * losses[2])
    assert_close(mtp.apply(variables, hidden, head=1, method="logits"), stored_logits(hidden, kernels[1]))


@pytest.mark.parametrize("compact", [False, True])
def test_it_can_be_tied_to_an_embedding_of_the_model(compact, labels):
    class InSetup(nn.Module):
        def setup(self):
            self.embed = nn.Embed(VOCAB, FEATURES)
            self.head = MultiTokenLossHead(LossHead.tied(self.embed), K)

        def __call__(self, tokens, labels):
            return self.head(self.embed(tokens), labels)

    class Compact(nn.Module):
        @nn.compact
        def __call__(self, tokens, labels):
            embed = nn.Embed(VOCAB, FEATURES, name="embed")
            return MultiTokenLossHead(LossHead.tied(embed), K, name="head")(embed(tokens), labels)

    model, tokens = Compact() if compact else InSetup(), jnp.maximum(labels, 0)
    variables = model.init(jax.random.key(0), tokens, labels)
    assert jax.tree.map(jnp.shape, variables["params"]) == {
        "embed": {"embedding": (VOCAB, FEATURES)},
        "head": {f"projections_{i}": {"kernel": (FEATURES, FEATURES)} for i in range(K - 1)},
    }

    def canonical(variables):
        table = variables["params"]["embed"]["embedding"]
        logits = stored_logits(table[tokens], table.T)  # projections are still zero
        return sum(mean_cross_entropy(logits, shifted(labels, i)) for i in range(K)) / K

    loss, grads = jax.value_and_grad(model.apply)(variables, tokens, labels)
    expected, expected_grads = jax.value_and_grad(canonical)(variables)
    assert_close(loss, expected)
    assert_close(grads["params"]["embed"], expected_grads["params"]["embed"])


def test_blocks_of_the_users_own_weights_normalizer_and_metrics(hidden, labels):
    mtp = shared(project_hidden=False, head_weights=1.0)
    states = [hidden, jnp.tanh(hidden), -hidden]
    variables = mtp.init(jax.random.key(0), states, labels)
    kernel = variables["params"]["head"]["kernel"]
    loss, metrics = mtp.apply(variables, states, labels, normalizer=(12.0, 10.0, 8.0), return_metrics=True)
    expected = [mean_cross_entropy(stored_logits(x, kernel), shifted(labels, i)) for i, x in enumerate(states)]
    assert_close(loss, sum(expected))
    assert len(metrics) == K
    assert_close(mtp.apply(variables, states, labels, head_weights=jnp.array([0.0, 1.0, 0.0])), expected[1])


def test_labels_stop_at_the_row_end_and_at_ignored_labels():
    first, second, third = shared().future_labels(jnp.array([1, 2, -100, 3, 4, 5]))
    np.testing.assert_array_equal(first, [1, 2, -100, 3, 4, 5])
    np.testing.assert_array_equal(second, [2, -100, -100, 4, 5, -100])
    np.testing.assert_array_equal(third, [-100, -100, -100, 5, -100, -100])


def test_errors_name_what_is_wrong(hidden, labels):
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="num_tokens=None: with one head shared"):
        MultiTokenLossHead(LossHead(FEATURES, VOCAB)).init(key, hidden, labels)
    with pytest.raises(ValueError, match="different features"):
        MultiTokenLossHead([LossHead(FEATURES, VOCAB), LossHead(8, VOCAB)]).init(key, hidden, labels)
    with pytest.raises(ValueError, match="give a sequence of 3 hidden states"):
        shared(project_hidden=False).init(key, hidden, labels)
    variables = shared().init(key, hidden, labels)
    with pytest.raises(ValueError, match="head=-1 is not one of the 3 heads"):
        shared().apply(variables, hidden, head=-1, method="logits")
