"""The public functions whose inputs are spoilt: each call, and the same in plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_ce as P
from pallas_ce.streaming import noise
from tests.pallas_ce import plain
from tests.pallas_ce.functions import KEY, of_several_statistics
from tests.pallas_ce.oracle import LOW_RANK_SCALE
from tests.pallas_ce.plain import Arrays
from tests.pallas_ce.spoilt import Function, Sizes, Way

SAMPLED = jnp.array([0, 3, 5, 9, 20, 30], jnp.int32)
MASK = np.array([[True, True, False], [True, False, False]])
CHAINS = np.array([[0, 2, 1, 1], [1, 1, 0, 2], [2, 0, 0, 0]]), np.array([4, 1, 3])  # tags, and lengths
PAIRS = np.array([True, False, True, True])
HEAD = ("hidden", "weight", "bias", "logit_scale")


def head_of(s: Sizes, a: Arrays) -> tuple[Any, Any, dict[str, Any]]:
    """Hidden states, weight and the options of the head."""
    weight = P.LowRank(a["weight"], a["up"], a["down"], LOW_RANK_SCALE) if "up" in a else a["weight"]
    named = ("bias", "logit_scale", "temperature", "logit_weights", "token_weights", "class_weights",
             "label_smoothing", "z_loss", "teacher_bias", "teacher_logit_scale")  # fmt: skip
    return a["hidden"], weight, {"vocab_size": s.classes, **{name: a[name] for name in named if name in a}}


def _way(s: Sizes, implementation: str, backward: str, reduction: bool = True) -> dict[str, Any]:
    chosen = {"implementation": implementation, "scratch_bytes": s.scratch_bytes}
    if backward:
        chosen["backward"] = backward
    return {**chosen, "reduction": _reduction(backward)} if reduction else chosen


def _reduction(backward: str) -> str:
    return "mean" if backward == "in_forward" else "none"


def _z(s: Sizes, a: Arrays, **options: Any) -> Any:
    return plain.logits(a, s.counted, s.classes, **options)


def _reduced(s: Sizes, values: Any, a: Arrays, reduction: str) -> Any:
    """A loss of rows that count, weighted."""
    weights = a["token_weights"][s.counted] if "token_weights" in a else jnp.ones(len(values))
    weighted = plain.times(weights, values)
    return s.spread(weighted) if reduction == "none" else jnp.sum(weighted) / jnp.sum(weights)


def _cross_entropy(**more: Any) -> Function:
    def ours(s: Sizes, a: Arrays, *way: str) -> Any:
        hidden, weight, options = head_of(s, a)
        return P.linear_cross_entropy(hidden, weight, s.labels, **options, **more, **_way(s, *way))

    def expected(s: Sizes, a: Arrays, form: Any, reduction: str) -> Any:
        found = plain.cross_entropy(
            _z(s, a, softcap=more.get("logit_softcap")), s.labels[s.counted], a, s.counted, form, reduction
        )
        return s.spread(found) if reduction == "none" else found

    return Function(ours, expected, HEAD, ways=HEADS)


HEADS: tuple[Way, ...] = (("xla", "in_forward"), ("xla", "recompute"), ("reference", "auto"))
BY_ROW: tuple[Way, ...] = (("xla", ""), ("reference", ""))


def _statistics(s: Sizes, a: Arrays, *way: str) -> Any:
    hidden, weight, options = head_of(s, a)
    found = P.linear_row_statistics(
        hidden, weight, s.several, statistics=P.RowStatistics._fields, row_mask=s.counts, **options,
        **_way(s, *way, reduction=False),
    )  # fmt: skip
    return found._asdict()


def _plain_statistics(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    u = a["logit_weights"] if "logit_weights" in a else jnp.full(s.classes, 1 / s.classes)
    return s.spread(plain.statistics(_z(s, a), jnp.asarray(s.several[s.counted]), jax.lax.stop_gradient(u), form))


def _log_probs(s: Sizes, a: Arrays, *way: str) -> Any:
    hidden, weight, options = head_of(s, a)
    asked = {f"return_{name}": True for name in ("entropy", "sum_sq_probs", "hit")}
    return P.linear_log_probs(hidden, weight, s.labels, **asked, **options, **_way(s, *way, reduction=False))._asdict()


def _plain_log_probs(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    labels = jnp.asarray(s.labels[s.counted])
    found = plain.statistics(_z(s, a), labels, jnp.ones(s.classes), form)
    named = {"log_probs": found["log_prob"], "entropy": found["entropy"], "sum_sq_probs": found["sum_sq_probs"]}
    return s.spread({**named, "hit": found["argmax"] == labels})


def _row_loss(statistics: Any, row_input: Any) -> Any:
    return of_several_statistics(statistics) + row_input * statistics.mean_logit


def _loss(s: Sizes, a: Arrays, *way: str) -> Any:
    hidden, weight, options = head_of(s, a)
    return P.linear_loss(_row_loss, hidden, weight, s.labels, a["row_input"], **options, **_way(s, *way))


def _plain_loss(s: Sizes, a: Arrays, form: Any, reduction: str) -> Any:
    labels, u = jnp.asarray(s.labels[s.counted]), jax.lax.stop_gradient(a["logit_weights"])
    found = P.RowStatistics(**plain.statistics(_z(s, a), labels, u, form))
    return _reduced(s, _row_loss(found, a["row_input"][s.counted]), a, reduction)


def _distillation(name: str, beta: float = 0.5) -> Function:
    def ours(s: Sizes, a: Arrays, implementation: str, _: str) -> Any:
        hidden, weight, options = head_of(s, a)
        return P.linear_distillation(
            hidden, weight, a["teacher_hidden"], a["teacher_weight"], s.labels, divergence=name, beta=beta,
            reduction="none", implementation=implementation, scratch_bytes=2 * (s.scratch_bytes or 2**29), **options,
        )  # fmt: skip

    def expected(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
        teacher = {x: jax.lax.stop_gradient(y) if x.startswith("teacher_") else y for x, y in a.items()}
        z, y = _z(s, a), _z(s, teacher, prefix="teacher_")
        return _reduced(s, plain.divergence(name, beta, z, y, form), a, "none")

    constants = ("temperature", *(f"teacher_{x}" for x in HEAD))
    return Function(ours, expected, (*HEAD, "token_weights", *constants), constants, BY_ROW, ("temperature",))


def _top_k(s: Sizes, a: Arrays, *_: str) -> Any:
    hidden, weight, options = head_of(s, a)
    return P.linear_top_k(hidden, weight, 3, row_mask=s.counts, scratch_bytes=s.scratch_bytes, **options)._asdict()


def _plain_top_k(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    z = plain.logits({x: y for x, y in a.items() if x != "temperature"}, s.counted, s.classes)
    ids = jax.vmap(lambda z: plain.largest(z[None], 3)[0])(z)
    logits, t = jnp.take_along_axis(z, ids, axis=1), a["temperature"][s.counted][:, None]
    found = s.spread({"logits": logits, "log_probs": logits / t - form(z / t)[:, None], "ids": ids})
    return {**found, "ids": jnp.where(s.counts[:, None], found["ids"], -1)}


def _sample(s: Sizes, a: Arrays, *_: str, **limits: Any) -> Any:
    hidden, weight, options = head_of(s, a)
    row = {"row_mask": s.counts, "scratch_bytes": s.scratch_bytes}
    return P.linear_sample(KEY, hidden, weight, temperature=0.7, **limits, **row, **options)._asdict()


def _plain_sample(s: Sizes, a: Arrays, *_: Any, **limits: Any) -> Any:
    """The best sum of logit and noise among what `limits` leave; the first nan; else the first +inf, which is sure."""
    z = _z(s, a)
    tempered, order = z / 0.7, jnp.argsort(-z, axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    left = rank < limits.get("top_k", s.classes)
    p = jnp.take_along_axis(jax.nn.softmax(jnp.where(left, tempered, -jnp.inf)), order, axis=1)
    before = jnp.take_along_axis(jnp.cumsum(p, axis=1) - p, rank, axis=1)
    left &= before < limits.get("top_p", 2.0)
    left &= jnp.exp(tempered - jnp.max(tempered, axis=1, keepdims=True)) >= limits.get("min_p", 0.0)
    kept = jnp.where(left, tempered, -jnp.inf)
    added = noise.gumbel(noise.row_keys(KEY, s.rows), jnp.arange(s.classes), np.dtype(np.float32))[s.counted]
    lost, sure = jnp.any(jnp.isnan(z), axis=1), jnp.any(jnp.isposinf(z), axis=1)
    ids = jnp.argmax(jnp.where((lost | sure)[:, None], z, kept + added), axis=1)
    log_p = jnp.take_along_axis(kept, ids[:, None], axis=1)[:, 0] - jax.nn.logsumexp(kept, axis=1)
    found = s.spread({"ids": ids + 1, "log_probs": jnp.where(lost | sure, jnp.nan, log_p)})
    return {**found, "ids": found["ids"] - 1}


def _sampled(key: Any, num_samples: int, vocab_size: int) -> P.ClassSample:
    del key, num_samples
    return P.ClassSample(SAMPLED, jnp.linspace(-2.0, 0.0, vocab_size))


def _sampled_softmax(s: Sizes, a: Arrays, *way: str) -> Any:
    hidden, weight, options = head_of(s, a)
    drawn = {"key": KEY, "num_samples": len(SAMPLED), "sampler": _sampled}
    chosen = {**_way(s, *way), "reduction": "none"}
    del chosen["backward"]
    return P.sampled_softmax_cross_entropy(hidden, weight, s.labels, **drawn, **chosen, **options)


def _plain_sampled_softmax(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    labels, correction = s.labels[s.counted], jnp.linspace(-2.0, 0.0, s.classes)
    of_columns = {**a, "weight": a["weight"][SAMPLED], "bias": a["bias"][SAMPLED]}
    z = plain.logits(of_columns, s.counted, len(SAMPLED)) - correction[SAMPLED]
    dots = jnp.sum(a["hidden"][s.counted] * a["weight"][labels], axis=1)
    target = a["logit_scale"] * (dots + a["bias"][labels]) - correction[labels]
    others = jnp.where(labels[:, None] == SAMPLED, -jnp.inf, z)
    return _reduced(s, form(jnp.concatenate([target[:, None], others], axis=1)) - target, a, "none")


def _tasks(s: Sizes, a: Arrays, *way: str) -> Any:
    hidden, weight, options = head_of(s, {x: y for x, y in a.items() if not x.startswith("teacher_")})
    second = {"bias": a["teacher_bias"], "label_smoothing": 0.1, "vocab_size": s.classes}
    tasks = {
        "one": P.Task(weight, s.labels, 1.0, options | {"implementation": way[0]}),
        "two": P.Task(a["teacher_weight"][:, : s.width], s.labels[::-1], 0.3, second),
    }
    found = P.multi_task_cross_entropy(hidden, tasks)
    return found.total, found.losses


def _plain_tasks(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    one = plain.cross_entropy(_z(s, a), s.labels[s.counted], {}, s.counted, form, "mean")
    labels = s.labels[::-1]
    rows = np.flatnonzero(s.counts[::-1])
    head = {"hidden": a["hidden"], "weight": a["teacher_weight"][:, : s.width], "bias": a["teacher_bias"]}
    two = plain.cross_entropy(
        plain.logits(head, rows, s.classes), labels[rows], {"label_smoothing": 0.1}, rows, form, "mean"
    )
    return one + 0.3 * two, {"one": one, "two": two}


def _stored(loss: Any, **more: Any) -> Any:
    def ours(s: Sizes, a: Arrays, implementation: str, backward: str) -> Any:
        options = {name: x for name, x in a.items() if name != "logits"} | more
        return loss(
            a["logits"], s.labels, vocab_size=s.classes, reduction=_reduction(backward),
            implementation=implementation or None, **options,
        )  # fmt: skip

    return ours


def _plain_stored(s: Sizes, a: Arrays, form: Any, reduction: str) -> Any:
    z = a["logits"][s.counted, : s.classes]
    found = plain.cross_entropy(z, s.labels[s.counted], a, s.counted, form, reduction)
    return s.spread(found) if reduction == "none" else found


def _plain_selective(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    z, labels = a["all_logits"], jnp.asarray(s.several)
    inside = (labels >= 0) & (labels < s.classes)
    some = jnp.any(inside, axis=1)
    z = jnp.where(some[:, None], z, 0.0)
    return jnp.where(inside, plain.at_labels(z, labels) - form(z)[:, None], 0.0)


def _chains(name: str) -> Function:
    tags, lengths = CHAINS
    mask = np.arange(4) < lengths[:, None]

    def ours(s: Sizes, a: Arrays, *_: str) -> Any:
        return P.linear_chain_crf(a["emissions"], tags, a[name], mask=mask, reduction="none")

    def expected(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
        between = jnp.broadcast_to(a[name], s.shape("each_transitions"))
        return jnp.stack(
            [plain.chain(a["emissions"][i, :t], tags[i, :t], between[i], form) for i, t in enumerate(lengths)]
        )

    return Function(ours, expected, ("emissions", name))


def _policy(s: Sizes, a: Arrays, *_: str) -> Any:
    named = {x: a[x] for x in ("old_log_probs", "ref_log_probs", "entropy")}
    return P.policy_loss(
        a["log_probs"], a["advantages"], MASK, **named, kl_coefficient=0.1, entropy_coefficient=0.1, aggregation="none"
    )


def _spread(mask: np.ndarray, values: Any) -> Any:
    return jnp.zeros(mask.shape).at[np.nonzero(mask)].set(values)


def _top_k_distillation(name: str, *, tail: bool) -> Function:
    def ours(s: Sizes, a: Arrays, *_: str) -> Any:
        given = a["top_log_probs"], a["teacher_log_probs"], MASK
        return P.top_k_distillation_loss(*given, divergence=name, tail=tail, aggregation="none")

    def expected(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
        given = {"log_probs": a["top_log_probs"], "teacher_log_probs": a["teacher_log_probs"]}
        return _spread(MASK, plain.top_k_distillation(name, given, MASK, tail=tail))

    given = "top_log_probs", "teacher_log_probs"
    return Function(ours, expected, given, given[1:], below=given)


STATISTICS = ("temperature", "logit_weights")
OF_CLASSES = ("token_weights", "class_weights", "label_smoothing", "z_loss")
OF_PAIRS = ("chosen", "rejected", "ref_chosen", "ref_rejected")
OF_TOKENS = ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages")
STORED: tuple[Way, ...] = (("xla", "recompute"), ("xla", "in_forward"))
FUNCTIONS: dict[str, Function] = {
    "linear_cross_entropy": _cross_entropy()._replace(inputs=(*HEAD, *OF_CLASSES), constants=OF_CLASSES[1:]),
    "linear_cross_entropy, capped": _cross_entropy(logit_softcap=4.0)._replace(inputs=(*HEAD, "token_weights")),
    "linear_cross_entropy, low rank": _cross_entropy()._replace(inputs=(*HEAD, "up", "down")),
    "linear_row_statistics": Function(
        _statistics, _plain_statistics, (*HEAD, *STATISTICS), STATISTICS, BY_ROW, STATISTICS
    ),
    "linear_log_probs": Function(_log_probs, _plain_log_probs, HEAD, (), BY_ROW),
    "linear_loss": Function(
        _loss, _plain_loss, (*HEAD, *STATISTICS, "token_weights", "row_input"), STATISTICS, HEADS, STATISTICS
    ),
    **{f"linear_distillation, {name}": _distillation(name) for name in ("forward_kl", "reverse_kl", "jsd")},
    "linear_distillation, jsd near 0": _distillation("jsd", 1e-3),
    "linear_top_k": Function(_top_k, _plain_top_k, (*HEAD, "temperature"), (*HEAD, "temperature")),
    **{
        f"linear_sample, {limits}": Function(
            functools.partial(_sample, **limits), functools.partial(_plain_sample, **limits), HEAD, HEAD
        )
        for limits in ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8})
    },
    "sampled_softmax_cross_entropy": Function(
        _sampled_softmax, _plain_sampled_softmax, (*HEAD, "token_weights"), (), HEADS[1:]
    ),
    "multi_task_cross_entropy": Function(
        _tasks, _plain_tasks, (*HEAD, "teacher_weight", "teacher_bias"), (), BY_ROW
    ),
    "cross_entropy": Function(
        _stored(P.cross_entropy), _plain_stored, ("logits", *OF_CLASSES), OF_CLASSES[1:], STORED
    ),
    "chunked_cross_entropy": Function(
        _stored(P.chunked_cross_entropy, chunk_size=5), _plain_stored, ("logits",), (), STORED
    ),
    "mean_squared_lse": Function(
        lambda s, a, *_: P.mean_squared_lse(a["logits"], s.labels, vocab_size=s.classes),
        lambda s, a, form, _: jnp.mean(jnp.square(form(a["logits"][s.counted, : s.classes]))),
        ("logits",),
    ),
    "selective_log_softmax": Function(
        lambda s, a, *_: P.selective_log_softmax(a["all_logits"], s.several), _plain_selective, ("all_logits",)
    ),
    **{f"linear_chain_crf, {name}": _chains(name) for name in ("transitions", "each_transitions")},
    "policy_loss": Function(
        _policy, lambda s, a, *_: _spread(MASK, plain.policy(a, MASK)), OF_TOKENS,
        ("old_log_probs", "ref_log_probs", "advantages"),
    ),
    "dpo_loss": Function(
        lambda s, a, *_: P.dpo_loss(*(a[name] for name in OF_PAIRS), PAIRS, reduction="none"),
        lambda s, a, *_: _spread(PAIRS, plain.preference(a, PAIRS)), OF_PAIRS, OF_PAIRS[2:],
    ),
    "sequence_log_probs": Function(
        lambda s, a, *_: P.sequence_log_probs(a["log_probs"], MASK),
        lambda s, a, *_: jnp.sum(_spread(MASK, a["log_probs"][MASK]), axis=-1), ("log_probs",),
    ),
    "group_advantages": Function(
        lambda s, a, *_: P.group_advantages(a["rewards"], 3),
        lambda s, a, *_: plain.advantages(a["rewards"].reshape(2, 3)).reshape(-1), ("rewards",), ("rewards",),
    ),
    **{
        f"top_k_distillation_loss, {name}, {tail=}": _top_k_distillation(name, tail=tail)
        for name in ("forward_kl", "reverse_kl", "jsd") for tail in (True, False)
    },
}  # fmt: skip
