"""On which devices each implementation was run: facts, which `explain`, a warning and the README's table tell.

Who has a device on which an implementation was never run finds out by `python -m pallas_ce.check_device`. The file that
it writes belongs in `experiments/results`, and its name in `RESULTS`.
"""

from collections.abc import Mapping
from typing import Literal

from pallas_ce.backends import device as targets

COMMAND = "python -m pallas_ce.check_device"

# "tested": the repository has results of the device. "compiled": for the device, never run on one. "fallback": XLA's
# code, which serves every device where nothing else does.
Status = Literal["tested", "compiled", "fallback"]

_NARROW = ("bfloat16", "float16")

# Of the kernels: the dtypes of operands that they multiply.
DTYPES: dict[str, tuple[str, ...]] = {"mosaic_gpu": _NARROW, "triton": (*_NARROW, "float32")}

# By implementation and compute capability: the device's results, None where it was only compiled for.
RESULTS: dict[str, dict[str, str | None]] = {
    "mosaic_gpu": {"9.0": "experiments/results/gpu_report.md"},
    "triton": {
        "8.0": None,
        "8.6": None,
        "8.9": None,
        "9.0": "experiments/results/check_device_h200.json",
        "10.0": None,
        "10.3": None,
        "12.0": None,
        "12.1": None,
    },
    "xla": {"9.0": "experiments/results/gpu_report.md", "CPU": "experiments/results/cpu_head.json"},
}


def status(implementation: str, capability: str, dtype: str = "bfloat16") -> Status | None:
    """The status of an implementation on a compute capability's devices, or "CPU"; None where it does not serve."""
    if dtype not in DTYPES.get(implementation, (dtype,)):
        return None
    results = RESULTS[implementation]
    if capability in results:
        return "compiled" if results[capability] is None else "tested"
    return None if implementation in DTYPES else "fallback"


def note(implementation: str, kind: str | None) -> str | None:
    """A warning for users of a device of this model; None where the implementation was run on one."""
    if kind is None or None not in RESULTS.get(implementation, {}).values():
        return None
    capability = targets.compute_capability(kind)
    if capability is None or status(implementation, capability) != "compiled":
        return None
    return f"compiled, but never run on a GPU of compute capability {capability}: `{COMMAND}` checks it there"


def table(defaults: Mapping[str, tuple[str, ...]]) -> str:
    """The README's table, in Markdown, with the defaults from the table of `dispatch.select`."""
    names = list(RESULTS)
    rows = [["compute capability", "GPUs", *(f"`{name}`" for name in names), "by default"]]
    rows.append(["---"] * len(rows[0]))
    devices = [*targets.MODELS.items(), ("other", ("any other GPU",)), ("CPU", ())]
    for capability, models in devices:
        told = [_told(name, capability) for name in names]
        rows.append([capability, ", ".join(models), *told, _default(defaults.get(capability, ()))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _told(implementation: str, capability: str) -> str:
    """The status, and its dtypes where others have another."""
    dtypes = DTYPES.get(implementation, ())
    found = status(implementation, capability)
    if found is None:
        return "–"
    return found if not dtypes or "float32" in dtypes else f"{found} ({', '.join(dtypes)})"


def _default(names: tuple[str, ...]) -> str:
    """The backend for 16-bit operands, and for float32 where it is another; full float32 is XLA's everywhere."""
    if not names:
        return "`xla`"
    narrow, tf32 = (
        next((name for name in names if dtype in DTYPES.get(name, (dtype,))), "xla")
        for dtype in ("bfloat16", "float32")
    )
    return f"`{narrow}`" + (f"; TF32: `{tf32}`" if tf32 != narrow else "") + "; full float32: `xla`"
