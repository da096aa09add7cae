"""Figures in the README are those of the result files."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_quotes_the_measured_ratios() -> None:
    found = json.loads((ROOT / "experiments/results/cpu_head.json").read_text())["results"]["in_forward"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"take {found['time_ratio']:.2f} times as long" in readme
    assert found["memory_ratio"] < 1 / 5
    assert "less than a fifth of its temporary memory" in readme
