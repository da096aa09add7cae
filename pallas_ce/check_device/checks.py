"""The checks: calls of every implementation that serves the device, beside the oracle."""

import concurrent.futures
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api.linear_cross_entropy import linear_cross_entropy
from pallas_ce.api.linear_loss import linear_loss
from pallas_ce.check_device.oracle import Array, loss_and_gradients
from pallas_ce.statistics.row import RowStatistics

DTYPES = ("bfloat16", "float16", "float32")
_MODES = ("recompute", "in_forward")
_RUNS = 3

# XLA and Triton compile several programs at once, XLA without timing candidates for its own products, which takes
# seconds for each shape.
_AT_ONCE = min(16, os.cpu_count() or 1)
_UNTUNED = {"xla_gpu_autotune_level": 0}


class Case(NamedTuple):
    """A call of N rows, H and V.

    Attributes:
        shape: N, H, V.
        vocab_axis: the weight's layout.
        arrays: which optional ones there are: "bias", "temperature" of each row.
        options: further arguments.
        ignored: the share of the labels that do not count.
        targets: K, or None for labels `[N]`.
    """

    shape: tuple[int, int, int]
    vocab_axis: int
    arrays: tuple[str, ...] = ()
    options: Mapping[str, Any] = {}
    ignored: float = 0.0
    targets: int | None = None


_WHOLE, _RAGGED = (256, 128, 2048), (77, 100, 1003)
_BLOCKS = {"label_smoothing": 0.1, "scratch_bytes": 2**22}

CASES = {
    "plain": Case(_WHOLE, 0),
    "ragged": Case(_RAGGED, 1),
    "bias, soft cap": Case(_WHOLE, 1, ("bias",), {"logit_softcap": 5.0}),
    "label smoothing, ignored rows, blocks": Case((600, 256, 3000), 0, options=_BLOCKS, ignored=0.3),
    "3 labels a row": Case(_WHOLE, 0, ignored=0.2, targets=3),
    "row temperatures, ragged": Case(_RAGGED, 1, ("temperature",)),
}


# XLA's own code is the same on all devices, so that fewer cases do.
_OF_XLA = ("plain", "label smoothing, ignored rows, blocks", "row temperatures, ragged")


def carry_out(implementations: Sequence[str], device: jax.Device) -> Iterator[dict[str, Any]]:
    """Runs the cases in every dtype and backward mode on the device.

    Yields:
        `{"implementation", "dtype", "case", "backward", "status", ...}`. The status is "pass" or "fail" with `errors`,
        the relative error and its bound by name; "fail" with the `message` of what was raised; or "not served" with the
        reason as `message`.
    """
    checks = [
        check
        for check in itertools.product(implementations, DTYPES, CASES, _MODES)
        if check[0] != "xla" or check[2] in _OF_XLA
    ]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(lambda check: _outcome(device, *check), checks)


def _outcome(device: jax.Device, implementation: str, dtype: str, name: str, backward: str) -> dict[str, Any]:
    case, told = CASES[name], {"implementation": implementation, "dtype": dtype, "case": name, "backward": backward}
    arrays = _arrays(case, jnp.dtype(dtype))
    options = {**case.options, "vocab_axis": case.vocab_axis, "backward": backward, "implementation": implementation}
    # The in_forward mode rounds probabilities, in float16 over a narrow range of exponents.
    factor = 3.0 if (dtype, backward) == ("float16", "in_forward") else 2.0
    try:
        errors = _errors(arrays, case, _results(jax.device_put(arrays, device), options), factor)
    except Exception as error:  # whatever a device or its compiler does, the other checks go on
        status = "not served" if "cannot serve this call" in str(error) else "fail"
        return told | {"status": status, "message": f"{type(error).__name__}: {error}"[:2000]}
    passed = all(x["error"] <= x["bound"] for x in errors.values())
    return told | {"status": "pass" if passed else "fail", "errors": errors}


def _arrays(case: Case, dtype: np.dtype[Any]) -> dict[str, Array]:
    """The weight as `[V, H]`; logits of standard deviation 1."""
    rng, (n, h, v) = np.random.default_rng(0), case.shape
    labels = rng.integers(0, v, size=(n, case.targets or 1), dtype=np.int32)
    labels[rng.random(labels.shape) < case.ignored] = -100
    made = {
        "hidden": rng.normal(size=(n, h)).astype(dtype),
        "weight": (rng.normal(size=(v, h)) / np.sqrt(h)).astype(dtype),
        "labels": labels if case.targets else labels[:, 0],
        "bias": rng.normal(size=v).astype(dtype),
        "temperature": rng.uniform(0.5, 2.0, size=n).astype(np.float32),
    }
    return {name: x for name, x in made.items() if name in ("hidden", "weight", "labels", *case.arrays)}


def _negative_log_likelihood(row: RowStatistics, labels: jax.Array) -> jax.Array:
    assert row.log_prob is not None
    return -jnp.where(labels >= 0, row.log_prob, 0.0).reshape(labels.shape[0], -1).sum(axis=1)


def _results(arrays: dict[str, jax.Array], options: dict[str, Any]) -> Any:
    """Loss and gradients, the same in each of several runs; in later runs a GPU replays a graph of launches."""
    constant = {name: x for name, x in arrays.items() if name in ("labels", "temperature")}

    def loss(differentiable: dict[str, jax.Array]) -> Any:
        given: dict[str, Any] = differentiable | constant | options
        hidden, weight, labels = (given.pop(name) for name in ("hidden", "weight", "labels"))
        weight = weight.T if options["vocab_axis"] else weight
        if labels.ndim == 1 and "temperature" not in given:
            return linear_cross_entropy(hidden, weight, labels, **given)
        return linear_loss(_negative_log_likelihood, hidden, weight, labels, labels, **given)

    differentiable = {name: x for name, x in arrays.items() if name not in constant}
    run = jax.jit(jax.value_and_grad(loss)).lower(differentiable).compile(_UNTUNED)
    first, *others = (jax.tree.map(np.asarray, run(differentiable)) for _ in range(_RUNS))
    bits = [[x.tobytes() for x in jax.tree.leaves(result)] for result in (first, *others)]
    if any(one != bits[0] for one in bits):
        raise RuntimeError("two runs of the same program gave different bits")
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(first)):
        raise RuntimeError("loss or gradients are not finite")
    return first


def _errors(arrays: dict[str, Array], case: Case, results: Any, factor: float) -> dict[str, dict[str, float]]:
    """By name; a 16-bit gradient may err `factor` times as far as exact products of rounded dlogits do."""
    dtype = arrays["hidden"].dtype
    given = arrays | {"labels": arrays["labels"].reshape(case.shape[0], -1)}
    options = case.options.get("logit_softcap"), case.options.get("label_smoothing", 0.0)
    want, exact = loss_and_gradients(given, *options)
    _, rounded = loss_and_gradients(given, *options, rounded_to=dtype)
    errors = {"loss": {"error": abs(float(results[0]) - want) / want, "bound": 2e-5}}
    for name, gradient in results[1].items():
        bound = 1e-5 if dtype == np.float32 else factor * _relative_error(rounded[name], exact[name])
        errors[name] = {"error": _relative_error(gradient.astype(np.float64), exact[name]), "bound": bound}
    return errors


def _relative_error(found: Array, want: Array) -> float:
    """In the Frobenius norm."""
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))
