"""Prints the table of devices of docs/adopting.md: where each implementation serves, where it was run, the default."""

from typing import Literal

from pallas_ce.backends.device import GPUS

# "tested": the repository has results of the device. "compiled": for the device, never run on one. "fallback": XLA's
# code, which serves every device where nothing else does.
Status = Literal["tested", "compiled", "fallback"]

_NARROW = ("bfloat16", "float16")

# Of the kernels: the dtypes of operands that they multiply.
DTYPES: dict[str, tuple[str, ...]] = {"mosaic_gpu": _NARROW, "triton": (*_NARROW, "float32")}

# Results of XLA's code, by compute capability.
XLA_RESULTS = {"9.0": "experiments/results/gpu_report.md", "CPU": "experiments/results/cpu_head.json"}

IMPLEMENTATIONS = (*DTYPES, "xla")


def status(implementation: str, capability: str, dtype: str = "bfloat16") -> Status | None:
    """The status of an implementation on a compute capability's devices, or "CPU"; None where it does not serve."""
    if implementation == "xla":
        return "tested" if capability in XLA_RESULTS else "fallback"
    kernels = GPUS[capability].kernels if capability in GPUS else {}
    if implementation not in kernels or dtype not in DTYPES[implementation]:
        return None
    return "compiled" if kernels[implementation] is None else "tested"


def table() -> str:
    """The table, in Markdown."""
    rows = [["compute capability", "GPUs", *(f"`{name}`" for name in IMPLEMENTATIONS), "by default"]]
    rows.append(["---"] * len(rows[0]))
    models = {capability: gpus.models for capability, gpus in GPUS.items()}
    for capability, names in (models | {"other": ("any other GPU",), "CPU": ()}).items():
        told = [_told(name, capability) for name in IMPLEMENTATIONS]
        rows.append([capability, ", ".join(names), *told, _default(capability)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _told(implementation: str, capability: str) -> str:
    """The status, and its dtypes where others have another."""
    dtypes = DTYPES.get(implementation, ())
    found = status(implementation, capability)
    if found is None:
        return "–"
    return found if not dtypes or "float32" in dtypes else f"{found} ({', '.join(dtypes)})"


def _default(capability: str) -> str:
    """The backend for 16-bit operands, and for float32 where it is another; full float32 is XLA's everywhere."""
    names = GPUS[capability].kernels if capability in GPUS else {}
    if not names:
        return "`xla`"
    narrow, tf32 = (next((name for name in names if dtype in DTYPES[name]), "xla") for dtype in ("bfloat16", "float32"))
    return f"`{narrow}`" + (f"; TF32: `{tf32}`" if tf32 != narrow else "") + "; full float32: `xla`"


if __name__ == "__main__":
    print(table())
