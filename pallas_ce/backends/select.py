"""Which backend carries out a call: the one asked for, or the fastest for the device that is lowered for."""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pallas_ce.backends import device as targets
from pallas_ce.backends import packages
from pallas_ce.backends.protocol import IMPLEMENTATIONS, Backend
from pallas_ce.parallel.partitioning import known_device

# The backend for every other device, and for every call that the choices refuse.
EVERYWHERE = "xla"

# The command that finds out whether kernels work.
_CHECK = "python -m pallas_ce.check_device"

# The warnings that this process has given.
_TOLD: set[str] = set()

# Where the code between the user's call and a warning lies.
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(jax.__file__).parent))


def load(name: str) -> Backend:
    """The backend called `name`, imported on first use."""
    return importlib.import_module(f"pallas_ce.backends.{name}").BACKEND


def select(
    implementation: str | None,
    refusal: Callable[[str], str | None],
    arrays: Any,
    *,
    checked: bool,
    slower: Callable[[str], str | None],
) -> tuple[str, str, bool | None]:
    """The implementation of a call; without a name the kernels for the GPU lowered for, where they serve the call.

    With it why that one was chosen, and whether the program is known to be lowered for that GPU; None where the
    implementation was asked for by name, or serves everything. Of kernels that nobody named, `EVERYWHERE` takes over
    what they cannot serve: shares of a call that only its partitioner knows, and other platforms.

    `refusal` and `slower` say of a name, as the end of a sentence, why that implementation cannot serve the call, and
    why it is not taken by default though it could be. The `arrays` may know their device, and are `checked` if they
    vary over the axes of a `shard_map` with `check_vma=True`.

    Raises:
        ValueError: the named implementation is unknown or cannot serve the call.
    """

    def refused(name: str) -> str | None:
        if checked and not load(name).checked_regions:
            return (
                "it cannot be traced inside a shard_map with check_vma=True; pass check_vma=False and, with mesh_axes, "
                "MeshAxes(grad='inside' or 'outside'), or call under jit alone"
            )
        return refusal(name) or packages.refusal(name)

    if implementation is None:
        return _default(lambda name: slower(name) or refused(name), arrays)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; choose from {IMPLEMENTATIONS} or None")
    by_name = "asked for by name"
    if implementation == "reference":
        return implementation, by_name, None
    with known_device(arrays) as device:
        reason = refused(implementation)
        elsewhere = device is None and targets.on_cpu(arrays) and not targets.interpreted()
        told = (by_name, _never_run(implementation, targets.cuda_kind()), slower(implementation))
    if elsewhere and for_cuda(implementation):
        reason = reason or "its kernels are for CUDA devices, and the arrays lie on a CPU; use 'xla'"
    if reason:
        raise ValueError(f"implementation={implementation!r} cannot serve this call: {reason}")
    return implementation, "; ".join(filter(None, told)), None


def _default(refusal: Callable[[str], str | None], arrays: Any) -> tuple[str, str, bool | None]:
    with known_device(arrays) as device:
        if (kind := targets.cuda_kind()) is None:
            return EVERYWHERE, "it serves every platform, and this process has no CUDA device", None
        passed_over: list[str] = []
        for name in _kernels(kind):
            if reason := refusal(name):
                passed_over.append(f"not {name}: {reason}")
                if reason == packages.refusal(name):
                    warn_once(f"implementation={name!r} is for {kind}, but {reason}; {EVERYWHERE!r} serves instead")
                continue
            if doubt := _never_run(name, kind):
                warn_once(f"implementation={name!r} is {doubt}")
            reason = f"the call is for {kind}"
            if device is None:
                reason = f"this process has {kind}; programs for other platforms take {EVERYWHERE}"
            told = "; ".join(filter(None, (reason, doubt, *passed_over)))
            return name, told, device is not None
    return EVERYWHERE, "; ".join(passed_over) or f"no kernels of this library are for {kind}", None


def for_cuda(implementation: str) -> bool:
    """Whether an implementation's kernels are for CUDA devices."""
    return any(implementation in gpus.kernels for gpus in targets.GPUS.values())


def _kernels(kind: str | None) -> dict[str, str | None]:
    """The implementations for GPUs of this model, the default first, and where each was run; see `Gpus`."""
    gpus = None if kind is None else targets.GPUS.get(targets.compute_capability(kind) or "")
    return {} if gpus is None else gpus.kernels


def _never_run(implementation: str, kind: str | None) -> str | None:
    """A warning for users of a device of this model; None where the implementation was run on one."""
    if _kernels(kind).get(implementation, "") is not None:
        return None
    capability = targets.compute_capability(str(kind))
    return f"compiled, but never run on a GPU of compute capability {capability}: `{_CHECK}` checks it there"


def warn_once(message: str) -> None:
    """Warns where this library was called, unless this process was told the same before."""
    if message not in _TOLD:
        _TOLD.add(message)
        warnings.warn(message, skip_file_prefixes=_LIBRARIES)
