"""Figures of merit from result files: ratios over a section, temporary memory, each target with what was reached."""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from experiments.bench.programs import CANONICAL, FORWARD, IN_FORWARD, RECOMPUTE
from experiments.bench.wins import FASTEST, Points, wins

Sections = Mapping[str, Points]


def ratios(points: Points, program: str) -> dict[str, float]:
    """The program's ratio at each point that has it."""
    return {name: p["results"][program]["ratio"] for name, p in points.items() if program in p["results"]}


def scratch_mib(point: Mapping[str, Any], program: str) -> float:
    """Temporary memory of a program without the float32 sum that its mode keeps: dW, or recompute's dH."""
    rows = {IN_FORWARD: point["v"], RECOMPUTE: point["n"]}.get(program, 0)
    return float(point["results"][program]["temporary_mib"] - rows * point["h"] * 4 / 2**20)


# What is asked of the bridge to PyTorch: the host's time by that of JAX's own call; by kind of point what is compared,
# with what, and the largest ratio; a share of a copy's rate.
HOST_RATIO = {"forward": 3.0, "forward+backward": 5.0}
RATIOS = {
    "device": ("time on the GPU", "JAX's", 1.02),
    "done": ("time until few rows are done", "that of its own loss", 1.1),
    "memory": ("memory by the driver's count", "JAX's", 1.05),
}
GIVEN_SHARE = 0.8
# The loops that `train_speed` measures, by point.
TRAINING_LOOPS = {"defaults": "train_lm", "grpo": "grpo"}


def host_ratio(point: Mapping[str, Any], call: str) -> float:
    """The bridge's host time of a call by that of the same program on JAX's arrays."""
    bridge, native = (float(point["results"][f"{caller} {call}"]["us"]) for caller in ("bridge", "native"))
    return bridge / native


class Target(NamedTuple):
    """A figure to reach.

    Attributes:
        what: in words.
        bound: the largest value that reaches it.
        value: what was measured; None where the results lack it.
        at_least: whether `bound` is the smallest instead.
    """

    what: str
    bound: float
    value: float | None
    at_least: bool = False

    def row(self, digits: str = ".4g") -> list[str]:
        """Figure, target, measured and whether it is reached, in words."""
        asked = f"{'≥' if self.at_least else '≤'} {self.bound:g}"
        if self.value is None:
            return [self.what, asked, "not measured", ""]
        reached = self.value >= self.bound if self.at_least else self.value <= self.bound
        return [self.what, asked, f"{self.value:{digits}}", "yes" if reached else "no"]


def targets(sections: Sections) -> list[Target]:
    """Every figure that is asked for."""
    grid, heads, compiled, torch, training = (
        sections.get(name, {}) for name in ("grid", "heads", "compile", "torch_gpu", "train_speed")
    )
    forward, in_forward, recompute = (ratios(grid, name).values() for name in (FORWARD, IN_FORWARD, RECOMPUTE))
    wide = ratios({name: point for name, point in heads.items() if point["h"] >= 2048}, IN_FORWARD).values()
    compilations = [r for p in compiled.values() for name, r in p["results"].items() if CANONICAL not in name]
    tuned, untuned = ([r[f"{kind}_seconds"] for r in compilations] for kind in ("compile", "untuned"))

    def mean(numbers: Collection[float]) -> float | None:
        return statistics.geometric_mean(numbers) if numbers else None

    def worst(numbers: Iterable[float]) -> float | None:
        return max(numbers, default=None)

    def memory(program: str, least: float = 0, most: float = math.inf) -> float | None:
        """At vocabularies between these."""
        points = [point for point in grid.values() if program in point["results"] and least <= point["v"] <= most]
        return worst(scratch_mib(point, program) for point in points)

    def at(section: str, program: str, number: str) -> float | None:
        """A number of the program at the section's one point."""
        results = [point["results"] for point in sections.get(section, {}).values()]
        return next((float(found[program][number]) for found in results if program in found), None)

    def quotient(program: str, base: str) -> float | None:
        """The program's time with options by that of `base`."""
        above, below = (at("options", name, "ms") for name in (program, base))
        return None if above is None or below is None else above / below

    def of_torch(kind: str) -> list[Mapping[str, Any]]:
        return [point for name, point in torch.items() if name.split()[0] == kind]

    return [
        Target("forward / bare product, geometric mean over the grid", 1.02, mean(forward)),
        Target("forward / bare product, worst point", 1.05, worst(forward)),
        Target("in_forward / three products, geometric mean", 1.02, mean(in_forward)),
        Target("in_forward / three products, worst point", 1.06, worst(in_forward)),
        Target("in_forward / three products, worst published head of H ≥ 2048", 1.08, worst(wide)),
        Target("recompute / three products, geometric mean", 1.38, mean(recompute)),
        Target("recompute / three products, worst point", 1.45, worst(recompute)),
        Target("forward, temporary MiB, worst point", 16, memory(FORWARD)),
        Target("in_forward, MiB beside dW, V ≤ 131072", 512, memory(IN_FORWARD, most=131072)),
        Target("in_forward, MiB beside dW, V = 262144", 1024, memory(IN_FORWARD, least=262144)),
        Target("recompute, MiB beside dH, worst point", 192, memory(RECOMPUTE)),
        Target("in_forward, half the scratch / default", 1.10, quotient("in_forward half scratch", IN_FORWARD)),
        Target("in_forward, a quarter of the rows / all", 0.35, quotient("in_forward quarter", IN_FORWARD)),
        Target("recompute, a quarter of the rows / all", 0.35, quotient("recompute quarter", RECOMPUTE)),
        Target("in_forward, frozen weight / full", 0.72, quotient("in_forward frozen weight", IN_FORWARD)),
        Target(
            "forward, entropy too / log-probability alone",
            1.05,
            quotient("forward log_prob and entropy", "forward log_prob"),
        ),
        Target("seconds to compile a call, worst", 4.0, worst(tuned)),
        Target("the same, without XLA's autotuning of its own products", 4.0, worst(untuned)),
        Target("log-probability and entropy, forward / bare product", 1.03, at("log_probs", FORWARD, "ratio")),
        Target("log-probability and entropy, with gradients / three products", 1.40, at("log_probs", "both", "ratio")),
        Target("the same, MiB beside dH", 192, at("log_probs", "both", "beside_accumulator_mib")),
        Target("64 largest logits / bare product", 1.25, at("top_k", FORWARD, "ratio")),
        Target(
            "loss and gradient of donated logits, share of a copy's rate",
            0.80,
            at("given", "donated mosaic_gpu", "share"),
            at_least=True,
        ),
        Target("the same of logits that are kept", 0.80, at("given", "kept mosaic_gpu", "share"), at_least=True),
        *(
            Target(
                f"PyTorch, the host's time of {call} / JAX's, worst",
                bound,
                worst(host_ratio(p, call) for p in of_torch("host")),
            )
            for call, bound in HOST_RATIO.items()
        ),
        *(
            Target(f"PyTorch, {what} / {other}, worst", bound, worst(p["ratio"] for p in of_torch(kind)))
            for kind, (what, other, bound) in RATIOS.items()
        ),
        Target(
            "PyTorch, loss and gradient in the logits' memory, share of a copy's rate, worst",
            GIVEN_SHARE,
            min((p["results"]["in place"]["share"] for p in of_torch("given")), default=None),
            at_least=True,
        ),
        *(
            Target(
                f"{loop}, its rate / its compiled step's, worst head",
                0.97,
                min(
                    (found["ratio"] for found in training.get(point, {"results": {}})["results"].values()), default=None
                ),
                at_least=True,
            )
            for point, loop in TRAINING_LOOPS.items()
        ),
        Target(
            "train_lm, its rate with the fused head / with stored logits",
            1.0,
            training.get("defaults", {}).get("fused_to_canonical"),
            at_least=True,
        ),
        *_of_starts(training.get("defaults", {"results": {}})["results"]),
        *_beside_peers(sections),
        *_of_implementations(sections),
        *_of_models(sections.get("huggingface_table", {})),
    ]


# Seconds that the fused head may add to what a first start compiles, and those of the backend in a second start.
_MORE_TO_COMPILE, _IN_BACKEND = 3.0, 2.0


def _of_starts(heads: Mapping[str, Any]) -> list[Target]:
    """What is asked of `train_lm`'s starts."""
    starts = {head: found["start"] for head, found in heads.items() if "start" in found}
    first = {head: float(start["before"]["compile_seconds"]) for head, start in starts.items()}
    more = first["fused"] - first["canonical"] if first else None
    kept = max((start["after"]["backend_seconds"] for start in starts.values()), default=None)
    return [
        Target("train_lm, seconds to compile with the fused head beyond stored logits", _MORE_TO_COMPILE, more),
        Target("train_lm, seconds in the compiler at a second start, worst head", _IN_BACKEND, kept),
    ]


def _beside_peers(sections: Sections) -> list[Target]:
    peers = [points for name, points in sections.items() if name.startswith("peers")]
    found = []
    for section in ("grid", "heads") if peers else ():
        for program, share in FASTEST.items():
            won, counted = wins(program, sections.get(section, {}), *peers)
            what = f"{program}, the fastest of all, share of {counted} points ({section})"
            found.append(Target(what, share, won / counted if counted else None, at_least=True))
    return found


# What is asked of Triton over the grid, by tensor descriptors and by pointers, in geometric mean.
_BY_TRITON = {
    "triton": ("Triton", {FORWARD: 1.05, IN_FORWARD: 1.05, RECOMPUTE: 1.45}),
    "pointers": ("Triton with pointers", {FORWARD: 1.25, IN_FORWARD: 1.12, RECOMPUTE: 1.60}),
}
# Of XLA, in geometric mean over the compared shapes; in float32, of what serves each precision by default.
_BY_XLA = {IN_FORWARD: 1.6, RECOMPUTE: 1.7}
_IN_FLOAT32 = {"tensorfloat32": ("triton", 1.20), "float32": ("xla", 1.15)}
# Of calls with more for each row, by the plain call's time; of a low-rank term, by that with the frozen weight alone,
# and MiB above it; of four microbatches, by that of one batch.
_OF_PLAIN = 1.05
_OF_FROZEN, _MIB_OF_TERM = 1.08, 64
_OF_ONE_BATCH = 1.04


def _of_implementations(sections: Sections) -> list[Target]:
    """What is asked of them beside each other."""

    def mean(section: str, program: str) -> float | None:
        found = ratios(sections.get(section, {}), program).values()
        return statistics.geometric_mean(found) if found else None

    found = []
    for section, (name, bounds) in _BY_TRITON.items():
        points = len(sections.get(section, {}))
        found += [
            Target(f"{name}, {program}, geometric mean of {points} points", bound, mean(section, program))
            for program, bound in bounds.items()
        ]
    compared = len(sections.get("implementations", {}))
    found += [
        Target(f"XLA, {mode}, geometric mean of {compared} shapes", bound, mean("implementations", f"{mode} xla"))
        for mode, bound in _BY_XLA.items()
    ]
    for precision, (implementation, bound) in _IN_FLOAT32.items():
        point = sections.get("float32", {}).get(precision, {"results": {}})
        value = point["results"].get(f"{IN_FORWARD} {implementation}", {}).get("ratio")
        found.append(Target(f"{precision} by {implementation}, in_forward / three products", bound, value))
    results = sections.get("targets", {}).get("targets", {"results": {}})["results"]
    for mode in (FORWARD, RECOMPUTE):
        plain = results.get(f"{mode} plain", {}).get("ms")
        for kind in ("K 2", "K 8", "temperatures"):
            value = results.get(f"{mode} {kind}", {}).get("ms")
            value = None if plain is None or value is None else value / plain
            found.append(Target(f"{kind}, {mode} / the plain call", _OF_PLAIN, value))
    for mode in (IN_FORWARD, RECOMPUTE):
        term = "low_rank", f"{mode} low rank mosaic_gpu", f"{mode} frozen"
        parts = _beside(sections, "microbatches", f"{mode} microbatches", mode)
        of_term = _beside(sections, *term, "temporary_mib")
        found += [
            Target(f"low-rank term, {mode} / frozen weight alone", _OF_FROZEN, _beside(sections, *term)),
            Target(f"low-rank term, {mode}, MiB above the frozen weight alone", _MIB_OF_TERM, of_term),
            Target(f"four microbatches added in place, {mode} / one batch", _OF_ONE_BATCH, parts),
        ]
    return found


# Of a Hugging Face model with our loss: a step's time by that with transformers' own loss (at the smallest size the
# host decides) and with Liger's; the driver's count, without what JAX takes of any GPU, by Liger's; seconds of the
# first step before and after programs are kept.
_OF_OWN_LOSS, _OF_OWN_LOSS_SMALLEST, _OF_LIGER = 1.0, 1.05, 1.0
_OF_LIGERS_MEMORY = 1.05
_FIRST_STEP = {"before": 6.0, "after": 3.0}


def _of_models(points: Points) -> list[Target]:
    """What is asked of training steps of Hugging Face models; nothing where none was measured."""
    models = {name: point for name, point in points.items() if "results" in point}
    if not models:
        return []
    idle = next((float(point["mib"]) for point in points.values() if "mib" in point), None)
    smallest = min(models, key=lambda name: models[name]["tokens"])
    found = []
    for name, point in models.items():
        results, ours = point["results"], point["results"]["fused"]
        plain, liger = (results.get(other) for other in ("plain", "liger"))
        bound = _OF_OWN_LOSS_SMALLEST if name == smallest else _OF_OWN_LOSS
        of_liger = None if liger is None or idle is None else (ours["driver_mib"] - idle) / liger["driver_mib"]
        found += [
            Target(f"{name}: step / with the model's own loss", bound, plain and ours["ms"] / plain["ms"]),
            Target(f"{name}: step / with Liger", _OF_LIGER, liger and ours["ms"] / liger["ms"]),
            Target(f"{name}: driver's MiB, without JAX's idle ones / with Liger", _OF_LIGERS_MEMORY, of_liger),
        ]
    for when, bound in _FIRST_STEP.items():
        worst = max(point["results"]["fused"]["first_step_seconds"][when] for point in models.values())
        found.append(Target(f"a model's first step, seconds {when} its programs are kept, worst", bound, worst))
    return found


def _beside(sections: Sections, section: str, program: str, other: str, number: str = "ms") -> float | None:
    """The program's time by the other's, or its memory less the other's, at the section's point; None without it."""
    for point in sections.get(section, {}).values():
        one, two = (float(point["results"][name][number]) for name in (program, other))
        return one / two if number == "ms" else one - two
    return None
