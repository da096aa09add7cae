"""The benchmark of the PyTorch bridge: its command at small sizes on a CPU, and what its figures are made of."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("experiments.bench.bridge")

from experiments import torch_gpu  # noqa: E402

SHAPE = (40, 300, 64)
SETTING = bridge.Setting("xla", "recompute", "cpu")


@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_both_callers_compute_the_same_loss_and_gradients(mode: str) -> None:
    tensors = bridge.torch_timing.inputs(SHAPE, "cpu")
    setting = SETTING._replace(mode=mode)
    loss, gradients = bridge.made("bridge", setting, True)(*tensors)
    want_loss, want = bridge.made("native", setting, True)(*bridge.as_arrays(*tensors))
    assert loss.item() == pytest.approx(float(want_loss), rel=1e-6)
    for got, exactly in zip(gradients, want, strict=True):
        # One rounding to bfloat16 apart at most.
        torch.testing.assert_close(got, torch.utils.dlpack.from_dlpack(exactly), rtol=2.0**-7, atol=1e-6)
    assert bridge.made("bridge", setting, False)(*tensors).item() == pytest.approx(float(want_loss), rel=1e-6)


def test_overhead_is_the_bridges_median_beyond_the_native_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    seconds = {"bridge": (2e-4, 5e-4), "native": (1e-4, 2e-4), "nothing": (0.0, 0.0)}

    def made(caller: str, _: Any, both: bool) -> Any:
        def run(*_: Any) -> int:
            clock[0] += seconds[caller][both]
            return 0

        return run

    monkeypatch.setattr(bridge, "made", made)
    monkeypatch.setattr(bridge.time, "perf_counter", lambda: clock[0])
    record = bridge.host_time(SHAPE, SETTING, 4)
    assert record["overhead_us"] == pytest.approx({"forward": 100, "forward+backward": 300})
    assert all(len(result["samples"]) == 4 for result in record["results"].values())


def test_device_times_are_compared_within_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def per_launch(run: Any, wait: Any) -> float:
        wait(run())
        seen.append(run.func)
        return 3.0 if run.func is seen[0] else 2.0

    monkeypatch.setattr(bridge.timing, "per_launch", per_launch)
    record = bridge.device_time(SHAPE, SETTING, 3)
    assert record["ratio"] == pytest.approx(1.5)
    assert [len(result["samples"]) for result in record["results"].values()] == [3, 3]  # a first round is not counted
    assert seen[:4] == seen[:2] + seen[1::-1]


def test_pytorchs_own_loss_is_waited_for_as_the_bridges_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def synchronize(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(bridge, "made", lambda caller, *_: lambda *_: {"bridge": 2.0, "torch": 1.0}[caller])
    monkeypatch.setattr(bridge, "synchronize", synchronize)
    monkeypatch.setattr(bridge.time, "perf_counter", lambda: clock[0])
    record = bridge.until_done(SHAPE, SETTING, 3)
    assert record["results"]["bridge"]["ms"] == pytest.approx(2000)
    assert record["ratio"] == pytest.approx(2.0)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_dry_run_measures_every_kind_of_point_and_can_be_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dry-run", "--out", str(tmp_path), "--rounds", "1", "--calls", "2"]
    assert torch_gpu.main(words) == 0
    out = capsys.readouterr().out
    document = json.loads((tmp_path / "torch_gpu.json").read_text())
    assert {"device", "jax", "torch", "date", "implementation"} <= set(document["machine"])
    found = document["points"]
    assert len(found) == 14
    assert {name.split()[0] for name in found} == {"given", "host", "device", "done", "memory"}
    for name, record in found.items():
        assert name in out
        if name.startswith("given"):
            copy, *losses = record["results"].values()
            assert all(x["share"] == pytest.approx(1.5 * copy["ms"] / x["ms"]) for x in losses)
            continue
        kind = name.split()[0]
        others = {"host": {"native", "nothing"}, "done": {"torch"}}.get(kind, {"native"})
        assert {key.split()[0] for key in record["results"]} == {"bridge"} | others
        if name.startswith("memory"):
            assert all(r["driver_mib"] > 0 and r["in_use_mib"] > 0 for r in record["results"].values())
    assert torch_gpu.main(words) == 0
    assert capsys.readouterr().out == ""


def test_a_run_that_is_out_of_time_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_gpu.main(["--dry-run", "--minutes", "0", "--out", str(tmp_path)]) == 0
    assert "time is up with 14 points left; run the same command again to go on" in capsys.readouterr().out


def test_a_dry_run_is_not_written_among_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        torch_gpu.main(["--dry-run"])
    assert "--dry-run needs --out" in capsys.readouterr().err


def test_without_a_gpu_or_torch_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_gpu.main([]) == 2
    assert "PyTorch finds no GPU" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_gpu.main([]) == 2
    assert "pip install 'pallas-ce[torch]'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_every_kind_of_point_is_measured_on_the_gpu(mode: str) -> None:
    setting = bridge.Setting("mosaic_gpu", mode, "cuda")
    shape = (512, 4096, 256)
    assert bridge.host_time(shape, setting, 3)["results"]["bridge forward"]["us"] > 0
    assert bridge.device_time(shape, setting, 1)["ratio"] > 0
    # The driver's count is of all processes, of which tests have several.
    assert all(result["in_use_mib"] > 0 for result in bridge.memory(shape, setting)["results"].values())
