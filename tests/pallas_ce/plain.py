"""The functions of this library in plain JAX on materialised logits: what NaN and infinities do in each.

In 64-bit mode it is the exact computation for calls of few shapes; `oracle.py` has it, with gradients by formula, for
shapes that are drawn, where JAX compiles each. Only the rows that count and the columns that exist are looked at. Two
forms of the log-softmax are plain JAX, `FORMS`; they differ in a row with +inf. What the docstrings promise beyond it
stands here once: 0·(±inf) is 0 (`times`, `plogp`), and an infinite divergence has gradient 0 (`divergence`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.pallas_ce.oracle import LOW_RANK_SCALE

Arrays = dict[str, Any]


def shifted_lse(z: Any) -> Any:
    """As `jax.nn.log_softmax` takes it: nan in a row with +inf, where `jax.nn.logsumexp` is +inf."""
    top = jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(z - jnp.where(jnp.isneginf(top), 0.0, top)), axis=-1)) + top[..., 0]


FORMS: dict[str, Callable[[Any], Any]] = {
    "logsumexp": lambda z: jax.nn.logsumexp(z, axis=-1),
    "log_softmax": shifted_lse,
}


def times(weight: Any, value: Any) -> Any:
    """`weight·value` with 0·(±inf) = 0."""
    return weight * jnp.where((weight == 0) & jnp.isinf(value), 0.0, value)


def logits(a: Arrays, rows: Any, classes: int | None, softcap: float | None = None, prefix: str = "") -> Any:
    """`[rows, classes]`, of the arrays whose names have that prefix; in float32, or float64 in 64-bit mode."""
    wide = {name: jnp.asarray(x, float) for name, x in a.items()}
    hidden, weight = wide[f"{prefix}hidden"][rows], wide[f"{prefix}weight"][:classes]
    scale, bias = wide.get(f"{prefix}logit_scale", 1.0), wide.get(f"{prefix}bias")
    x = _product(hidden, weight)
    if not prefix and "down" in a:
        x = x + LOW_RANK_SCALE * _product(_product(hidden, wide["down"]), wide["up"][:classes])
    x = x * wide["vocab_scale"][:classes] if not prefix and "vocab_scale" in a else x
    z = scale * (x if bias is None else x + bias[:classes])
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return z / jax.lax.stop_gradient(wide["temperature"][rows])[:, None] if "temperature" in a else z


def _product(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y.T, precision="highest")


def at_labels(z: Any, labels: Any) -> Any:
    """`z [n, V]` at `labels [n]` or `[n, K]`; 0 for labels outside."""
    place = labels.reshape(len(labels), -1)
    inside = (place >= 0) & (place < z.shape[1])
    found = jnp.take_along_axis(z, jnp.clip(place, 0, z.shape[1] - 1), axis=1)
    return jnp.where(inside, found, 0.0).reshape(labels.shape)


def plogp(log_p: Any) -> tuple[Any, Any]:
    """`p`, and log p with 0 in place of -inf."""
    p = jnp.exp(log_p)
    return p, jnp.where(p == 0, 0.0, log_p)


def statistics(z: Any, labels: Any, u: Any, lse_of: Any) -> Arrays:
    """Every field of `RowStatistics`."""
    lse = lse_of(z)
    p, log_p = plogp(z - lse[:, None])
    entropy, target, top = -jnp.sum(p * log_p, axis=1), at_labels(z, labels), jnp.argmax(z, axis=1)
    return {
        "lse": lse,
        "target_logit": target,
        "log_prob": target - lse.reshape(-1, *[1] * (labels.ndim - 1)),
        "mean_logit": jnp.sum(times(u, z), axis=1),
        "mean_log_prob": jnp.sum(times(u, z - lse[:, None]), axis=1),
        "entropy": entropy,
        "expected_logit": lse - entropy,
        "sum_sq_probs": jnp.sum(p * p, axis=1),
        "max_logit": jnp.take_along_axis(z, top[:, None], axis=1)[:, 0],
        "argmax": top,
        "varentropy": jnp.sum(p * jnp.square(log_p + entropy[:, None]), axis=1),
    }


def cross_entropy(z: Any, labels: Any, a: Arrays, rows: Any, lse_of: Any, reduction: str) -> Any:
    """Of `z`, the rows that count: the loss of each, or their mean. `a` may have token and class weights, α and β."""
    lse, target = lse_of(z), at_labels(z, labels)
    classes = jax.lax.stop_gradient(a.get("class_weights", jnp.ones(z.shape[1])))
    alpha, beta = (jax.lax.stop_gradient(a.get(name, 0.0)) for name in ("label_smoothing", "z_loss"))
    w, c = a["token_weights"][rows] if "token_weights" in a else jnp.ones(len(z)), classes[labels]
    ce = (1 - alpha) * times(c, lse - target)
    if "label_smoothing" in a:
        ce = ce + alpha / z.shape[1] * jnp.sum(times(classes, lse[:, None] - z), axis=1)
    ce, z_part = times(w, ce), times(w, beta * lse**2) if "z_loss" in a else jnp.zeros(len(w))
    if reduction == "none":
        return ce + z_part
    return jnp.sum(ce) / jnp.sum(w * c) + jnp.sum(z_part) / jnp.sum(w)


def divergence(name: str, beta: float, z: Any, y: Any, lse_of: Any) -> Any:
    """`[n]`, of a student's logits from a teacher's."""
    p, q = z - lse_of(z)[:, None], y - lse_of(y)[:, None]
    if name == "forward_kl":
        return kl(q, p)
    if name == "reverse_kl":
        return kl(p, q)
    neither = jnp.isneginf(p) & jnp.isneginf(q)
    mixture = jnp.logaddexp(np.log(beta) + jnp.where(neither, 0.0, q), np.log1p(-beta) + jnp.where(neither, 0.0, p))
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def kl(log_x: Any, log_y: Any) -> Any:
    """`Σ x (log x - log y)`; +inf with gradient 0 where y lacks what x has."""
    infinite = jnp.any((log_x > -jnp.inf) & jnp.isneginf(log_y), axis=-1)
    counts = ~jnp.isneginf(log_x) & ~infinite[..., None]
    log_x, log_y = jnp.where(counts, log_x, 0.0), jnp.where(counts, log_y, 0.0)
    terms = jnp.sum(jnp.where(counts, jnp.exp(log_x) * (log_x - log_y), 0.0), axis=-1)
    return jnp.where(infinite, jnp.inf, terms)


def largest(z: Any, k: int) -> Any:
    """The ids `[n, k]` of the largest, nan before all others; ties in ascending order."""
    first = jnp.where(jnp.isnan(z), 1, 0)
    return jnp.lexsort((-jnp.where(first == 1, 0.0, z), -first), axis=1)[:, :k]


def chain(emissions: Any, tags: Any, transitions: Any, lse_of: Any) -> Any:
    """Of a sequence `[T, K]` with `[T-1, K, K]`, by the forward algorithm; +inf, gradient 0, for forbidden tags."""
    alpha, score = emissions[0], emissions[0, tags[0]]
    for t in range(1, len(tags)):
        alpha = emissions[t] + lse_of((alpha[:, None] + transitions[t - 1]).T)
        score = score + emissions[t, tags[t]] + transitions[t - 1, tags[t - 1], tags[t]]
    possible = ~jnp.isneginf(score)
    return jnp.where(possible, lse_of(jnp.where(possible, alpha, 0.0)) - jnp.where(possible, score, 0.0), jnp.inf)


def chains(emissions: Any, tags: Any, transitions: Any, lengths: Any, lse_of: Any) -> Any:
    """Of several sequences, each with its length; transitions are shared, or each position's own."""
    between = jnp.broadcast_to(transitions, (len(tags), tags.shape[1] - 1, *transitions.shape[-2:]))
    each = (chain(emissions[i, :t], tags[i, :t], between[i], lse_of) for i, t in enumerate(lengths))
    return jnp.stack([*each])


def sampled_softmax(a: Arrays, labels: Any, rows: Any, ids: Any, log_expected: Any, lse_of: Any) -> Any:
    """Of rows and their labels: the loss among the sampled classes and the row's own."""
    bias = a["bias"] if "bias" in a else jnp.zeros(len(a["weight"]))
    z = logits({**a, "weight": a["weight"][ids], "bias": bias[ids]}, rows, len(ids)) - log_expected[ids]
    dots = jnp.sum(a["hidden"][rows] * a["weight"][labels], axis=1)
    target = a.get("logit_scale", 1.0) * (dots + bias[labels]) - log_expected[labels]
    others = jnp.where(labels[:, None] == ids, -jnp.inf, z)
    return lse_of(jnp.concatenate([target[:, None], others], axis=1)) - target


def policy(a: Arrays, mask: Any) -> Any:
    """`[tokens]` of those that count: PPO's loss with a penalty of k3 and an entropy bonus; 0 with a -inf."""
    of_policies = "log_probs", "old_log_probs", "ref_log_probs"
    given = [a[name][mask] for name in (*of_policies, "entropy", "advantages")]
    there = ~functools.reduce(jnp.logical_or, map(jnp.isneginf, given[:3]))
    log_p, old, ref, entropy, advantage = (jnp.where(there, x, 0.0) for x in given)
    ratio, d = jnp.exp(_limited(log_p - jax.lax.stop_gradient(old))), _limited(jax.lax.stop_gradient(ref) - log_p)
    clipped, advantage = jnp.clip(ratio, 0.8, 1.2), jax.lax.stop_gradient(advantage)
    return -jnp.minimum(ratio * advantage, clipped * advantage) + 0.1 * (jnp.expm1(d) - d) - 0.1 * entropy


def _limited(x: Any) -> Any:
    most = 0.9 * np.log(np.finfo(np.float32).max)
    return jnp.clip(x, -most, most)


def preference(a: Arrays, mask: Any) -> Any:
    """`[pairs]` of those that count: DPO's loss."""
    chosen, rejected = ((a[x] - jax.lax.stop_gradient(a[f"ref_{x}"]))[mask] for x in ("chosen", "rejected"))
    return -jax.nn.log_sigmoid(0.1 * (chosen - rejected))


def top_k_distillation(name: str, a: Arrays, mask: Any, *, tail: bool, beta: float = 0.5) -> Any:
    """`[tokens]` of those that count."""
    given = a["log_probs"][mask], jax.lax.stop_gradient(a["teacher_log_probs"])[mask]
    there = ~jnp.isneginf(given[1])
    normalised = _with_tail if tail else jax.nn.log_softmax
    p, q = (normalised(jnp.where(there, x, -jnp.inf)) for x in given)
    if name == "jsd":
        neither = jnp.isneginf(p) & jnp.isneginf(q)
        p_part, q_part = (np.log(share) + jnp.where(neither, 0.0, x) for share, x in ((1 - beta, p), (beta, q)))
        mixture = jnp.logaddexp(p_part, q_part)
        return (1 - beta) * _sum_of_kl(p, mixture) + beta * _sum_of_kl(q, mixture)
    return _sum_of_kl(q, p) if name == "forward_kl" else _sum_of_kl(p, q)


def _sum_of_kl(log_x: Any, log_y: Any) -> Any:
    counts = ~jnp.isneginf(log_x)
    log_x = jnp.where(counts, log_x, 0.0)
    return jnp.sum(jnp.where(counts, jnp.exp(log_x) * (log_x - jnp.where(counts, log_y, 0.0)), 0.0), axis=-1)


def _with_tail(x: Any) -> Any:
    rest = jnp.maximum(1 - jnp.sum(jnp.exp(x), axis=-1, keepdims=True), np.finfo(np.float32).eps)
    return jnp.concatenate([x, jnp.log(rest)], axis=-1)


def advantages(groups: Any) -> Any:
    """GRPO's of `rewards [groups, G]`."""
    centred = groups - jnp.mean(groups, axis=1, keepdims=True)
    return centred / (jnp.std(groups, axis=1, keepdims=True, ddof=1) + 1e-4)
