"""Under `jax_numpy_rank_promotion="raise"` every public function of a head computes as otherwise."""

import jax
import jax.numpy as jnp
import pytest

import pallas_ce

VOCAB, WIDTH, ROWS = 37, 16, (2, 7)
HIDDEN = jax.random.normal(jax.random.key(0), (*ROWS, WIDTH))
WEIGHT = jax.random.normal(jax.random.key(1), (VOCAB, WIDTH))
LABELS = jnp.arange(14).reshape(ROWS).at[0, 0].set(-100)
HEAD = {"logit_softcap": 5.0, "scratch_bytes": 4096}
ROW_TEMPERATURE = jnp.linspace(0.5, 2.0, 14).reshape(ROWS)
OF_LOSS = {
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "token_weights": jnp.ones(ROWS),
    "class_weights": jnp.ones(VOCAB),
    "return_metrics": True,
}

CALLS = {
    "linear_cross_entropy": lambda x, w, **o: pallas_ce.linear_cross_entropy(x, w, LABELS, **OF_LOSS, **o),
    "in_forward": lambda x, w, **o: pallas_ce.linear_cross_entropy(x, w, LABELS, backward="in_forward", **OF_LOSS, **o),
    "recompute": lambda x, w, **o: pallas_ce.linear_cross_entropy(x, w, LABELS, backward="recompute", **OF_LOSS, **o),
    "reference": lambda x, w, **o: pallas_ce.linear_cross_entropy(
        x, w, LABELS, implementation="reference", **OF_LOSS, **o
    ),
    "linear_loss": lambda x, w, **o: pallas_ce.linear_loss(
        lambda row: row.lse - row.target_logit, x, w, LABELS, temperature=ROW_TEMPERATURE, **o
    ),
    "linear_log_probs": lambda x, w, **o: pallas_ce.linear_log_probs(
        x, w, LABELS, temperature=ROW_TEMPERATURE, return_entropy=True, return_sum_sq_probs=True, return_hit=True, **o
    ),
    "linear_row_statistics": lambda x, w, **o: pallas_ce.linear_row_statistics(
        x,
        w,
        LABELS,
        statistics=("lse", "entropy", "mean_logit", "argmax"),
        logit_weights=jnp.ones(VOCAB) / VOCAB,
        row_mask=LABELS >= 0,
        **o,
    ),
    "linear_top_k": lambda x, w, **o: pallas_ce.linear_top_k(x, w, 3, temperature=ROW_TEMPERATURE, **o).log_probs,
    "linear_sample": lambda x, w, **o: pallas_ce.linear_sample(jax.random.key(2), x, w, **o).log_probs,
    "linear_sample of the 3 largest": lambda x, w, **o: (
        pallas_ce.linear_sample(jax.random.key(2), x, w, top_k=3, **o).log_probs
    ),
    **{
        name: lambda x, w, name=name, **o: pallas_ce.linear_distillation(
            x,
            w,
            2 * HIDDEN,
            WEIGHT,
            LABELS,
            divergence=name,
            teacher_bias=jnp.ones(VOCAB),
            token_weights=jnp.ones(ROWS),
            **o,
        )
        for name in ("forward_kl", "reverse_kl", "jsd")
    },
    "sampled_softmax_cross_entropy": lambda x, w, logit_softcap, **o: pallas_ce.sampled_softmax_cross_entropy(
        x, w, LABELS, key=jax.random.key(3), num_samples=8, **o
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_ours_is_promoted_in_rank(name):
    def total(hidden, weight, bias, scale):
        found = CALLS[name](hidden, weight, bias=bias, logit_scale=scale, **HEAD)
        leaves = [leaf for leaf in jax.tree.leaves(found) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(jnp.sum(leaf) for leaf in leaves)

    inputs = (HIDDEN, WEIGHT, jnp.linspace(-1.0, 1.0, VOCAB), jnp.float32(1.5))
    run = total if name.startswith(("linear_top_k", "linear_sample")) else jax.grad(total, argnums=(0, 1, 2, 3))
    with jax.numpy_rank_promotion("raise"):
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(run(*inputs)))
