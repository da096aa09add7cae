"""The contract in float64 NumPy: each statistic and loss by its definition, each gradient by its textbook formula.

Shares no code with the library. The formulas meet JAX's own differentiation in the contract, by the implementation
"reference".
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, Any]

# The scale of a low-rank term, where there are `up` and `down`.
LOW_RANK_SCALE = 1.5


def to64(tree: Arrays) -> Arrays:
    """Arrays and numbers as float64, exactly; None and integers stay."""
    return {
        k: np.asarray(x).astype(np.float64) if x is not None and "float" in str(np.asarray(x).dtype) else x
        for k, x in tree.items()
    }


class Logits:
    """Capped logits of a head, and the way back from their gradient to the head's arrays."""

    def __init__(
        self,
        arrays: Arrays,
        vocab_size: int | None = None,
        logit_softcap: float | None = None,
        temperature: Any = 1.0,
    ) -> None:
        self.a = a = to64(arrays)
        self.v = v = vocab_size or a["weight"].shape[0]
        self.scale = a.get("logit_scale", np.float64(1.0))
        bias = a.get("bias")
        self.by_entry = a["vocab_scale"][:v] if "vocab_scale" in a else np.ones(v)
        self.weight = a["weight"] + (LOW_RANK_SCALE * a["up"] @ a["down"] if "up" in a else 0.0)
        self.products = a["hidden"] @ self.weight[:v].T
        self.linear = self.by_entry * self.products + (0.0 if bias is None else bias[:v])
        raw = self.scale * self.linear
        self.z = raw if logit_softcap is None else logit_softcap * np.tanh(raw / logit_softcap)
        self.slope = 1.0 if logit_softcap is None else 1.0 - np.tanh(raw / logit_softcap) ** 2
        by_row = np.broadcast_to(np.asarray(temperature, np.float64), raw.shape[:1])[:, None]
        self.z, self.slope = self.z / by_row, self.slope / by_row
        shifted = self.z - self.z.max(1, keepdims=True)
        self.lse = np.log(np.exp(shifted).sum(1)) + self.z.max(1)
        self.log_p = self.z - self.lse[:, None]
        self.p = np.exp(self.log_p)

    def gradients(self, dz: np.ndarray) -> Arrays:
        """Gradients of hidden, weight and, where given, up and down, bias, vocab_scale and logit_scale."""
        dx = dz * self.slope
        dy = self.by_entry * dx
        weight = np.zeros_like(self.a["weight"])
        weight[: self.v] = self.scale * dy.T @ self.a["hidden"]
        out = {"hidden": self.scale * dy @ self.weight[: self.v], "weight": weight}
        if "up" in self.a:
            out["up"] = LOW_RANK_SCALE * weight @ self.a["down"].T
            out["down"] = LOW_RANK_SCALE * self.a["up"].T @ weight
        if "bias" in self.a:
            out["bias"] = np.zeros_like(self.a["bias"])
            out["bias"][: self.v] = self.scale * dx.sum(0)
        if "vocab_scale" in self.a:
            out["vocab_scale"] = np.zeros_like(self.a["vocab_scale"])
            out["vocab_scale"][: self.v] = self.scale * (dx * self.products).sum(0)
        if "logit_scale" in self.a:
            out["logit_scale"] = (dx * self.linear).sum()
        return out


def statistics(logits: Logits, labels: np.ndarray, u: np.ndarray | None = None) -> tuple[Arrays, Arrays]:
    """Every statistic `[N]`, and each one's derivative `[N, V]` with respect to the row's logits.

    With labels `[N, K]` the target's are `[N, K]` and `[N, K, V]`.
    """
    z, p, log_p, v = logits.z, logits.p, logits.log_p, logits.v
    u = np.full(v, 1.0 / v) if u is None else np.asarray(u, np.float64)
    labels = labels.astype(np.int64)
    inside = (labels >= 0) & (labels < v)
    target = (np.arange(v) == labels[..., None]) & inside[..., None]
    rows = (slice(None), *[None] * (labels.ndim - 1))
    top = np.arange(v) == z.argmax(1)[:, None]
    entropy, ssq = -(p * log_p).sum(1), (p * p).sum(1)
    varentropy = (p * log_p**2).sum(1) - entropy**2
    values = {
        "lse": logits.lse,
        "target_logit": (z[rows] * target).sum(-1),
        "mean_logit": z @ u,
        "entropy": entropy,
        "expected_logit": (p * z).sum(1),
        "sum_sq_probs": ssq,
        "max_logit": z.max(1),
        "argmax": z.argmax(1),
        "varentropy": varentropy,
    }
    values["log_prob"] = values["target_logit"] - logits.lse[rows]
    values["mean_log_prob"] = log_p @ u
    slopes = {
        "lse": p,
        "target_logit": target * 1.0,
        "log_prob": target - p[rows],
        "mean_logit": np.broadcast_to(u, z.shape),
        "mean_log_prob": u - u.sum() * p,
        "entropy": -p * (log_p + entropy[:, None]),
        "expected_logit": p * (1 + z - values["expected_logit"][:, None]),
        "sum_sq_probs": 2 * p * (p - ssq[:, None]),
        "max_logit": top * 1.0,
        "varentropy": p * ((log_p + entropy[:, None]) * (log_p + entropy[:, None] + 2) - varentropy[:, None]),
    }
    return values, slopes


def pull_back(slopes: Arrays, cotangents: Arrays) -> Any:
    """The gradient `[N, V]` of the logits, from the cotangents of the statistics."""
    terms = (cotangents[name][..., None] * slopes[name] for name in cotangents)
    return sum(term.reshape(term.shape[0], -1, term.shape[-1]).sum(1) for term in terms)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL divergence of rows: `Σ p log(p/q)` without entries of p = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * (np.log(p) - np.log(q)), 0).sum(-1)


def divergence(name: str, beta: float, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Of a student's probabilities p from a teacher's q."""
    m = beta * q + (1 - beta) * p
    return {"forward_kl": kl(q, p), "reverse_kl": kl(p, q), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}[name]


def counted(labels: np.ndarray, arrays: Arrays, options: Arrays) -> np.ndarray:
    """Which rows are part of the loss."""
    inside = (labels >= 0) & (labels < (options.get("vocab_size") or arrays["weight"].shape[0]))
    return inside & (labels != options.get("ignore_index", -100))


def cross_entropy(
    arrays: Arrays,
    labels: np.ndarray,
    options: Arrays,
    cotangent: Any = 1.0,
    round_dlogits: Any = None,
    disturb: Callable[[np.ndarray], np.ndarray] | None = None,
    disturb_others: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[Any, Arrays]:
    """The loss, and the gradients of `cotangent·loss`, per token for `reduction="none"`.

    With `round_dlogits`, a dtype, gradients come from dlogits rounded to it, scaled to its range; with `disturb`,
    from what it makes of the dlogits; with `disturb_others`, from what it makes of the probabilities but for the
    targets'.
    """
    o = to64(options)
    logits = Logits(arrays, options.get("vocab_size"), options.get("logit_softcap"))
    p, v, n = logits.p, logits.v, labels.size
    counts, labels = counted(labels, arrays, options), labels.astype(np.int64)
    safe = np.where(counts, labels, 0)
    c = o.get("class_weights", np.ones(v))
    alpha, beta = o.get("label_smoothing", 0.0), o.get("z_loss", 0.0)
    w = np.where(counts, logits.a.get("token_weights", np.ones(n)), 0.0)
    target = np.arange(v) == safe[:, None]
    if disturb_others is not None:
        p = np.where(target, p, disturb_others(p))

    nll = -logits.log_p[np.arange(n), safe]
    ce = (1 - alpha) * c[safe] * nll - alpha / v * logits.log_p @ c
    z_part = beta * logits.lse**2
    d_ce = (1 - alpha) * c[safe][:, None] * (p - target) + alpha / v * (c.sum() * p - c)
    d_z = 2 * beta * logits.lse[:, None] * p

    reduction, given = options.get("reduction", "mean"), o.get("normalizer")
    norm, z_norm = ((w * c[safe]).sum(), w.sum()) if reduction == "mean" else (1.0, 1.0)
    if given is not None:
        norm = z_norm = given
    inv, z_inv = (0.0 if x == 0 else 1.0 / x for x in (norm, z_norm))
    if reduction == "none":
        loss, upstream = np.where(counts, w * (ce + z_part), 0.0), np.asarray(cotangent, np.float64)
    else:
        loss, upstream = (w * ce).sum() * inv + (w * z_part).sum() * z_inv, np.full(n, float(cotangent))
    rows = (upstream * w)[:, None]
    dz = rows * (d_ce * inv + d_z * z_inv)
    if round_dlogits is not None:
        unit = 2.0 ** np.floor(np.log2(max(np.abs(dz).max(initial=0.0), 1e-300))) / 2**10
        dz = (dz / unit).astype(round_dlogits).astype(np.float64) * unit
    if disturb is not None:
        dz = disturb(dz)
    gradients = logits.gradients(dz)
    if "token_weights" in arrays:
        d_w = ce * inv + z_part * z_inv
        if reduction == "mean" and given is None:
            d_w = (c[safe] * (ce / c[safe] - (w * ce).sum() * inv)) * inv + (
                z_part - (w * z_part).sum() * z_inv
            ) * z_inv
        gradients["token_weights"] = np.where(counts, upstream * d_w, 0.0)
    return loss, gradients
