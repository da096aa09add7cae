"""Checks this library on your device, times it, and writes what it found: `python -m pallas_ce.check_device`.

Loss and gradients of every implementation that serves the device are compared with float64, in bfloat16, float16 and
float32, in both backward modes; then they are timed beside logits that are stored. It takes a few minutes. The file may
be sent to the project, also and above all if a check failed.

Exit status: 0 if all checks pass, 1 if one fails, 2 if there is no such device.
"""

import argparse
import datetime
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_ce.check_device import checks, timings

_IMPLEMENTATIONS = {"cuda": ("mosaic_gpu", "triton", "xla"), "cpu": ("xla",)}
_TIMED = {"cuda": (4096, 2048, 32768), "cpu": (256, 128, 4096)}
_PACKAGES = re.compile(r"pallas-ce|jax|jaxlib|jax-cuda.*|triton|numpy")
_DRIVER = Path("/proc/driver/nvidia/version")


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu checks XLA's code on the CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default pallas_ce_DEVICE.json in this folder")
    options = parser.parse_args(words)
    try:
        device = jax.local_devices(backend=options.device)[0]
    except RuntimeError as error:
        print(f"JAX finds no CUDA GPU; --device cpu checks XLA's code on the CPU. {error}", file=sys.stderr)
        return 2
    path = options.out or Path(f"pallas_ce_{re.sub(r'[^a-z0-9]+', '_', device.device_kind.lower())}.json")
    found = _facts(device)
    print(", ".join(f"{name} {fact}" for name, fact in found.items()))
    print(f"\n{'implementation':15} {'dtype':9} {'backward':11} {'error/bound':12} check")
    with jax.default_device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel was never run on this device is why this is run
        found |= {"passed": None, "checks": [], "timings": []}
        for check in checks.carry_out(_IMPLEMENTATIONS[options.device], device):
            found["checks"].append(check)
            _save(path, found)
            if check["status"] != "not served":
                print(_of_check(check), flush=True)
        passed = {
            (check["implementation"], check["dtype"]): None for check in found["checks"] if check["status"] == "pass"
        }
        for dtype in ("bfloat16", "float32"):
            served = [name for name, of_dtype in passed if of_dtype == dtype]
            try:
                timing = timings.measure(dtype, served, _TIMED[options.device])
                print(_of_timing(timing), flush=True)
            except Exception as error:  # a small GPU may have no room
                timing = {"dtype": dtype, "message": f"{type(error).__name__}: {error}"}
                print(f"\n{dtype}: not timed: {timing['message']}")
            found["timings"].append(timing)
            _save(path, found)
    statuses = [check["status"] for check in found["checks"]]
    found["passed"] = "fail" not in statuses
    _save(path, found)
    print(f"\n{statuses.count('pass')} checks passed, {statuses.count('fail')} failed. The project is glad of {path}.")
    return 0 if found["passed"] else 1


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


def _of_check(check: dict[str, Any]) -> str:
    worst = max((x["error"] / x["bound"] for x in check.get("errors", {}).values()), default=None)
    ratio = "-" if worst is None else f"{worst:.2f}"
    told = "" if check["status"] == "pass" else f": FAILED {check.get('message', '').partition('\n')[0]}"
    start = f"{check['implementation']:15} {check['dtype']:9} {check['backward']:11}"
    return f"{start} {ratio:12} {check['case']}{told}"


def _of_timing(timing: dict[str, Any]) -> str:
    lines = ["", f"{timing['dtype']}, N H V {timing['shape']}: milliseconds, and ratio to the bare products"]
    lines += [f"{ms:9.3f}         bare products, {name}" for name, ms in timing["products_ms"].items()]
    lines += [f"{result['ms']:9.3f} {result['ratio']:7.2f} {name}" for name, result in timing["results"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
