"""Checks this library on your device and writes what it found: `python -m pallas_ce.check_device`.

Loss and gradients of every implementation that serves the device are compared with float64, in bfloat16, float16 and
float32, in both backward modes. It takes a few minutes. The file may be sent to the project, also and above all if a
check failed.

Exit status: 0 if all checks pass, 1 if one fails, 2 if there is no such device.
"""

import argparse
import concurrent.futures
import datetime
import functools
import itertools
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce.api.linear_cross_entropy import linear_cross_entropy
from pallas_ce.api.linear_loss import linear_loss
from pallas_ce.statistics.row import RowStatistics

IMPLEMENTATIONS = {"cuda": ("mosaic_gpu", "triton", "xla"), "cpu": ("xla",)}

# Of each dtype, how far gradients may be off in the Frobenius norm. An H200's, rounded to 16 bits as their dlogits
# were, are up to 0.44 of the dtype's epsilon off.
DTYPES = {"bfloat16": 0.6 * 2**-7, "float16": 0.6 * 2**-10, "float32": 1e-5}
_PACKAGES = re.compile(r"pallas-ce|jax|jaxlib|jax-cuda.*|triton|numpy")
_DRIVER = Path("/proc/driver/nvidia/version")

# XLA and Triton compile several programs at once, XLA without timing candidates for its own products, which takes
# seconds for each shape.
_AT_ONCE = min(16, os.cpu_count() or 1)
_UNTUNED = {"xla_gpu_autotune_level": 0}


class Case(NamedTuple):
    """A call of N rows, H and V; `ignored` is the share of the labels that do not count, `targets` K of `[N, K]`."""

    shape: tuple[int, int, int]
    arrays: tuple[str, ...] = ()
    options: Mapping[str, Any] = {}
    ignored: float = 0.0
    targets: int | None = None


_WHOLE, _RAGGED = (256, 128, 2048), (77, 100, 1003)
_OTHER_AXIS, _BLOCKS = {"vocab_axis": 1}, {"label_smoothing": 0.1, "scratch_bytes": 2**22}
CASES = {
    "plain": Case(_WHOLE),
    "ragged": Case(_RAGGED, options=_OTHER_AXIS),
    "bias, soft cap": Case(_WHOLE, ("bias",), _OTHER_AXIS | {"logit_softcap": 5.0}),
    "label smoothing, ignored rows, blocks": Case((600, 256, 3000), options=_BLOCKS, ignored=0.3),
    "3 labels a row": Case(_WHOLE, ignored=0.2, targets=3),
    "row temperatures, ragged": Case(_RAGGED, ("temperature",), _OTHER_AXIS),
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu checks XLA's code on the CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default pallas_ce_DEVICE.json in this folder")
    options = parser.parse_args(words)
    try:
        device, host = (jax.local_devices(backend=name)[0] for name in (options.device, "cpu"))
    except RuntimeError as error:
        print(f"JAX finds no CUDA GPU, or no CPU; --device cpu checks XLA's code on the CPU. {error}", file=sys.stderr)
        return 2
    path = options.out or Path(f"pallas_ce_{re.sub(r'[^a-z0-9]+', '_', device.device_kind.lower())}.json")
    found = _facts(device)
    print(", ".join(f"{name} {fact}" for name, fact in found.items()))
    print(f"\n{'implementation':15} {'dtype':9} {'backward':11} {'error/bound':12} check")
    checks: list[dict[str, Any]] = []
    of_call = functools.partial(_checks, IMPLEMENTATIONS[options.device], device, host)
    # That a kernel was never run on this device is why this is run: no warnings.
    with warnings.catch_warnings(action="ignore"), concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        for check in itertools.chain.from_iterable(pool.map(of_call, itertools.product(DTYPES, CASES))):
            checks.append(check)
            _save(path, found | {"passed": None, "checks": checks})
            if check["status"] != "not served":
                ratios = [x["error"] / x["bound"] for x in check.get("errors", {}).values()]
                told = "" if check["status"] == "pass" else f": FAILED {check.get('message', '').partition('\n')[0]}"
                start = f"{check['implementation']:15} {check['dtype']:9} {check['backward']:11}"
                print(f"{start} {f'{max(ratios):.2f}' if ratios else '-':12} {check['case']}{told}", flush=True)
    passed, failed = ([check["status"] for check in checks].count(status) for status in ("pass", "fail"))
    _save(path, found | {"passed": not failed, "checks": checks})
    print(f"\n{passed} checks passed, {failed} failed. The project is glad of {path}.")
    return int(failed > 0)


def _checks(
    implementations: Sequence[str], device: jax.Device, host: jax.Device, call: tuple[str, str]
) -> list[dict[str, Any]]:
    """Of a dtype and a case: every implementation and backward mode on the device, and float64 on the host.

    The status of each is "pass" or "fail", with `errors` or the `message` of an exception, or "not served".
    """
    dtype, case = call[0], CASES[call[1]]
    arrays = _arrays(case, dtype)
    with jax.enable_x64(True), jax.default_device(host):
        wide = {name: x if name == "labels" else x.astype(np.float64) for name, x in arrays.items()}
        exact = _run(case, wide, implementation="reference")
    checks = []
    for implementation, mode in itertools.product(implementations, ("recompute", "in_forward")):
        told = {"implementation": implementation, "dtype": dtype, "case": call[1], "backward": mode}
        try:
            with jax.default_device(device):
                found = _run(case, arrays, implementation=implementation, backward=mode)
            checks.append(told | _compared(found, exact, dtype))
        except Exception as error:  # whatever a device or its compiler does, the other checks go on
            status = "not served" if "cannot serve this call" in str(error) else "fail"
            checks.append(told | {"status": status, "message": f"{type(error).__name__}: {error}"[:2000]})
    return checks


def _arrays(case: Case, dtype: str) -> dict[str, Any]:
    """The weight as `[V, H]`; logits of standard deviation 1."""
    rng, (n, h, v), kind = np.random.default_rng(0), case.shape, jnp.dtype(dtype)
    labels = rng.integers(0, v, size=(n, case.targets or 1), dtype=np.int32)
    labels[rng.random(labels.shape) < case.ignored] = -100
    made = {
        "hidden": rng.normal(size=(n, h)).astype(kind),
        "weight": (rng.normal(size=(v, h)) / np.sqrt(h)).astype(kind),
        "labels": labels if case.targets else labels[:, 0],
        "bias": rng.normal(size=v).astype(kind),
        "temperature": rng.uniform(0.5, 2.0, size=n).astype(np.float32),
    }
    return {name: x for name, x in made.items() if name in ("hidden", "weight", "labels", *case.arrays)}


def _run(case: Case, arrays: dict[str, Any], **options: Any) -> Any:
    """Loss and gradients, the same in each of several runs; in later runs a GPU replays a graph of launches."""
    differentiable = {name: x for name, x in arrays.items() if name not in ("labels", "temperature")}

    def loss(differentiable: dict[str, Any]) -> Any:
        given = arrays | differentiable | dict(case.options) | options
        hidden, weight, labels = (given.pop(name) for name in ("hidden", "weight", "labels"))
        head = hidden, weight.T if "vocab_axis" in given else weight, labels
        if labels.ndim == 1 and "temperature" not in given:
            return linear_cross_entropy(*head, **given)
        return linear_loss(_negative_log_likelihood, *head, labels, **given)

    run = jax.jit(jax.value_and_grad(loss)).lower(differentiable).compile(_UNTUNED)
    results = [jax.tree.map(np.asarray, run(differentiable)) for _ in range(3)]
    if len({b"".join(x.tobytes() for x in jax.tree.leaves(result)) for result in results}) > 1:
        raise RuntimeError("two runs of the same program gave different bits")
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(results)):
        raise RuntimeError("loss or gradients are not finite")
    return results[0]


def _negative_log_likelihood(row: RowStatistics, labels: jax.Array) -> jax.Array:
    assert row.log_prob is not None
    return -jnp.where(labels >= 0, row.log_prob, 0.0).reshape(labels.shape[0], -1).sum(axis=1)


def _compared(found: Any, exact: Any, dtype: str) -> dict[str, Any]:
    """Relative errors in the Frobenius norm, and whether each is within its bound."""
    pairs = {"loss": (found[0], exact[0], 2e-5)}
    pairs |= {name: (x, exact[1][name], DTYPES[dtype]) for name, x in found[1].items()}
    errors = {
        name: {"error": float(np.linalg.norm(x.astype(np.float64) - want) / np.linalg.norm(want)), "bound": bound}
        for name, (x, want, bound) in pairs.items()
    }
    passed = all(x["error"] <= x["bound"] for x in errors.values())
    return {"status": "pass" if passed else "fail", "errors": errors}


def _facts(device: jax.Device) -> dict[str, Any]:
    """The device, and the installed packages."""
    packages = {found.name: found.version for found in metadata.distributions() if _PACKAGES.fullmatch(found.name)}
    driver = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _DRIVER.read_text() if _DRIVER.exists() else "")
    return {
        "format": 1,
        "device": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "driver": driver[0] if driver else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **dict(sorted(packages.items()))},
    }


def _save(path: Path, found: dict[str, Any]) -> None:
    """Writes the whole file beside the one before, and then puts it in its place."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(beside, path)


if __name__ == "__main__":
    sys.exit(main())
