"""Figures in the README are those of the result files."""

import json
import statistics
from pathlib import Path

from experiments.bench.summary import CANONICAL, IN_FORWARD, ratios, wins

ROOT = Path(__file__).parents[2]


def test_the_readme_quotes_the_measured_ratios() -> None:
    found = json.loads((ROOT / "experiments/results/cpu_head.json").read_text())["results"]["in_forward"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"take {found['time_ratio']:.2f} times as long" in readme
    assert found["memory_ratio"] < 1 / 5
    assert "less than a fifth of its temporary memory" in readme


def test_the_readme_quotes_the_grid_of_the_gpu() -> None:
    points = json.loads((ROOT / "experiments/results/gpu_head_grid.json").read_text())["points"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    ours, stored = (statistics.geometric_mean(ratios(points, name).values()) for name in (IN_FORWARD, CANONICAL))
    assert f"takes {ours:.2f} times the three bare products (stored logits: {stored:.2f})" in readme
    assert max(p["results"]["forward"]["temporary_mib"] for p in points.values()) <= 13
    assert "at most 13 MiB for the loss alone" in readme
    peers = [json.loads(path.read_text())["points"] for path in (ROOT / "experiments/results").glob("peers*.json")]
    assert "it is the fastest at {} of {} shapes".format(*wins(points, *peers)) in readme


def test_the_readme_quotes_the_pipelines_memory() -> None:
    measured = json.loads((ROOT / "experiments/results/pipeline_memory.json").read_text())["measured"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    ours, stored = (measured[name]["head_bytes"] / 1e9 for name in ("fused", "logits"))
    assert f"needs {ours:.1f} GB in place of {stored:.1f} GB" in readme
