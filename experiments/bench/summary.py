"""Figures of merit from result files: ratios over a section, temporary memory, each target with what was reached."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Points = Mapping[str, Mapping[str, Any]]
Sections = Mapping[str, Points]

FORWARD = "forward"
IN_FORWARD = "in_forward"
RECOMPUTE = "recompute"
CANONICAL = "canonical"
_FLOORS = ("bare", "for_hidden", "for_weight")


def geometric_mean(numbers: list[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def ratios(points: Points, program: str) -> dict[str, float]:
    """The program's ratio at each point that has it."""
    return {name: p["results"][program]["ratio"] for name, p in points.items() if program in p["results"]}


def scratch_mib(point: Mapping[str, Any], program: str) -> float:
    """Temporary memory of a program without the float32 sum that its mode keeps: dW, or recompute's dH."""
    temporary = float(point["results"][program]["temporary_mib"])
    if program.startswith(IN_FORWARD):
        return temporary - point["v"] * point["h"] * 4 / 2**20
    return temporary - point["n"] * point["h"] * 4 / 2**20 if program.startswith(RECOMPUTE) else temporary


def wins(grid: Points, *peers: Points) -> tuple[int, int]:
    """At how many points in_forward is faster than every other program, and at how many all were measured.

    Peers of other processes are compared through their ratios to the bare products of their process. Those that cannot
    run at a point are left out there.
    """
    won = counted = 0
    for name, point in grid.items():
        if IN_FORWARD not in point["results"] or not all(name in points for points in peers):
            continue
        others = [point["results"][CANONICAL]["ratio"]] if CANONICAL in point["results"] else []
        for points in peers:
            for other, result in points[name]["results"].items():
                if "ratio" in result and not other.startswith(FORWARD):
                    others.append(result["ratio"])
        counted += 1
        won += all(point["results"][IN_FORWARD]["ratio"] < other for other in others)
    return won, counted


# What is asked of the bridge to PyTorch: microseconds beyond JAX's own call, ratios to it, a share of a copy's rate.
HOST_US = {"forward": 150, "forward+backward": 300}
DEVICE_RATIO, MEMORY_RATIO, GIVEN_SHARE = 1.02, 1.05, 0.8


class Target(NamedTuple):
    """A figure to reach.

    Attributes:
        what: in words.
        bound: the largest value that reaches it.
        found: the value in the results; None where they lack it.
        at_least: whether `bound` is the smallest instead.
    """

    what: str
    bound: float
    found: Callable[[Sections], float | None]
    at_least: bool = False

    def reached(self, value: float) -> bool:
        """Whether the value is as asked."""
        return value >= self.bound if self.at_least else value <= self.bound


def _over(section: str, program: str, of: Callable[[list[float]], float]) -> Callable[[Sections], float | None]:
    def found(sections: Sections) -> float | None:
        numbers = list(ratios(sections.get(section, {}), program).values())
        return of(numbers) if numbers else None

    return found


def _quotient(section: str, program: str, base: str) -> Callable[[Sections], float | None]:
    """The program's time by that of `base` at the section's one point."""

    def found(sections: Sections) -> float | None:
        for point in sections.get(section, {}).values():
            if program in point["results"] and base in point["results"]:
                return float(point["results"][program]["ms"]) / float(point["results"][base]["ms"])
        return None

    return found


def _memory(program: str, condition: Callable[[Mapping[str, Any]], bool]) -> Callable[[Sections], float | None]:
    def found(sections: Sections) -> float | None:
        points = [p for p in sections.get("grid", {}).values() if condition(p) and program in p["results"]]
        return max((scratch_mib(p, program) for p in points), default=None)

    return found


def _heads(sections: Sections) -> float | None:
    wide = {name: p for name, p in sections.get("heads", {}).items() if p["h"] >= 2048}
    return max(ratios(wide, IN_FORWARD).values(), default=None)


def _windows(sections: Sections) -> float | None:
    """The chosen number's time by the best; in the sweep it is the same program once more, and all samples count."""
    for point in sections.get("windows", {}).values():
        results, again = point["results"], f"forward {point['chosen_windows']} windows"
        chosen = statistics.median(results[FORWARD]["samples"] + results.get(again, {"samples": []})["samples"])
        swept = [r["ms"] for name, r in results.items() if name.endswith(" windows") and name != again]
        return chosen / min(chosen, *swept)
    return None


def _at(section: str, program: str, number: str) -> Callable[[Sections], float | None]:
    """A number of the program at the section's one point."""

    def found(sections: Sections) -> float | None:
        for point in sections.get(section, {}).values():
            if program in point["results"]:
                return float(point["results"][program][number])
        return None

    return found


def _compile(number: str) -> Callable[[Sections], float | None]:
    def found(sections: Sections) -> float | None:
        for point in sections.get("compile", {}).values():
            return max(r[number] for name, r in point["results"].items() if CANONICAL not in name)
        return None

    return found


def _torch(
    kind: str, of: Callable[[list[float]], float], number: Callable[[Any], float]
) -> Callable[[Sections], float | None]:
    """A number of PyTorch's points of that kind."""

    def found(sections: Sections) -> float | None:
        numbers = [number(p) for name, p in sections.get("torch_gpu", {}).items() if name.split()[0] == kind]
        return of(numbers) if numbers else None

    return found


def _overhead(call: str) -> Callable[[Any], float]:
    return lambda point: float(point["overhead_us"][call])


def _everywhere(point: Mapping[str, Any]) -> bool:
    return True


TARGETS = (
    Target("forward / bare product, geometric mean over the grid", 0.98, _over("grid", FORWARD, geometric_mean)),
    Target("forward / bare product, worst point", 1.03, _over("grid", FORWARD, max)),
    Target("in_forward / three products, geometric mean", 1.02, _over("grid", IN_FORWARD, geometric_mean)),
    Target("in_forward / three products, worst point", 1.06, _over("grid", IN_FORWARD, max)),
    Target("in_forward / three products, worst published head of H ≥ 2048", 1.08, _heads),
    Target("recompute / three products, geometric mean", 1.38, _over("grid", RECOMPUTE, geometric_mean)),
    Target("recompute / three products, worst point", 1.45, _over("grid", RECOMPUTE, max)),
    Target("forward, temporary MiB, worst point", 16, _memory(FORWARD, _everywhere)),
    Target("in_forward, MiB beside dW, V ≤ 131072", 512, _memory(IN_FORWARD, lambda p: p["v"] <= 131072)),
    Target("in_forward, MiB beside dW, V = 262144", 1024, _memory(IN_FORWARD, lambda p: p["v"] == 262144)),
    Target("recompute, MiB beside dH, worst point", 192, _memory(RECOMPUTE, _everywhere)),
    Target("in_forward, half the scratch / default", 1.10, _quotient("options", "in_forward half scratch", IN_FORWARD)),
    Target("in_forward, a quarter of the rows / all", 0.35, _quotient("options", "in_forward quarter", IN_FORWARD)),
    Target("recompute, a quarter of the rows / all", 0.35, _quotient("options", "recompute quarter", RECOMPUTE)),
    Target("in_forward, frozen weight / full", 0.72, _quotient("options", "in_forward frozen weight", IN_FORWARD)),
    Target(
        "forward, entropy too / log-probability alone",
        1.05,
        _quotient("options", "forward log_prob and entropy", "forward log_prob"),
    ),
    Target("chosen windows / best of the sweep", 1.02, _windows),
    Target("seconds to compile a call, worst", 3.0, _compile("compile_seconds")),
    Target("the same, without XLA's autotuning of its own products", 3.0, _compile("untuned_seconds")),
    Target("log-probability and entropy, forward / bare product", 1.03, _at("log_probs", FORWARD, "ratio")),
    Target("log-probability and entropy, with gradients / three products", 1.40, _at("log_probs", "both", "ratio")),
    Target("the same, MiB beside dH", 192, _at("log_probs", "both", "beside_accumulator_mib")),
    Target("64 largest logits / bare product", 1.25, _at("top_k", FORWARD, "ratio")),
    Target(
        "loss and gradient of donated logits, share of a copy's rate",
        0.80,
        _at("given", "donated mosaic_gpu", "share"),
        at_least=True,
    ),
    Target("the same of logits that are kept", 0.80, _at("given", "kept mosaic_gpu", "share"), at_least=True),
    *(
        Target(f"PyTorch, host us of {call} beyond JAX's, worst", bound, _torch("host", max, _overhead(call)))
        for call, bound in HOST_US.items()
    ),
    Target("PyTorch, time on the GPU / JAX's, worst", DEVICE_RATIO, _torch("device", max, lambda p: p["ratio"])),
    Target(
        "PyTorch, memory by the driver's count / JAX's, worst",
        MEMORY_RATIO,
        _torch("memory", max, lambda p: p["ratio"]),
    ),
    Target(
        "PyTorch, loss and gradient in the logits' memory, share of a copy's rate, worst",
        GIVEN_SHARE,
        _torch("given", min, lambda p: p["results"]["in place"]["share"]),
        at_least=True,
    ),
)
