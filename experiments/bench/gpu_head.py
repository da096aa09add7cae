"""Time and memory of the head on a GPU beside bare matrix products: `python -m experiments.bench gpu_head`.

Sections, each a result file:

    compile  seconds to compile one call, at about N 8192, V 131072
    grid     the paper's grid, N × V at H 4096: forward and forward+backward of stored logits and of ours
    heads    heads of published models, N 8192
    options  ignored rows, frozen weight, entropy, half the scratch, at N 16384, V 131072
    masked   none, 0.1, 5 and 30 % of the rows ignored
    implementations  every pass by the kernels of both kinds in turn, over the grid; by XLA too at a few points
    pointers Triton at those points with the tiles of Ampere, which load by pointers
    ampere   the same with Ampere's instructions, which newer GPUs run, too
    targets  K labels a row, and row temperatures, by default
    float32  TF32 and full float32, beside products of that precision
    low_rank a frozen weight with a low-rank term that is trained
    microbatches  four parts of a batch, their gradients added in place

Everything is timed on the device, in one process, in turn, and reported as a ratio: forwards to the bare product
`hidden·weightᵀ`, forward+backward to that and the two gradient products ("three products").
"""

import functools
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.bench import timing
from experiments.bench.programs import Program, Shape, both, canonical, ignoring, ours
from experiments.bench.sections import Case, Serve
from pallas_ce import LowRank, explain, linear_cross_entropy, linear_cross_entropy_and_gradients, linear_row_statistics
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.backends.triton import binding, configs
from pallas_ce.statistics.logits import present

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
_COMPARED = [(n, v, 4096) for n, v in ((1024, 131072), (4096, 32768), (8192, 131072), (16384, 65536))]
_COMPARED.append(HEADS["Qwen3 1.7B"])
_SHARES = (0.0, 0.001, 0.05, 0.3)

_ALL: tuple[Implementation, ...] = ("mosaic_gpu", "triton", "xla")
_MODES: tuple[Backward, ...] = ("in_forward", "recompute")
_KINDS: dict[str, Any] = {"forward": lambda loss: loss, "recompute": both}
_RANK = 16  # of a low-rank term
_PARTS = 4  # of a batch


def modes(implementation: Implementation | None) -> dict[str, Program]:
    """Our forward, and forward and backward in both modes."""
    return {"forward": ours(implementation)} | {mode: both(ours(implementation, backward=mode)) for mode in _MODES}


def passes(serve: Serve, _: Shape, name: Implementation | None = None) -> dict[str, Program]:
    """Every pass by one implementation, or by default."""
    return modes(serve(name))


def standard(serve: Serve, _: Shape, name: Implementation | None = "mosaic_gpu") -> dict[str, Program]:
    """What the grid compares."""
    return modes(serve(name)) | {"forward canonical": canonical, "canonical": both(canonical)}


def variants(serve: Serve, shape: Shape) -> dict[str, Program]:
    """Ignored rows, a frozen weight, half the scratch and less, entropy as well as log-probability."""
    n, v, h = shape
    implementation = serve("mosaic_gpu")
    arrays = jax.ShapeDtypeStruct((n, h), jnp.bfloat16), jax.ShapeDtypeStruct((v, h), jnp.bfloat16)
    budget = explain(*arrays, implementation=implementation, backward="in_forward").scratch_bytes
    in_forward = ours(implementation, backward="in_forward")
    recompute = ours(implementation, backward="recompute")

    def statistics(*names: str) -> Program:
        return lambda hidden, weight, labels: linear_row_statistics(
            hidden, weight, labels, statistics=names, implementation=implementation
        )

    return {
        "in_forward": both(in_forward),
        "in_forward quarter": both(ignoring(in_forward, 0.75)),
        "in_forward frozen weight": jax.value_and_grad(in_forward),
        "in_forward half scratch": both(ours(implementation, backward="in_forward", scratch_bytes=budget // 2)),
        "in_forward eighth scratch": both(ours(implementation, backward="in_forward", scratch_bytes=budget // 8)),
        "recompute": both(recompute),
        "recompute quarter": both(ignoring(recompute, 0.75)),
        "forward log_prob": statistics("log_prob"),
        "forward log_prob and entropy": statistics("log_prob", "entropy"),
    }


def masked(serve: Serve, _: Shape) -> dict[str, Program]:
    """Every pass with shares of the rows ignored, from none to a third."""
    return {
        f"{name} {share:.1%}": ignoring(loss, share)
        for name, loss in modes(serve("mosaic_gpu")).items()
        for share in _SHARES
    }


def by_each(names: tuple[Implementation, ...], serve: Serve, _: Shape) -> dict[str, Program]:
    """Every pass by every implementation."""
    return {f"{mode} {name}": program for name in names for mode, program in modes(serve(name)).items()}


def targets_and_temperatures(serve: Serve, _: Shape) -> dict[str, Program]:
    """The loss of all rows' log-probabilities by default, of one label and of K a row, and under row temperatures."""

    def loss(targets: int, *, tempered: bool = False) -> Program:
        def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
            several = (labels[:, None] + 997 * jnp.arange(targets)) % weight.shape[0]
            labels = labels if targets == 1 else several
            temperature = 0.5 + labels.reshape(len(hidden), -1)[:, 0] / weight.shape[0] if tempered else 1.0
            found = linear_row_statistics(
                hidden, weight, labels, temperature=temperature, statistics=("log_prob",), implementation=serve(None)
            )
            return -jnp.mean(present(found.log_prob))

        return run

    cases = {"plain": loss(1), "K 2": loss(2), "K 8": loss(8), "temperatures": loss(1, tempered=True)}
    return {f"{kind} {name}": make(run) for name, run in cases.items() for kind, make in _KINDS.items()}


def low_rank(serve: Serve, _: Shape) -> dict[str, Program]:
    """A frozen weight by default, and with the low-rank term that is trained by all that serve it."""

    def of_term(mode: Backward, name: Implementation | None) -> Program:
        def loss(hidden: jax.Array, up: jax.Array, down: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
            return linear_cross_entropy(hidden, LowRank(weight, up, down), labels, implementation=name, backward=mode)

        def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
            up, down = weight[:, :_RANK], hidden[:_RANK] / 16
            return jax.value_and_grad(loss, argnums=(0, 1, 2))(hidden, up, down, weight, labels)

        return run

    found: dict[str, Program] = {}
    for mode in _MODES:
        found[f"{mode} frozen"] = jax.value_and_grad(ours(serve(None), backward=mode))
        found |= {f"{mode} low rank {name}": of_term(mode, serve(name)) for name in _ALL}
    return found


def microbatches(serve: Serve, _: Shape) -> dict[str, Program]:
    """One batch, and four parts of it whose gradients are added where the weight's sum lies."""

    def parts(mode: Backward) -> Program:
        def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
            def step(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
                found = linear_cross_entropy_and_gradients(
                    part[0], weight, part[1], total, loss_scale=1 / _PARTS, implementation=serve(None), backward=mode
                )
                return found.weight_sum, (found.loss, found.hidden)

            cut = (hidden.reshape(_PARTS, -1, hidden.shape[1]), labels.reshape(_PARTS, -1))
            return jax.lax.scan(step, jnp.zeros(weight.shape, jnp.float32), cut)

        return run

    found: dict[str, Program] = {}
    for mode in _MODES:
        found[mode] = both(ours(serve(None), backward=mode))
        found[f"{mode} microbatches"] = parts(mode)
    return found


def _measure_float32(
    precision: str, shape: Shape, programs: dict[str, Program], rounds: timing.Rounds
) -> dict[str, Any]:
    """Of float32 operands, multiplied everywhere with that precision."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", precision)
    try:
        return timing.measure(shape, programs, rounds, jnp.float32)
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def _measure_patched(
    module: Any, values: dict[str, Any], shape: Shape, programs: dict[str, Program], rounds: timing.Rounds
) -> dict[str, Any]:
    """With other values of a module's attributes while programs are traced."""
    jax.clear_caches()
    with mock.patch.multiple(module, **values):
        found = timing.measure(shape, programs, rounds)
    jax.clear_caches()
    return found


# Ampere's tiles, which load by pointers, with the instructions of the GPU that is there, and with Ampere's own.
_AMPERE_TILES = {"NARROW": dict.fromkeys(configs.NARROW, configs.NARROW[80]), "PRODUCTS": {}}
_by_pointers = functools.partial(_measure_patched, configs, _AMPERE_TILES)
_as_on_ampere = functools.partial(_measure_patched, binding, {"capability": lambda: 80})
_by_triton = functools.partial(passes, name="triton")

SECTIONS = {
    "compile": [Case("compile", (8192, 131072, 4096), standard, lambda *given: timing.compile_seconds(*given))],
    "grid": [Case(f"{n}x{v}", (n, v, h), standard) for n, v, h in GRID],
    # By default: the Hopper kernels cannot read every head.
    "heads": [Case(model, shape, functools.partial(standard, name=None)) for model, shape in HEADS.items()],
    "options": [Case("options", OPTIONS_SHAPE, variants)],
    "masked": [Case(f"{n}x{v}x{h}", (n, v, h), masked) for n, v, h in _MASKED_SHAPES],
    "implementations": [
        Case("{}x{}x{}".format(*shape), shape, functools.partial(by_each, _ALL if shape in _COMPARED else _ALL[:2]))
        for shape in dict.fromkeys((*_COMPARED, *GRID))
    ],
    "pointers": [Case(f"{n}x{v}x{h}", (n, v, h), _by_triton, _by_pointers) for n, v, h in _COMPARED],
    "ampere": [Case(f"{n}x{v}x{h}", (n, v, h), _by_triton, _as_on_ampere) for n, v, h in _COMPARED],
    "targets": [Case("targets", (8192, 131072, 4096), targets_and_temperatures)],
    "float32": [
        Case(name, (4096, 65536, 2048), functools.partial(by_each, _ALL[1:]), functools.partial(_measure_float32, name))
        for name in ("tensorfloat32", "float32")
    ],
    "low_rank": [Case("low_rank", (8192, 131072, 4096), low_rank)],
    "microbatches": [Case("microbatches", (16384, 131072, 4096), microbatches)],
}
