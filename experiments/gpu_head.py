"""Time and memory of the head on a GPU beside bare matrix products: `python -m experiments.gpu_head`.

Sections, each a JSON file under `experiments/results/` with the machine and versions:

    grid     the paper's grid, N × V at H 4096: forward and forward+backward of stored logits and of ours
    heads    heads of published models, N 8192
    options  ignored rows, frozen weight, entropy, half the scratch, at N 16384, V 131072

Everything is timed on the device, in one process, in turn, and reported as a ratio: forwards to the bare product
`hidden·weightᵀ`, forward+backward to that and the two gradient products ("three products").
"""

import argparse
import concurrent.futures
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from experiments.machine import describe
from pallas_ce import linear_cross_entropy, linear_row_statistics
from pallas_ce.backends import Backward

RESULTS = Path(__file__).parent / "results"
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
Program = Callable[..., Any]


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.bfloat16)


def bare(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The logits' product alone, written as bfloat16."""
    del labels
    return _dot(hidden, weight, (1, 1))


def for_hidden(hidden: jax.Array, weight: jax.Array, logits: jax.Array) -> jax.Array:
    """The product of hidden's gradient, from any `[N, V]` in place of dlogits."""
    del hidden
    return _dot(logits, weight, (1, 0))


def for_weight(hidden: jax.Array, weight: jax.Array, logits: jax.Array) -> jax.Array:
    """The product of the weight's gradient."""
    del weight
    return _dot(logits, hidden, (0, 0))


def canonical(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy of stored bfloat16 logits, the fastest of the plain ways."""
    logits = bare(hidden, weight, labels)
    target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0].astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=1) - target)


def ours(**options: Any) -> Program:
    """Our loss by the Hopper kernels, with these options."""
    return lambda hidden, weight, labels: linear_cross_entropy(
        hidden, weight, labels, **{"implementation": "mosaic_gpu"} | options
    )


def both(loss: Program) -> Program:
    """Loss and both gradients."""
    return jax.value_and_grad(loss, argnums=(0, 1))


def compiled(programs: dict[str, Program], arguments: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Compiles all programs at once, on as many threads as the machine has."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {
            n: pool.submit(lambda p, a: jax.jit(p).lower(*a).compile(), p, arguments[n]) for n, p in programs.items()
        }
        return {name: job.result() for name, job in jobs.items()}


def timed(programs: dict[str, Any], arguments: dict[str, tuple[Any, ...]], rounds: int) -> dict[str, dict[str, float]]:
    """Median device milliseconds of each program, in turn, and its temporary MiB."""
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            _, milliseconds = profiler.measure(program, iterations=2)(*arguments[name])
            samples[name] += milliseconds or []
    return {
        name: {
            "ms": statistics.median(samples[name]),
            "temporary_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
        }
        for name, program in programs.items()
    }


def inputs(n: int, v: int, h: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normal hidden states and weight, for logits of standard deviation 1, and random labels."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (n, h), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (v, h), jnp.float32) / h**0.5).astype(jnp.bfloat16)
    return hidden, weight, jax.random.randint(keys[2], (n,), 0, v)


def measure(shape: tuple[int, int, int], extra: dict[str, Program], rounds: int) -> dict[str, Any]:
    """The bare products and `extra` programs of one shape, with ratios: "forward…" to one product, others to three."""
    n, v, h = shape
    data = inputs(n, v, h)
    logits = jax.random.normal(jax.random.key(3), (n, v), jnp.bfloat16)
    base: dict[str, Program] = {"bare": bare, "for_hidden": for_hidden, "for_weight": for_weight}
    programs = base | extra
    arguments = {name: (*data[:2], logits) if name in ("for_hidden", "for_weight") else data for name in programs}
    found: dict[str, Any] = timed(compiled(programs, arguments), arguments, rounds)
    three = sum(found[name]["ms"] for name in base)
    for name in extra:
        floor = found["bare"]["ms"] if name.startswith("forward") else three
        found[name]["ratio"] = found[name]["ms"] / floor
    found["three"] = {"ms": three}
    return {"n": n, "v": v, "h": h, "results": found}


def standard() -> dict[str, Program]:
    """What grid and heads compare."""
    return {
        "forward": ours(),
        "forward canonical": canonical,
        "in_forward": both(ours(backward="in_forward")),
        "recompute": both(ours(backward="recompute")),
        "canonical": both(canonical),
    }


def option_programs(n: int) -> dict[str, Program]:
    """Variants at one shape; `quarter` has three rows in four ignored at random."""
    ignored = jax.random.bernoulli(jax.random.key(5), 0.75, (n,))

    def quarter(backward: Backward) -> Program:
        loss = ours(backward=backward)
        return lambda hidden, weight, labels: loss(hidden, weight, jnp.where(ignored, -100, labels))

    def statistics_of(*names: str) -> Program:
        return lambda hidden, weight, labels: linear_row_statistics(
            hidden, weight, labels, statistics=names, implementation="mosaic_gpu"
        )

    return {
        "in_forward": both(ours(backward="in_forward")),
        "in_forward quarter": both(quarter("in_forward")),
        "in_forward frozen weight": jax.value_and_grad(ours(backward="in_forward")),
        "in_forward half scratch": both(ours(backward="in_forward", scratch_bytes=256 * 2**20)),
        "in_forward eighth scratch": both(ours(backward="in_forward", scratch_bytes=64 * 2**20)),
        "recompute": both(ours(backward="recompute")),
        "recompute quarter": both(quarter("recompute")),
        "forward log_prob": statistics_of("log_prob"),
        "forward log_prob and entropy": statistics_of("log_prob", "entropy"),
    }


def sections() -> dict[str, Callable[[int], Iterable[dict[str, Any]]]]:
    """Each section's records, made one by one."""
    return {
        "grid": lambda rounds: (measure(shape, standard(), rounds) for shape in GRID),
        "heads": lambda rounds: ({"model": m} | measure(shape, standard(), rounds) for m, shape in HEADS.items()),
        "options": lambda rounds: iter([measure((16384, 131072, 4096), option_programs(16384), rounds)]),
    }


def main() -> None:
    """Measures, prints and writes each section as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(sections()), choices=[*sections(), []], metavar="SECTION")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    start = time.monotonic()
    for section in options.sections:
        records = []
        for record in sections()[section](options.rounds):
            records.append(record)
            shown = {k: round(r["ratio"], 3) for k, r in record["results"].items() if "ratio" in r}
            title = record.get("model", "")
            print(f"[{time.monotonic() - start:5.0f}s] {section} {title} N {record['n']} V {record['v']}: {shown}")
            document = {"command": f"python -m experiments.gpu_head {section}", **describe(), "records": records}
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"gpu_head_{section}.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
