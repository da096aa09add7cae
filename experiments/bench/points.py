"""What is measured, section by section: each point is one shape with the programs that are timed in turn at it."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.programs import Program, both, canonical, checked, ignoring, ours, statistics_of
from pallas_ce import explain
from pallas_ce.backends.mosaic_gpu.kernels import forward_kernel
from pallas_ce.backends.mosaic_gpu.schedule import config
from pallas_ce.backends.mosaic_gpu.tuning import tuning
from pallas_ce.head import Head, HeadSpec
from pallas_ce.statistics.row import finalise

GRID = [(n, v, 4096) for n, v in itertools.product((1024, 4096, 8192, 16384, 32768), (32768, 65536, 131072, 262144))]
HEADS = {
    "Llama-3 8B": (8192, 128256, 4096),
    "Qwen3 1.7B": (8192, 151936, 2048),
    "Qwen3 8B": (8192, 151936, 4096),
    "Gemma-3 4B": (8192, 262144, 2560),
    "gpt-oss": (8192, 201088, 2880),
    "DeepSeek-V3": (8192, 129280, 7168),
    "GPT-2": (8192, 50257, 768),
}
OPTIONS_SHAPE = (16384, 131072, 4096)
_MASKED_SHAPES = [(8192, 131072, 4096), (8192, 151936, 2048), (16384, 32768, 4096)]
_SHARES = (0.0, 0.001, 0.05, 0.3)
_WINDOWS_SHAPE = (1024, 262144, 4096)
WINDOWS = (1, 2, 4, 8, 11, 16, 22, 33, 44, 66, 99, 132)

_NAMES = frozenset({"lse"})


class Point(NamedTuple):
    """One measurement.

    Attributes:
        name: its key in the result file.
        shape: N, V, H.
        programs: by name; those whose name begins with "forward" are compared with one product, others with three.
        facts: what else its record holds.
    """

    name: str
    shape: tuple[int, int, int]
    programs: Callable[[], dict[str, Program]]
    facts: Callable[[], dict[str, Any]] = dict


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run differs from the published one.

    Attributes:
        implementation: of ours.
        divisor: of every size; above 1 it only shows that the commands work.
    """

    implementation: str = "mosaic_gpu"
    divisor: int = 1

    def shape(self, full: tuple[int, int, int]) -> tuple[int, int, int]:
        """The sizes measured in place of these."""
        n, v, h = (max(16, size // self.divisor) for size in full)
        return n, v, h


def standard(setting: Setting) -> dict[str, Program]:
    """What grid and heads compare."""
    name = setting.implementation
    return {
        "forward": ours(name),
        "forward canonical": canonical,
        "in_forward": both(ours(name, backward="in_forward")),
        "recompute": both(ours(name, backward="recompute")),
        "canonical": both(canonical),
    }


def variants(setting: Setting) -> dict[str, Program]:
    """Ignored rows, a frozen weight, half the scratch and less, entropy as well as log-probability."""
    name = setting.implementation
    n, v, h = setting.shape(OPTIONS_SHAPE)
    arrays = jax.ShapeDtypeStruct((n, h), jnp.bfloat16), jax.ShapeDtypeStruct((v, h), jnp.bfloat16)
    budget = explain(*arrays, implementation=checked(name), backward="in_forward").scratch_bytes
    in_forward = ours(name, backward="in_forward")
    recompute = ours(name, backward="recompute")
    return {
        "in_forward": both(in_forward),
        "in_forward quarter": both(ignoring(in_forward, 0.75)),
        "in_forward frozen weight": jax.value_and_grad(in_forward),
        "in_forward half scratch": both(ours(name, backward="in_forward", scratch_bytes=budget // 2)),
        "in_forward eighth scratch": both(ours(name, backward="in_forward", scratch_bytes=budget // 8)),
        "recompute": both(recompute),
        "recompute quarter": both(ignoring(recompute, 0.75)),
        "forward log_prob": statistics_of(name, "log_prob"),
        "forward log_prob and entropy": statistics_of(name, "log_prob", "entropy"),
    }


def masked(setting: Setting) -> dict[str, Program]:
    """Every pass with shares of the rows ignored, from none to a third."""
    name = setting.implementation
    losses = {
        "forward": ours(name),
        "in_forward": both(ours(name, backward="in_forward")),
        "recompute": both(ours(name, backward="recompute")),
    }
    return {f"{k} {share:.1%}": ignoring(loss, share) for k, loss in losses.items() for share in _SHARES}


def windowed(windows: int | None) -> Program:
    """The forward kernel with so many windows of the vocabulary; None: as many as it chooses."""

    def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        v, h = weight.shape
        spec = HeadSpec(h, v, v, 0, np.dtype(hidden.dtype), None)
        chosen = tuning.tiles_for("forward", spec, hidden.shape[0], v, len(_NAMES), 0).config
        given = dataclasses.replace(chosen, windows=windows)
        head = Head(weight, None, None, None, spec)
        return finalise(forward_kernel.statistics(head, hidden, _NAMES, given), _NAMES)["lse"]

    return run


def chosen_windows(setting: Setting) -> dict[str, int]:
    """How many windows the forward chooses, which are in the sweep, too."""
    n, v, h = setting.shape(_WINDOWS_SHAPE)
    arrays = jax.ShapeDtypeStruct((n, h), jnp.bfloat16), jax.ShapeDtypeStruct((v, h), jnp.bfloat16)
    (launch,) = explain(*arrays, implementation=checked(setting.implementation), differentiate=()).launches
    return {"chosen_windows": launch.windows}


def window_sweep(setting: Setting) -> dict[str, Program]:
    """The forward with given numbers of windows, and with the chosen one."""
    if checked(setting.implementation) != "mosaic_gpu":
        return {}
    most = -(-setting.shape(_WINDOWS_SHAPE)[1] // config.Config().columns)
    swept = {f"forward {w} windows": windowed(w) for w in WINDOWS if w <= most}
    return {"forward": windowed(None)} | swept


def sections(setting: Setting) -> dict[str, list[Point]]:
    """All points by section; a section that the implementation cannot serve is empty."""
    sweep = Point(
        "windows", setting.shape(_WINDOWS_SHAPE), lambda: window_sweep(setting), lambda: chosen_windows(setting)
    )
    return {
        "grid": [Point(f"{n}x{v}", setting.shape((n, v, h)), lambda: standard(setting)) for n, v, h in GRID],
        "heads": [Point(model, setting.shape(shape), lambda: standard(setting)) for model, shape in HEADS.items()],
        "options": [Point("options", setting.shape(OPTIONS_SHAPE), lambda: variants(setting))],
        "windows": [sweep] if window_sweep(setting) else [],
        "masked": [
            Point(f"{n}x{v}x{h}", setting.shape((n, v, h)), lambda: masked(setting)) for n, v, h in _MASKED_SHAPES
        ],
    }
