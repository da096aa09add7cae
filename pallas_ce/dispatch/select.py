"""Which backend carries out a call: the one asked for, or the fastest for the device that is lowered for."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_ce.backends import device as targets
from pallas_ce.backends.protocol import IMPLEMENTATIONS, Backend

# What None chooses from: the first where it can serve the call, on the GPUs it is for.
_ON_HOPPER, _EVERYWHERE = "mosaic_gpu", "xla"


def load(name: str) -> Backend:
    """The backend called `name`, imported on first use."""
    return importlib.import_module(f"pallas_ce.backends.{name}").BACKEND


class Default(NamedTuple):
    """What holds of an implementation that nobody asked for by name; static and hashable.

    Attributes:
        instead: the implementation that takes over where the chosen one cannot serve: for shares of a call that only
            its partitioner knows, and on other platforms.
        certain: whether the program is known to be lowered for the device that was chosen for.
    """

    instead: str
    certain: bool

    def ways[Way](self, chosen: Way, instead: Way, served: bool) -> tuple[Way, ...]:
        """One way to carry out what one device does, or one for CUDA and one for every other platform."""
        if not served:
            return (instead,)
        return (chosen,) if self.certain else (chosen, instead)


class Chosen(NamedTuple):
    """An implementation and why it was chosen.

    Attributes:
        name: the implementation.
        reason: why that one.
        default: None where it was asked for by name, or serves everything.
    """

    name: str
    reason: str
    default: Default | None = None


def choose(implementation: str | None, refusal: Callable[[str], str | None], arrays: Any, *, checked: bool) -> Chosen:
    """The implementation of a call; without a name the kernels for the GPU lowered for, where they serve the call.

    Args:
        implementation: its name, or None.
        refusal: why the implementation of a name cannot serve the call, as the end of a sentence; None where it can.
        arrays: the call's, which may know their device.
        checked: whether they vary over the axes of a `shard_map` with `check_vma=True`.

    Raises:
        ValueError: the named implementation is unknown or cannot serve the call.
    """

    def refused(name: str) -> str | None:
        if checked and not load(name).capabilities.checked_regions:
            return (
                "it cannot be traced inside a shard_map with check_vma=True; pass check_vma=False and, with mesh_axes, "
                "MeshAxes(grad='inside' or 'outside'), or call under jit alone"
            )
        return refusal(name)

    if implementation is None:
        return _default(refused, arrays)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; choose from {IMPLEMENTATIONS} or None")
    with targets.known(arrays) as device:
        reason = None if implementation == "reference" else refused(implementation)
    if implementation == _ON_HOPPER and device is None and targets.on_cpu(arrays) and not targets.interpreted():
        reason = reason or "its kernels are for Hopper GPUs, and the arrays lie on a CPU; use 'xla'"
    if reason:
        raise ValueError(f"implementation={implementation!r} cannot serve this call: {reason}")
    return Chosen(implementation, "asked for by name")


def _default(refusal: Callable[[str], str | None], arrays: Any) -> Chosen:
    with targets.known(arrays) as device:
        if device is None and targets.local_cuda() is None:
            return Chosen(_EVERYWHERE, "it serves every platform, and this process has no CUDA device")
        if reason := refusal(_ON_HOPPER):
            return Chosen(_EVERYWHERE, f"{_ON_HOPPER} cannot serve this call: {reason}")
    if device is not None:
        return Chosen(_ON_HOPPER, f"the call is for {device.device_kind}", Default(_EVERYWHERE, certain=True))
    reason = f"this process has {targets.local_cuda()}; programs for other platforms take {_EVERYWHERE}"
    return Chosen(_ON_HOPPER, reason, Default(_EVERYWHERE, certain=False))
