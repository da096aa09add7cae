"""Example calls of every public function, each with its arguments and its counterpart in plain JAX.

`HEADS` has the functions of a head, called alike. `CASES` has all functions, as calls of named arrays of a size, beside
what they make of stored logits. What every function promises is tested over these two.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_ce as P
from pallas_ce.api import sampling
from tests.pallas_ce import plain
from tests.pallas_ce.oracle import LOW_RANK_SCALE
from tests.pallas_ce.plain import Arrays

KEY = jax.random.key(7)


def of_several_statistics(s: Any, *row_inputs: Any) -> Any:
    found = jnp.tanh(0.3 * s.lse) - s.log_prob + 0.1 * s.entropy + s.sum_sq_probs + 0.01 * s.max_logit
    return sum((x.astype(s.lse.dtype) * s.mean_logit for x in row_inputs), found + 0.1 * s.varentropy)


def _loss(hidden: Any, weight: Any, labels: Any, row_input: Any = None, **options: Any) -> Any:
    row_inputs = () if row_input is None else (row_input,)
    return P.linear_loss(of_several_statistics, hidden, weight, labels, *row_inputs, **options)


def _statistics(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    given = {"statistics": P.RowStatistics._fields, "row_mask": labels >= 0, **options}
    return P.linear_row_statistics(hidden, weight, labels, **given)


def _supported(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    """The label and three others, one of them twice, and padding."""
    ids = labels[..., None] + jnp.array([2, 0, -1, 2, 5]) * (labels >= 0)[..., None]
    return P.linear_log_probs(hidden, weight, labels, support=ids, return_entropy=True, return_hit=True, **options)


def _top_k(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return P.linear_top_k(hidden, weight, 3, **{"row_mask": labels >= 0, **options})


def _sample(hidden: Any, weight: Any, labels: Any, **options: Any) -> Any:
    return P.linear_sample(KEY, hidden, weight, **{"row_mask": labels >= 0, **options})


def _distilled(
    hidden: Any, weight: Any, labels: Any, teacher_hidden: Any = None, teacher_weight: Any = None, **options: Any
) -> Any:
    teacher_hidden = -hidden[..., ::-1] if teacher_hidden is None else teacher_hidden
    teacher_weight = weight * 0.7 if teacher_weight is None else teacher_weight
    return P.linear_distillation(hidden, weight, teacher_hidden, teacher_weight, labels, **options)


# By name, functions of hidden states, weight and labels; rows with a label below 0 do not count.
BY_ROW: dict[str, Callable[..., Any]] = {
    "linear_row_statistics": _statistics,
    "linear_log_probs": functools.partial(
        P.linear_log_probs, return_entropy=True, return_sum_sq_probs=True, return_hit=True
    ),
    "linear_log_probs over a support": _supported,
    "linear_top_k": _top_k,
    "linear_sample": _sample,
    "linear_sample of the 3 largest": functools.partial(_sample, top_k=3),
}
DISTILLATIONS = ("forward_kl", "reverse_kl", "jsd")
LOSSES: dict[str, Callable[..., Any]] = {
    "linear_cross_entropy": P.linear_cross_entropy,
    "linear_loss": _loss,
    **{name: functools.partial(_distilled, divergence=name) for name in DISTILLATIONS},
    "sampled_softmax": functools.partial(P.sampled_softmax_cross_entropy, key=KEY, num_samples=9),
}
HEADS = BY_ROW | LOSSES
# By name, the implementations of those that can be told which, beside the kernels; None: the only one.
SERVED = dict.fromkeys(HEADS, (None,)) | dict.fromkeys(
    ("linear_row_statistics", "linear_log_probs", "linear_log_probs over a support", *LOSSES), ("xla", "reference")
)
TEMPERED = sorted(HEADS.keys() - {"linear_cross_entropy", "sampled_softmax"})


def _of_stored(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda hidden, weight, labels: function(hidden @ weight.T, labels, **options)


def _twice(labels: Any) -> Any:
    """As two labels of each row, in their dtype."""
    return labels[..., None][..., np.zeros(2, int)]


def _options(weight: Any, labels: Any) -> dict[str, Any]:
    """Of a cross entropy; weights may be integers."""
    weights = {"class_weights": np.ones(len(weight), np.int32), "token_weights": np.ones(labels.shape, np.int8)}
    return {"label_smoothing": 0.1, "z_loss": 1e-3, "return_metrics": True, **weights}


def _crf(hidden: Any, weight: Any, labels: Any) -> Any:
    """Of two sequences."""
    emissions, places = hidden @ weight.T, jnp.arange(len(weight), dtype=hidden.dtype)
    emissions, transitions = emissions.reshape(2, -1, len(weight)), jnp.outer(jnp.sin(places), jnp.cos(places))
    return P.linear_chain_crf(emissions, labels.reshape(2, -1), transitions, normalizer=3)


# More functions of hidden states, weight and labels, and other options.
LABELLED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear_cross_entropy, options": lambda h, w, t: P.linear_cross_entropy(h, w, t, shift=1, **_options(w, t)),
    "linear_log_probs of several": lambda h, w, t: P.linear_log_probs(
        h, w, _twice(t), temperature=0.7, return_entropy=True, logit_softcap=5.0
    ),
    "cross_entropy": lambda h, w, t: P.cross_entropy(h @ w.T, t, logit_softcap=5.0, **_options(w, t)),
    "chunked_cross_entropy": _of_stored(P.chunked_cross_entropy, chunk_size=4, normalizer=7),
    "mean_squared_lse": _of_stored(P.mean_squared_lse),
    "selective_log_softmax": _of_stored(P.selective_log_softmax),
    "selective_log_softmax of several": lambda h, w, t: P.selective_log_softmax(h @ w.T, _twice(t)),
    "linear_chain_crf": _crf,
    "a configured loss": _of_stored(P.build_loss_fn({"loss_fn": "cross_entropy", "z_loss_weight": 0.1})),
    "multi_task_cross_entropy": lambda h, w, t: P.multi_task_cross_entropy(h, {"a": P.Task(w, t)}),
}


def by_row(name: str) -> Callable[..., Any]:
    """The function, with a result for each row."""
    return HEADS[name] if name in BY_ROW else functools.partial(HEADS[name], reduction="none")


def floating(results: Any) -> list[Any]:
    """Results that have gradients."""
    return [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]


def total(results: Any) -> Any:
    """One number to which all results contribute, for differentiation."""
    return sum(jnp.sum(jnp.sin(x)) for x in floating(results))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a problem; `classes` of the weight's `padded` rows exist. A dtype for hidden states, weights, logits."""

    rows: int = 12
    width: int = 5
    classes: int = 31
    padded: int = 34
    dtype: str = "float32"
    scratch_bytes: int | None = 2600

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """The first and the last class among them; every fifth is ignored, and one is a class that does not exist."""
        labels = (np.arange(self.rows) * 7 % self.classes).astype(np.int32)
        labels[1], labels[2::5], labels[-1] = self.classes - 1, -100, self.classes
        return labels

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Which rows count, `[rows]` bool."""
        return (self.labels >= 0) & (self.labels < self.classes)

    @property
    def counted(self) -> np.ndarray:
        """The rows that count."""
        return np.flatnonzero(self.counts)

    @property
    def several(self) -> np.ndarray:
        """Three labels for each row, some of them ignored, others twice."""
        one = self.labels
        return np.stack([one, np.where(np.arange(self.rows) % 2, one, -100), np.where(self.counts, 4, one)], axis=1)

    def spread(self, values: Any) -> Any:
        """Of results for rows that count, results for all rows, 0 in the others."""
        return jax.tree.map(lambda x: jnp.zeros((self.rows, *x.shape[1:]), x.dtype).at[self.counted].set(x), values)

    def shape(self, name: str) -> tuple[int, ...]:
        """An array's."""
        n, h, v, wide, ht = self.rows, self.width, self.classes, self.padded, self.width + 2
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("token_weights", "temperature", "row_input"), (n,)),
            **dict.fromkeys(("logit_scale", "teacher_logit_scale", "label_smoothing", "z_loss"), ()),
            **dict.fromkeys(("class_weights", "logit_weights"), (v,)),
            **dict.fromkeys(("bias", "teacher_bias", "vocab_scale"), (wide,)),
            "hidden": (n, h), "weight": (wide, h), "teacher_hidden": (n, ht), "teacher_weight": (wide, ht),
            "up": (wide, 2), "down": (2, h), "logits": (n, wide), "all_logits": (n, v),
            "emissions": (3, 4, 3), "transitions": (3, 3), "each_transitions": (3, 3, 3, 3), "rewards": (6,),
            **dict.fromkeys(("log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages"), (2, 3)),
            **dict.fromkeys(("chosen", "rejected", "ref_chosen", "ref_rejected"), (4,)),
            **dict.fromkeys(("top_log_probs", "teacher_log_probs"), (2, 3, 4)),
        }  # fmt: skip
        return shapes[name]

    def array(self, name: str) -> np.ndarray:
        """An array of the call."""
        x = np.random.default_rng(len(name) + ord(name[0])).normal(size=self.shape(name))
        if name in ("label_smoothing", "z_loss"):
            x = np.asarray(0.1)
        elif name.endswith("log_probs"):
            x = -2.0 - abs(x)
            if name == "teacher_log_probs":  # a row has fewer tokens
                x[0, 0, 2:] = -np.inf
        elif name.endswith(("weights", "temperature", "scale")):
            x = 0.5 + abs(x)
        if name in ("weight", "teacher_weight", "down"):  # so that no exponential overflows where +inf is the maximum
            x = x / np.sqrt(self.width)
        narrow = name.removeprefix("teacher_") in ("hidden", "weight", "up", "down", "logits")
        return x.astype(jnp.dtype(self.dtype) if narrow else np.float32)


Way = tuple[str, str]


class Case(NamedTuple):
    """A call of a public function.

    Attributes:
        ours: `(sizes, arrays, implementation, backward)`; the two are "" where it has no such option.
        plain: `(sizes, arrays, form, reduction)`, the same in plain JAX, with one of `plain.FORMS`.
        inputs: the arrays that it takes.
        constants: those that have no gradient, and all that are not floating.
        ways: implementations and backward modes; with in_forward a mean, else a result for each row.
        finite: inputs whose infinities have no meaning.
        below: those that are never +inf: no log-probability is.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: tuple[str, ...]
    constants: tuple[str, ...] = ()
    ways: tuple[Way, ...] = (("", ""),)
    finite: tuple[str, ...] = ()
    below: tuple[str, ...] = ()

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The inputs that have gradients."""
        return tuple(name for name in self.inputs if name not in self.constants)

    def without(self, name: str) -> "Case":
        """The call without one of its optional inputs."""
        inputs, constants = (tuple(x for x in names if x != name) for names in (self.inputs, self.constants))
        return self._replace(inputs=inputs, constants=constants)


HEAD = ("hidden", "weight", "bias", "logit_scale")
EACH_MODE: tuple[Way, ...] = (("xla", "in_forward"), ("xla", "recompute"), ("reference", "auto"))
EACH: tuple[Way, ...] = (("xla", ""), ("reference", ""))


def _named(found: Any) -> Any:
    return found._asdict() if hasattr(found, "_asdict") else found


def _reduction(backward: str) -> str:
    return "mean" if backward == "in_forward" else "none"


def _of_head(name: str, expected: Callable[..., Any], *inputs: str, labels: str = "labels", **given: Any) -> Case:
    """A call of one of `HEADS`; `given` has options, and fields of `Case`."""
    fields = {x: given.pop(x) for x in ("constants", "ways", "finite") if x in given}

    def ours(s: Sizes, a: Arrays, implementation: str, backward: str) -> Any:
        options = {x: y for x, y in a.items() if x not in ("hidden", "weight", "up", "down")}
        weight = P.LowRank(a["weight"], a["up"], a["down"], LOW_RANK_SCALE) if "up" in a else a["weight"]
        how = {"implementation": implementation, "backward": backward, "scratch_bytes": s.scratch_bytes}
        options |= {x: y for x, y in how.items() if y}
        if name in LOSSES:
            options["reduction"] = _reduction(backward)
        elif name != "linear_log_probs":
            options["row_mask"] = s.counts
        return _named(HEADS[name](a["hidden"], weight, getattr(s, labels), vocab_size=s.classes, **options, **given))

    return Case(ours, functools.partial(expected, **given), (*HEAD, *inputs), **fields)


def _z(s: Sizes, a: Arrays, **options: Any) -> Any:
    return plain.logits(a, s.counted, s.classes, **options)


def _weighted(s: Sizes, values: Any, a: Arrays, reduction: str) -> Any:
    """A loss of rows that count."""
    weights = a["token_weights"][s.counted] if "token_weights" in a else jnp.ones(len(values))
    weighted = plain.times(weights, values)
    return s.spread(weighted) if reduction == "none" else jnp.sum(weighted) / jnp.sum(weights)


def _plain_cross_entropy(s: Sizes, a: Arrays, form: Any, reduction: str, logit_softcap: float | None = None) -> Any:
    z = a["logits"][s.counted, : s.classes] if "logits" in a else _z(s, a, softcap=logit_softcap)
    found = plain.cross_entropy(z.astype(jnp.float32), s.labels[s.counted], a, s.counted, form, reduction)
    return s.spread(found) if reduction == "none" else found


def _plain_statistics(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    u = jax.lax.stop_gradient(a.get("logit_weights", jnp.full(s.classes, 1 / s.classes)))
    return s.spread(plain.statistics(_z(s, a), jnp.asarray(s.several[s.counted]), u, form))


def _plain_log_probs(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    labels = jnp.asarray(s.several[s.counted])
    found, real = plain.statistics(_z(s, a), labels, jnp.ones(s.classes), form), labels >= 0
    named = {"log_probs": jnp.where(real, found["log_prob"], 0.0)} | {x: found[x] for x in ("entropy", "sum_sq_probs")}
    return s.spread({**named, "hit": real & (found["argmax"][:, None] == labels)})


def _plain_loss(s: Sizes, a: Arrays, form: Any, reduction: str) -> Any:
    labels, u = jnp.asarray(s.labels[s.counted]), jax.lax.stop_gradient(a["logit_weights"])
    found = P.RowStatistics(**plain.statistics(_z(s, a), labels, u, form))
    return _weighted(s, of_several_statistics(found, a["row_input"][s.counted]), a, reduction)


def _plain_distillation(s: Sizes, a: Arrays, form: Any, _: str, divergence: str, beta: float = 0.5) -> Any:
    teacher = {x: jax.lax.stop_gradient(y) if x.startswith("teacher_") else y for x, y in a.items()}
    z, y = _z(s, a), _z(s, teacher, prefix="teacher_")
    return _weighted(s, plain.divergence(divergence, beta, z, y, form), a, "none")


def _plain_top_k(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    z = _z(s, {x: y for x, y in a.items() if x != "temperature"})
    ids = jax.vmap(lambda z: plain.largest(z[None], 3)[0])(z)
    logits, t = jnp.take_along_axis(z, ids, axis=1), a["temperature"][s.counted][:, None]
    found = s.spread({"logits": logits, "log_probs": logits / t - form(z / t)[:, None], "ids": ids})
    return {**found, "ids": jnp.where(s.counts[:, None], found["ids"], -1)}


def _plain_sample(s: Sizes, a: Arrays, *_: Any, temperature: float, **limits: Any) -> Any:
    """The best sum of logit and noise among what `limits` leave; the first nan; else the first +inf, which is sure."""
    z = _z(s, a)
    tempered, order = z / temperature, jnp.argsort(-z, axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    left = rank < limits.get("top_k", s.classes)
    p = jnp.take_along_axis(jax.nn.softmax(jnp.where(left, tempered, -jnp.inf)), order, axis=1)
    before = jnp.take_along_axis(jnp.cumsum(p, axis=1) - p, rank, axis=1)
    left &= before < limits.get("top_p", 2.0)
    left &= jnp.exp(tempered - jnp.max(tempered, axis=1, keepdims=True)) >= limits.get("min_p", 0.0)
    kept = jnp.where(left, tempered, -jnp.inf)
    added = sampling.gumbel(sampling.row_keys(KEY, s.rows), jnp.arange(s.classes), np.dtype(np.float32))[s.counted]
    lost, sure = jnp.any(jnp.isnan(z), axis=1), jnp.any(jnp.isposinf(z), axis=1)
    ids = jnp.argmax(jnp.where((lost | sure)[:, None], z, kept + added), axis=1)
    log_p = jnp.take_along_axis(kept, ids[:, None], axis=1)[:, 0] - jax.nn.logsumexp(kept, axis=1)
    found = s.spread({"ids": ids + 1, "log_probs": jnp.where(lost | sure, jnp.nan, log_p)})
    return {**found, "ids": found["ids"] - 1}


SAMPLED = jnp.array([0, 3, 5, 9, 20, 30], jnp.int32)


def _sampler(key: Any, num_samples: int, vocab_size: int) -> P.ClassSample:
    del key, num_samples
    return P.ClassSample(SAMPLED, jnp.linspace(-2.0, 0.0, vocab_size))


def _plain_sampled_softmax(s: Sizes, a: Arrays, form: Any, *_: Any, **drawn: Any) -> Any:
    del drawn
    given = s.labels[s.counted], s.counted, SAMPLED, jnp.linspace(-2.0, 0.0, s.classes), form
    return _weighted(s, plain.sampled_softmax(a, *given), a, "none")


def _tasks(s: Sizes, a: Arrays, implementation: str, _: str) -> Any:
    first = {"bias": a["bias"], "logit_scale": a["logit_scale"], "implementation": implementation or None}
    second = {"bias": a["teacher_bias"], "label_smoothing": 0.1, "vocab_size": s.classes}
    tasks = {
        "one": P.Task(a["weight"], s.labels, 1.0, first | {"vocab_size": s.classes}),
        "two": P.Task(a["teacher_weight"][:, : s.width], s.labels[::-1], 0.3, second),
    }
    found = P.multi_task_cross_entropy(a["hidden"], tasks)
    return found.total, found.losses


def _plain_tasks(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    one = plain.cross_entropy(_z(s, a), s.labels[s.counted], {}, s.counted, form, "mean")
    labels, rows = s.labels[::-1], np.flatnonzero(s.counts[::-1])
    head = {"hidden": a["hidden"], "weight": a["teacher_weight"][:, : s.width], "bias": a["teacher_bias"]}
    z = plain.logits(head, rows, s.classes)
    two = plain.cross_entropy(z, labels[rows], {"label_smoothing": 0.1}, rows, form, "mean")
    return one + 0.3 * two, {"one": one, "two": two}


def _of_logits(loss: Any, *inputs: str, **more: Any) -> Case:
    def ours(s: Sizes, a: Arrays, implementation: str, backward: str) -> Any:
        options = {name: x for name, x in a.items() if name != "logits"} | more
        given = {"reduction": _reduction(backward), "implementation": implementation or None, "vocab_size": s.classes}
        return loss(a["logits"], s.labels, **given, **options)

    return Case(ours, _plain_cross_entropy, ("logits", *inputs), inputs[1:], EACH_MODE[:2])


def _plain_selective(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
    z, labels = a["all_logits"], jnp.asarray(s.several)
    inside = (labels >= 0) & (labels < s.classes)
    z = jnp.where(jnp.any(inside, axis=1)[:, None], z, 0.0)
    return jnp.where(inside, plain.at_labels(z, labels) - form(z)[:, None], 0.0)


TAGS, LENGTHS = np.array([[0, 2, 1, 1], [1, 1, 0, 2], [2, 0, 0, 0]]), np.array([4, 1, 3])
MASK, PAIRS = np.array([[True, True, False], [True, False, False]]), np.array([True, False, True, True])


def _chains(name: str) -> Case:
    def ours(s: Sizes, a: Arrays, *_: str) -> Any:
        mask = np.arange(4) < LENGTHS[:, None]
        return P.linear_chain_crf(a["emissions"], TAGS, a[name], mask=mask, reduction="none")

    def expected(s: Sizes, a: Arrays, form: Any, _: str) -> Any:
        return plain.chains(a["emissions"], TAGS, a[name], LENGTHS, form)

    return Case(ours, expected, ("emissions", name))


def _policy(s: Sizes, a: Arrays, *_: str) -> Any:
    named = {x: a[x] for x in ("old_log_probs", "ref_log_probs", "entropy")}
    named |= {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "aggregation": "none"}
    return P.policy_loss(a["log_probs"], a["advantages"], MASK, **named)


def _spread(mask: np.ndarray, values: Any) -> Any:
    return jnp.zeros(mask.shape).at[np.nonzero(mask)].set(values)


def _top_k_distillation(name: str, *, tail: bool) -> Case:
    def ours(s: Sizes, a: Arrays, *_: str) -> Any:
        given = a["top_log_probs"], a["teacher_log_probs"], MASK
        return P.top_k_distillation_loss(*given, divergence=name, tail=tail, aggregation="none")

    def expected(s: Sizes, a: Arrays, *_: Any) -> Any:
        given = {"log_probs": a["top_log_probs"], "teacher_log_probs": a["teacher_log_probs"]}
        return _spread(MASK, plain.top_k_distillation(name, given, MASK, tail=tail))

    given = "top_log_probs", "teacher_log_probs"
    return Case(ours, expected, given, given[1:], below=given)


OF_CLASSES = ("class_weights", "label_smoothing", "z_loss")
OF_STATISTICS = ("temperature", "logit_weights")
OF_TEACHER = ("temperature", *(f"teacher_{x}" for x in HEAD))
OF_PAIRS = ("chosen", "rejected", "ref_chosen", "ref_rejected")
OF_TOKENS = ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages")
CASES: dict[str, Case] = {
    "linear_cross_entropy": _of_head(
        "linear_cross_entropy", _plain_cross_entropy, "token_weights", *OF_CLASSES, constants=OF_CLASSES, ways=EACH_MODE
    ),
    "linear_cross_entropy, capped": _of_head(
        "linear_cross_entropy", _plain_cross_entropy, "token_weights", logit_softcap=4.0, ways=EACH_MODE
    ),
    "linear_cross_entropy, low rank": _of_head(
        "linear_cross_entropy", _plain_cross_entropy, "up", "down", ways=EACH_MODE
    ),
    "linear_cross_entropy, scaled": _of_head(
        "linear_cross_entropy", _plain_cross_entropy, "up", "down", "vocab_scale", ways=EACH_MODE
    ),
    "linear_row_statistics": _of_head(
        "linear_row_statistics", _plain_statistics, *OF_STATISTICS, labels="several",
        constants=OF_STATISTICS, ways=EACH, finite=OF_STATISTICS,
    ),
    "linear_log_probs": _of_head(
        "linear_log_probs", _plain_log_probs, "temperature", labels="several", constants=("temperature",), ways=EACH,
        finite=("temperature",),
    ),
    "linear_loss": _of_head(
        "linear_loss", _plain_loss, *OF_STATISTICS, "token_weights", "row_input", constants=OF_STATISTICS,
        ways=EACH_MODE, finite=OF_STATISTICS,
    ),
    **{
        f"linear_distillation, {said}": _of_head(
            name, _plain_distillation, "token_weights", *OF_TEACHER, divergence=name, **beta,
            constants=OF_TEACHER, ways=EACH, finite=("temperature",),
        )
        for said, name, beta in (*((x, x, {}) for x in DISTILLATIONS), ("jsd near 0", "jsd", {"beta": 1e-3}))
    },
    "linear_top_k": _of_head("linear_top_k", _plain_top_k, "temperature", constants=(*HEAD, "temperature")),
    **{
        f"linear_sample, {limits}": _of_head(
            "linear_sample", _plain_sample, temperature=0.7, **limits, constants=HEAD
        )
        for limits in ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.8})
    },
    "sampled_softmax_cross_entropy": _of_head(
        "sampled_softmax", _plain_sampled_softmax, "token_weights", num_samples=len(SAMPLED), sampler=_sampler,
        ways=EACH,
    ),
    "multi_task_cross_entropy": Case(_tasks, _plain_tasks, (*HEAD, "teacher_weight", "teacher_bias"), (), EACH),
    "cross_entropy": _of_logits(P.cross_entropy, "token_weights", *OF_CLASSES),
    "chunked_cross_entropy": _of_logits(P.chunked_cross_entropy, chunk_size=5),
    "mean_squared_lse": Case(
        lambda s, a, *_: P.mean_squared_lse(a["logits"], s.labels, vocab_size=s.classes),
        lambda s, a, form, _: jnp.mean(jnp.square(form(a["logits"][s.counted, : s.classes].astype(jnp.float32)))),
        ("logits",),
    ),
    "selective_log_softmax": Case(
        lambda s, a, *_: P.selective_log_softmax(a["all_logits"], s.several), _plain_selective, ("all_logits",)
    ),
    **{f"linear_chain_crf, {name}": _chains(name) for name in ("transitions", "each_transitions")},
    "policy_loss": Case(
        _policy, lambda s, a, *_: _spread(MASK, plain.policy(a, MASK)), OF_TOKENS,
        ("old_log_probs", "ref_log_probs", "advantages"),
    ),
    "dpo_loss": Case(
        lambda s, a, *_: P.dpo_loss(*(a[name] for name in OF_PAIRS), PAIRS, reduction="none"),
        lambda s, a, *_: _spread(PAIRS, plain.preference(a, PAIRS)), OF_PAIRS, OF_PAIRS[2:],
    ),
    "sequence_log_probs": Case(
        lambda s, a, *_: P.sequence_log_probs(a["log_probs"], MASK),
        lambda s, a, *_: jnp.sum(_spread(MASK, a["log_probs"][MASK]), axis=-1), ("log_probs",),
    ),
    "group_advantages": Case(
        lambda s, a, *_: P.group_advantages(a["rewards"], 3),
        lambda s, a, *_: plain.advantages(a["rewards"].reshape(2, 3)).reshape(-1), ("rewards",), ("rewards",),
    ),
    **{
        f"top_k_distillation_loss, {name}, {tail=}": _top_k_distillation(name, tail=tail)
        for name in DISTILLATIONS for tail in (True, False)
    },
}  # fmt: skip

_policy_loss = functools.partial(
    P.policy_loss, kl_coefficient=0.1, entropy_coefficient=np.float32(0.1), ratio_limit=3, return_metrics=True
)
# Objectives of post-training, by name: a function of a mask and of arrays of these names, `[sequences, T]` or pairs.
OBJECTIVES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "tokens": (_policy_loss, OF_TOKENS),
    "tokens of fixed length": (functools.partial(_policy_loss, aggregation="fixed_length", length=3), OF_TOKENS),
    "sequences": (functools.partial(_policy_loss, level="sequence", aggregation="sequence_mean"), OF_TOKENS),
    "sequences by token": (functools.partial(_policy_loss, level="sequence_token", aggregation="none"), OF_TOKENS),
    **{
        kind: (functools.partial(P.dpo_loss, kind=kind, return_metrics=True), OF_PAIRS)
        for kind in ("sigmoid", "hinge", "ipo")
    },
    **{
        f"sequences' log-probabilities, {average=}": (
            functools.partial(P.sequence_log_probs, average=average), ("log_probs",)
        )
        for average in (True, False)
    },
}  # fmt: skip
