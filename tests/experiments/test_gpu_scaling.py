"""The benchmark of several GPUs: its arithmetic, its refusals, and all of it on two CPU devices at a tiny size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu_scaling import LAYOUTS, main, with_ratios

ROOT = Path(__file__).parents[2]


def _record(layout: str, gpus: int, ours: float, canonical: float) -> dict:
    return {"layout": layout, "gpus": gpus, "results": {"in_forward": {"ms": ours}, "canonical": {"ms": canonical}}}


def test_ratios_are_those_of_strong_and_weak_scaling() -> None:
    records = with_ratios(
        [_record("one", 4, 200, 300), _record("apart", 4, 205, 310), _record("tensor", 4, 55, 80),
         _record("sequence", 4, 56, 90), _record("data", 4, 210, 330)]
    )  # fmt: skip
    one, apart, tensor, sequence, data = (record["results"] for record in records)
    assert one["in_forward"] == {"ms": 200, "to_canonical": 200 / 300}
    assert tensor["in_forward"]["efficiency"] == 200 / (4 * 55)
    assert tensor["canonical"]["efficiency"] == 300 / (4 * 80)
    assert sequence["in_forward"]["to_tensor"] == 56 / 55
    assert data["in_forward"]["efficiency"] == 200 / 210
    assert apart["in_forward"]["efficiency"] == 200 / 205


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is 1 device; scaling needs at least 2"),
        (["--gpus", "4"], "--gpus asks for 4 devices; it must be at least 2, and there are 1"),
    ],
)
def test_fewer_devices_than_asked_for_are_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--out", str(tmp_path / "out")])
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def _run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    return subprocess.run(
        [sys.executable, "-m", "experiments.gpu_scaling", *arguments, "--shape", "64", "512", "32", "--rounds", "1"],
        cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_every_number_of_gpus_is_measured_within_the_budget_or_on_resuming(tmp_path: Path) -> None:
    out = tmp_path / "out"
    begun = _run("--out", str(out), "--budget", "0.001")
    assert begun.returncode == 0, begun.stderr
    assert "--resume measures [2] GPUs" in begun.stdout
    assert not out.exists()

    done = _run("--out", str(out), "--resume")
    assert done.returncode == 0, done.stderr
    document = json.loads((out / "gpu_scaling_2.json").read_text())
    assert [(r["layout"], r["gpus"]) for r in document["records"]] == [(layout, 2) for layout in LAYOUTS]
    assert document["environment"]["NCCL_NVLS_ENABLE"] == "0"
    assert document["command"].startswith("python -m experiments.gpu_scaling --gpus 2 --shape ")
    every = [record["results"] for record in document["records"]]
    for results in every:
        assert set(results) == {"in_forward", "recompute", "canonical"}
        assert all(found["ms"] > 0 and found["temporary_mib"] > 0 for found in results.values())
    # bfloat16: hidden 4 KiB, weight 32 KiB, labels 256 bytes.
    sizes = [results["recompute"]["inputs_mib"] * 2**20 for results in every]
    assert sizes == [37120, 37120, 20736, 18560, 37120]
    one, apart, *_, data = (results["recompute"]["loss"] for results in every)
    assert apart == pytest.approx(data, rel=1e-6)
    assert apart != one
    assert [path.name for path in out.iterdir()] == ["gpu_scaling_2.json"]

    again = _run("--out", str(out), "--resume", "--implementation", "xla")
    assert again.returncode == 2
    assert "was measured with implementation None, now it is xla" in again.stderr
    multicast = _run("--out", str(out), NCCL_NVLS_ENABLE="1")
    assert "NCCL_NVLS_ENABLE is 1" in multicast.stderr
