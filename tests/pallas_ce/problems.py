"""Problems for the tests: one set of drawn shapes and options that every backend goes through."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np

# Each way of computing a differentiated loss: (implementation, backward mode).
WAYS = [("reference", "auto"), ("xla", "recompute"), ("xla", "in_forward")]
STREAMED = WAYS[1:]
# The contract also of the example of a backend.
TOY = [("toy", "recompute"), ("toy", "in_forward")]
# The cross entropy also of logits that are stored, whole or in chunks.
STORED = [("stored logits", "auto"), ("chunks", "auto")]

# What the statistics' functions take and the oracle's logits too.
LOGIT_OPTIONS = ("vocab_size", "logit_softcap")


@dataclasses.dataclass
class Problem:
    """Differentiated arrays (hidden, weight `[V, H]`; maybe up and down, bias, scales, token weights), and the rest."""

    arrays: dict[str, Any]
    labels: np.ndarray
    options: dict[str, Any]
    vocab_axis: int


def make(seed: int, n: int, h: int, v: int, scale: float = 1.0, vocab_axis: int = 0) -> Problem:
    """Logits of standard deviation `scale`, one label in five ignored."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(n, h)).astype(np.float32)
    weight = (rng.normal(size=(v, h)) * scale / np.sqrt(h)).astype(np.float32)
    labels = rng.integers(0, v, size=n).astype(np.int32)
    labels[rng.random(n) < 0.2] = -100
    return Problem({"hidden": hidden, "weight": weight}, labels, {}, vocab_axis)


def readable(p: Problem) -> Problem:
    """The same for the Hopper kernels: H a multiple of 16, and V of 8 or, where the weight is `[H, V]`, of 16."""
    v, h = p.arrays["weight"].shape
    padding = {"v": -v % (16 if p.vocab_axis else 8), "h": -h % 16}
    axes = {"hidden": "nh", "weight": "vh", "bias": "v", "up": "vr", "down": "rh"}
    padded = {
        name: np.pad(x, [(0, padding.get(axis, 0)) for axis in axes[name]])
        for name, x in p.arrays.items()
        if name in axes
    }
    options = {"vocab_size": v, **p.options} if padding["v"] else p.options
    return dataclasses.replace(p, arrays=p.arrays | padded, options=options)


def small_scratch(p: Problem, divisor: int) -> int:
    """A budget for several blocks and tiles, which no backend refuses."""
    (n, h), v = p.arrays["hidden"].shape, p.arrays["weight"].shape[0]
    return max(12 * n * v // divisor, 4 * v + 12 + 24 * (h + len(p.arrays.get("down", ()))))


@st.composite
def statistics_problems(draw: Any, low_rank: bool = True, scaled: bool = False) -> Problem:
    """`problems` for the functions on statistics: also K targets for each row, and temperatures of every kind.

    Small vocabularies make targets repeat within a row; labels of -100 and V are no targets.
    """
    p = draw(problems(low_rank=low_rank, scaled=scaled))
    n, v = p.labels.size, p.options.get("vocab_size", p.arrays["weight"].shape[0])
    p.arrays.pop("token_weights", None)
    p.options = {k: x for k, x in p.options.items() if k in LOGIT_OPTIONS}
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    if targets := draw(st.sampled_from([None, 1, 3, 7])):
        p.labels = rng.integers(0, v + 1, size=(n, targets)).astype(np.int32)
        p.labels[rng.random((n, targets)) < 0.2] = -100
    if kind := draw(st.sampled_from([None, "number", "scalar", "rows"])):
        drawn = rng.uniform(0.3, 3.0, size=n).astype(np.float32)
        p.options["temperature"] = {"number": float(drawn[0]), "scalar": drawn[0].reshape(()), "rows": drawn}[kind]
    return p


@st.composite
def problems(
    draw: Any, multiple: int = 1, low_rank: bool = True, most: Sequence[int] = (40, 33, 130), scaled: bool = False
) -> Problem:
    """Any shape, its sizes multiples of a number; both layouts, any options, maybe a term of `low_rank`.

    Where `scaled`, entries of the vocabulary may have scales, which kernels refuse.
    """
    n, h, v = (multiple * draw(st.integers(1, size // multiple)) for size in most)
    seed = draw(st.integers(0, 2**16))
    p = make(seed, n, h, v, draw(st.sampled_from([0.01, 1.0, 5.0])), draw(st.sampled_from([0, 1])))
    rng = np.random.default_rng(seed + 1)
    if rank := draw(st.sampled_from([0, 0, 1, 3] if low_rank else [0])):
        p.arrays["up"] = rng.normal(size=(v, rank)).astype(np.float32)
        p.arrays["down"] = (rng.normal(size=(rank, h)) * 0.3 / np.sqrt(h)).astype(np.float32)
    if draw(st.booleans()):
        p.arrays["bias"] = rng.normal(size=v).astype(np.float32)
    if scaled and draw(st.booleans()):
        p.arrays["vocab_scale"] = rng.normal(size=v).astype(np.float32)
    if draw(st.booleans()):
        p.arrays["logit_scale"] = np.float32(draw(st.sampled_from([0.5, 1.3, -0.7])))
    if draw(st.booleans()):
        p.arrays["token_weights"] = rng.uniform(0.0, 2.0, size=n).astype(np.float32)
    if draw(st.booleans()):
        p.options["vocab_size"] = draw(st.integers(1, v))
    real = p.options.get("vocab_size", v)
    if draw(st.booleans()):
        p.options["class_weights"] = rng.uniform(-0.2, 2.0, size=real).astype(np.float32)
    p.options |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "label_smoothing": st.sampled_from([0.1, 1.0]),
                "z_loss": st.sampled_from([1e-3, 0.1]),
                "logit_softcap": st.sampled_from([3.0, 30.0]),
                "normalizer": st.just(17.0),
                "ignore_index": st.sampled_from([0, -1]),
            },
        )
    )
    p.options["reduction"] = draw(st.sampled_from(["mean", "sum"])) if "normalizer" not in p.options else "mean"
    # A mean over negative and positive class weights may have a normaliser near 0, where no float32 result is accurate.
    if "class_weights" in p.options and p.options["reduction"] == "mean":
        p.options["class_weights"] = np.abs(p.options["class_weights"]) + 0.1
    return p


@st.composite
def narrow_problems(draw: Any, dtypes: Sequence[Any] = (ml_dtypes.bfloat16, np.float16), **given: Any) -> Problem:
    """`problems` whose operands have 16 bits.

    Of two classes at least: the gradient of a single one is 0, and the roundings of float32 all that there is.
    """
    p, dtype = draw(problems(low_rank=False, **given)), draw(st.sampled_from(dtypes))
    hypothesis.assume(p.options.get("vocab_size", p.arrays["weight"].shape[0]) > 1)
    p.arrays |= {name: p.arrays[name].astype(dtype) for name in ("hidden", "weight", "bias") if name in p.arrays}
    return p


def kinds(within: Sequence[str] = ("alone", "checkpoint", "jit", "scan", "vmap")) -> st.SearchStrategy[Any]:
    """How a call is made, which changes no result: transformations, leading axes, labels, metrics, frozen arrays."""
    return st.fixed_dictionaries({
        "within": st.sampled_from(within),
        "columns": st.none() | st.integers(1, 3),
        "metrics": st.booleans(),
        "labels": st.sampled_from([np.int16, np.int32, np.int64]),
        "frozen": st.sets(st.sampled_from(["hidden", "weight", "bias", "vocab_scale"])),
    })  # fmt: skip
