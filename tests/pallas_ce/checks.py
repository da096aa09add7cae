"""Calls of the library and of the oracle on one problem, and how their results are compared."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_ce import LowRank, chunked_cross_entropy, cross_entropy, linear_cross_entropy
from tests.pallas_ce import oracle
from tests.pallas_ce.oracle import LOW_RANK_SCALE
from tests.pallas_ce.problems import Problem

Results = tuple[Any, dict[str, Any]]


def call(function: Callable[..., Any], p: Problem, arrays: dict[str, Any], **options: Any) -> Any:
    """`function` of the problem's head, in its layout, of its labels and options, and of more options."""
    arrays = dict(arrays)
    hidden, *of_weight = (arrays.pop(name) for name in ("hidden", "weight", "up", "down") if name in arrays)
    weight, *term = of_weight if p.vocab_axis == 0 else (x.T for x in of_weight)
    given = {"vocab_axis": p.vocab_axis, **arrays, **p.options, **options}
    return function(hidden, LowRank(weight, *term, LOW_RANK_SCALE) if term else weight, p.labels, **given)


def _of_stored_logits(loss: Callable[..., Any]) -> Callable[..., Any]:
    """`loss` of the logits of a head."""

    def of_head(
        hidden: Any,
        weight: Any,
        labels: Any,
        *,
        vocab_axis: int,
        bias: Any = 0.0,
        vocab_scale: Any = 1.0,
        logit_scale: Any = 1.0,
        **options: Any,
    ) -> Any:
        if isinstance(weight, LowRank):
            a, b = (weight.up, weight.down) if vocab_axis == 0 else (weight.down, weight.up)
            weight = weight.weight + weight.scale * a @ b
        logits = logit_scale * (hidden @ (weight.T if vocab_axis == 0 else weight) * vocab_scale + bias)
        return loss(logits, labels, **{k: x for k, x in options.items() if k not in ("backward", "scratch_bytes")})

    return of_head


def library_loss(p: Problem, arrays: dict[str, Any], *, implementation: Any = None, **options: Any) -> Any:
    """The cross entropy by one of the implementations, or of stored logits."""
    if implementation == "stored logits":
        return call(_of_stored_logits(cross_entropy), p, arrays, **options)
    if implementation == "chunks":
        chunks = functools.partial(chunked_cross_entropy, chunk_size=1 + p.labels.size // 3)
        return call(_of_stored_logits(chunks), p, arrays, **options)
    return call(linear_cross_entropy, p, arrays, implementation=implementation, **options)


def with_gradients(
    function: Callable[[Any], Any], arrays: Any, weighted: Callable[[Any], Any] = jnp.sum
) -> tuple[Any, Any]:
    """What `function` makes of a tree of arrays, and the gradients of the number that `weighted` makes of that."""

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(arrays: Any) -> Any:
        found = function(arrays)
        return weighted(found), found

    (_, found), gradients = run(jax.tree.map(jnp.asarray, arrays))
    return found, gradients


def library_results(p: Problem, implementation: str, backward: Any, **options: Any) -> Results:
    """Loss and gradients of everything differentiable."""
    loss = functools.partial(library_loss, p, implementation=implementation, backward=backward, **options)
    return with_gradients(loss, p.arrays)


# Of two equal calls one counts: halves of a float16 gradient below the least normal number would be rounded once more.
def _mapped(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The first of two equal examples."""
    return lambda arrays: jax.vmap(loss)(jax.tree.map(lambda x: jnp.stack([x, x]), arrays))[0]


def _scanned(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The second of two equal steps."""

    def second(arrays: Any) -> Any:
        dtype = jax.eval_shape(loss, arrays).dtype
        counts = jnp.arange(2, dtype=dtype)
        return jax.lax.scan(lambda total, x: (total + x * loss(arrays), None), jnp.zeros((), dtype), counts)[0]

    return second


WITHIN: dict[str, Callable[[Any], Any]] = {
    "alone": lambda loss: loss,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": _mapped,
    "scan": _scanned,
}


def kind_results(p: Problem, kind: Mapping[str, Any], **options: Any) -> Results:
    """`library_results` of a call of one of `problems.kinds`; the gradients of frozen arrays are the oracle's."""
    even = kind["columns"] is not None and p.labels.size % kind["columns"] == 0
    labels = p.labels.astype(kind["labels"]).reshape((-1, kind["columns"]) if even else -1)
    shaped = dataclasses.replace(p, labels=labels)

    def loss(arrays: Any) -> Any:
        by_row = {name: arrays[name] for name in ("hidden", "token_weights") if name in arrays}
        rows = {name: x.reshape(*labels.shape, *x.shape[1:]) for name, x in by_row.items()}
        found = library_loss(shaped, arrays | rows, return_metrics=kind["metrics"], **options)
        return found[0] if kind["metrics"] else found

    trained = {name: x for name, x in p.arrays.items() if name not in kind["frozen"]} or p.arrays
    whole = WITHIN[kind["within"]](lambda given: loss(p.arrays | given))
    found, gradients = with_gradients(whole, trained)
    assert {name: x.dtype for name, x in gradients.items()} == {name: x.dtype for name, x in trained.items()}
    return found, oracle_results(p)[1] | gradients


def of_stored_logits(
    logits: np.ndarray, labels: np.ndarray, cotangent: Any = 1.0, **options: Any
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Loss and gradient of stored logits: ours, and the oracle's, with the logits as hidden states of an identity."""

    def weighted(loss: Any) -> Any:
        return jnp.sum(loss * cotangent)

    got = with_gradients(lambda z: cross_entropy(z, labels, **options), logits, weighted)
    assert got[1].dtype == logits.dtype
    arrays = {"hidden": logits, "weight": np.eye(logits.shape[1])}
    arrays |= {name: options[name] for name in ("token_weights",) if name in options}
    loss, gradients = oracle.cross_entropy(arrays, labels, options, cotangent)
    return got, (loss, gradients["hidden"])


def assert_exact_but_rounded(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    """Gradients of narrow logits are the exact ones, rounded once."""
    if got[1].dtype == np.float32:
        return assert_close(got, want, 1e-5, floor=1e-6)
    assert abs(float(got[0]) - want[0]) <= 1e-5 * abs(want[0])
    rounded = want[1].astype(np.float32).astype(got[1].dtype)
    assert relative_error(got[1], want[1]) <= 1.05 * relative_error(rounded, want[1])


def oracle_results(p: Problem) -> Results:
    """The same in float64."""
    return oracle.cross_entropy(p.arrays, p.labels, p.options)


def assert_near_oracle(
    p: Problem, got: Results, *, wide: bool = False, cotangent: float = 1.0, before: Mapping[str, np.ndarray] = {}
) -> None:
    """`library_results` in float32, or float64 where `wide`, beside `oracle_results`.

    Gradients of `cotangent·loss` are added to `before`.

    Passes over the logits add a logit's terms in different orders. A probability near 1 takes over the difference, a
    unit in the last place of the terms' sum without their signs, beside units of its own from exponentials. A sum over
    rows has each row's error times its weight, as noise adds up; a gradient, multiplied by the head's other arrays, and
    the scale's by logits. A token weight's, `(loss_i - loss)/Σw`, is a difference of losses.
    """
    want = oracle.cross_entropy(p.arrays, p.labels, p.options, cotangent)
    bound = 1e-12 if wide else 1e-5
    unit = bound / 2**7
    scale = abs(p.arrays.get("logit_scale", 1.0))
    weight = np.abs(p.arrays["weight"])
    if "up" in p.arrays:
        weight = weight + LOW_RANK_SCALE * np.abs(p.arrays["up"]) @ np.abs(p.arrays["down"])
    by_entry = np.abs(p.arrays.get("vocab_scale", np.ones(len(weight))))
    products = np.abs(p.arrays["hidden"]) @ weight.T * scale
    terms = float((products * by_entry).max())
    counts = oracle.counted(p.labels, p.arrays, p.options)
    weights = np.where(counts, p.arrays.get("token_weights", 1.0), 0.0)
    of_classes = np.abs(p.options.get("class_weights", np.ones(1)))
    added = 1.0
    if p.options.get("reduction") == "sum":
        added = np.linalg.norm(np.maximum(weights * of_classes.max(), 1.0))
    floor = unit * max(4.0 * added, 4.0 * abs(want[0]), terms * added)
    (loss, gradients), (right_loss, right_gradients) = got, want
    beside = {
        "hidden": scale * (by_entry[:, None] * np.abs(p.arrays["weight"])).max(),
        "weight": scale * by_entry.max() * np.abs(p.arrays["hidden"]).max(initial=0.0),
        "vocab_scale": float(products.max()),
        "logit_scale": terms,
        "token_weights": 1.0 / max(weights.sum(), 0.01),
    }
    for name in gradients:
        of_it = floor * max(1.0, beside.get(name, 1.0)) * max(1.0, abs(cotangent))
        assert_close({name: gradients[name]}, {name: before.get(name, 0.0) + right_gradients[name]}, bound, of_it)
    assert gradients.keys() == ({"hidden", *before} if before else right_gradients.keys())
    assert_close(loss, right_loss, bound, floor)


def assert_as_accurate_as_rounded_dlogits(
    p: Problem, got: Results, backward: str, *, cotangent: float = 1.0, before: Mapping[str, np.ndarray] = {}
) -> None:
    """`library_results` of 16-bit operands beside `oracle_results`: the loss to 2e-5, gradients relative to roundings.

    Gradients of `cotangent·loss` are added to `before`, in its dtype.

    In each gradient at most 1.5 times the error of exact dlogits that are rounded to the operands' dtype, multiplied
    exactly, and rounded to the result's. Where few numbers are added, one rounding may happen to be kind, so the worst
    of many is taken, drawn at random. The in_forward mode rounds probabilities, but for the targets', and not dlogits,
    which are smaller where label smoothing asks for nearly that probability; in float16 it does so over a narrow range
    of exponents and has 2.5 times.
    """
    assert got[1].keys() == ({"hidden", *before} if before else p.arrays.keys())
    results = functools.partial(oracle.cross_entropy, p.arrays, p.labels, p.options, cotangent)
    want, exact = results()
    assert abs(float(got[0]) - want) <= 2e-5 * abs(want) + 1e-6
    dtype = p.arrays["hidden"].dtype
    factor = 2.5 if dtype == np.float16 and backward == "in_forward" else 1.5
    unit = float(ml_dtypes.finfo(dtype).eps) / 2
    rng = np.random.default_rng(0)

    def disturb(x: np.ndarray) -> np.ndarray:
        return x * (1 + unit * rng.uniform(-1, 1, x.shape))

    _, rounded = results(round_dlogits=dtype)
    for name in ("hidden", "weight", "bias", "vocab_scale", "logit_scale"):
        if name in got[1]:
            start, kept = np.float64(0.0), p.arrays[name].dtype
            if name in before:
                start, kept = before[name].astype(np.float64), before[name].dtype
            right = start + exact[name]
            # The scale's gradient is one number, in which errors that all rows share add up.
            wide = name == "logit_scale"
            floor = 3e-6 + 0.25 * unit * wide
            baseline = relative_error((start + rounded[name]).astype(kept), right)
            error = relative_error(got[1][name], right)
            others = disturb if backward == "in_forward" else None
            for _ in range(64):
                if error <= factor * baseline + floor:
                    break
                _, disturbed = results(disturb=disturb, disturb_others=others)
                result = start + disturbed[name]
                result = disturb(result) if kept.itemsize == 2 else result
                baseline = max(baseline, relative_error(result, right))
            assert error <= factor * baseline + floor, f"{name}: {error} against {baseline}"
    if "token_weights" in got[1]:
        found, want = got[1]["token_weights"], exact["token_weights"]
        small = np.max(np.abs(np.asarray(found, np.float64) - want)) <= 1e-5
        assert small or relative_error(found, want) <= 2e-2


def assert_as_accurate_as_reference(p: Problem, got: Results, want: Results) -> None:
    """`library_results` of 16-bit operands and a low-rank term beside `oracle_results`, relative to the reference.

    Each error is at most 1.5 times the plain computation's of the same operands, and one rounding. What a term
    makes of the hidden states is rounded before it is multiplied, in either.
    """
    plain = library_results(p, "reference", "auto")
    unit = float(ml_dtypes.finfo(p.arrays["hidden"].dtype).eps) / 2
    assert got[1].keys() == want[1].keys()
    found, reference, exact = ({"loss": loss, **gradients} for loss, gradients in (got, plain, want))
    for name in exact:
        error, baseline = relative_error(found[name], exact[name]), relative_error(reference[name], exact[name])
        assert error <= 1.5 * baseline + unit, f"{name}: {error} against {baseline}"


def relative_error(got: Any, want: Any) -> float:
    """The difference's Frobenius norm over `want`'s."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape
    difference = np.linalg.norm((got - want).ravel())
    return float(difference / max(np.linalg.norm(want.ravel()), 1e-30)) if difference else 0.0


def assert_close(got: Any, want: Any, bound: float, floor: float = 1e-7) -> None:
    """Every leaf within `bound` relative, or within `floor` absolutely.

    A floor of a few units in the last place of the terms serves results that are small differences of large terms,
    such as a token weight's gradient `(loss_i - loss)/Σw` where all losses are nearly equal.
    """
    structures: list[Any] = [jax.tree.structure(got), jax.tree.structure(want)]
    assert structures[0] == structures[1]
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        largest = float(np.max(np.abs(np.asarray(x).astype(np.float64) - np.asarray(y)), initial=0.0))
        error = relative_error(x, y)
        assert error <= bound or largest <= floor, f"{jax.tree_util.keystr(path)}: relative {error}, largest {largest}"
