"""Which GPU is lowered for: read from the compile-only target if there is one, else from the process's GPUs."""

import functools

import jax

_HOPPER = (9, 0)
_HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")


def is_hopper() -> bool:
    """Whether CUDA programs traced now run on compute capability 9.0. Other platforms may be lowered for beside it."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.platform == "cuda" and any(name in abstract.device_kind for name in _HOPPER_NAMES)
    return _local_capability() == _HOPPER


@functools.cache
def _local_capability() -> tuple[int, ...] | None:
    """Compute capability of this process's CUDA devices, None where it has none."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    return tuple(int(part) for part in devices[0].compute_capability.split("."))
