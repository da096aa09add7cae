"""The commands that measure in PyTorch, at small sizes on a CPU, and what their figures are made of."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.bench import peers, torch_gpu, torch_timing  # noqa: E402
from experiments.bench.processes import apart  # noqa: E402
from tests.experiments.test_bench import dry_run  # noqa: E402

SHAPE = (40, 300, 64)


@pytest.fixture
def given() -> tuple[Any, Any, Any]:
    return torch_timing.inputs(SHAPE, "cpu")


@pytest.mark.slow
def test_peers_are_timed_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GRID", [])
    monkeypatch.setattr(peers, "HEADS", {"GPT-2": peers.HEADS["GPT-2"]})
    found = dry_run("peers", tmp_path, "--peers", "torch, bfloat16 logits", "quack")
    point = found["peers_torch_bfloat16_logits_quack"]["GPT-2"]
    assert {"forward", "in_forward", "torch, bfloat16 logits", "bare"} <= set(point["results"])
    assert point["left_out"]["quack"] == "quack is not installed (pip install quack-kernels)"


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_peer_that_is_wrong_is_found_out(given: tuple[Any, Any, Any], factor: float) -> None:
    want, stored = peers.exact(*given), peers._stored(True)
    assert peers.wrong(stored, given, want)[1] is None
    _, reason = peers.wrong(lambda *x: factor * stored(*x), given, want)
    assert reason is not None
    assert reason.startswith("wrong by more than bfloat16 explains: loss")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_bridge_is_compared_with_jax(tmp_path: Path) -> None:
    found = dry_run("torch_gpu", tmp_path)["torch_gpu"]
    assert {name.split()[0] for name in found} == {"given", "host", "device", "done", "memory"}
    for name, record in found.items():
        if name.startswith("memory"):
            assert all(r["driver_mib"] > 0 and r["in_use_mib"] > 0 for r in record["results"].values())
        if name.startswith("device"):
            assert record["ratio"] == record["results"]["bridge"]["ms"] / record["results"]["native"]["ms"]


@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_both_callers_compute_the_same_loss_and_gradients(given: tuple[Any, Any, Any], mode: str) -> None:
    setting = torch_gpu.Setting("xla", mode, "cpu")
    loss, gradients = torch_gpu.made("bridge", setting, True)(*given)
    want_loss, want = torch_gpu.made("native", setting, True)(*torch_gpu.given("native", given))
    assert loss.item() == pytest.approx(float(want_loss), rel=1e-6)
    for got, exactly in zip(gradients, want, strict=True):
        # One rounding to bfloat16 apart at most.
        torch.testing.assert_close(got, torch.utils.dlpack.from_dlpack(exactly), rtol=2.0**-7, atol=1e-6)


def test_every_way_of_picking_log_probabilities_is_measured(tmp_path: Path) -> None:
    found = dry_run("selective_log_softmax", tmp_path)["selective_log_softmax"]
    assert len(found) == 2 * 2
    for name, record in found.items():
        for method, result in record["results"].items():
            exact = "float32" in name or method == "ours"
            assert result["largest_error"] < 1e-5 if exact else result["largest_error"] > 1e-3


@pytest.mark.nightly
@pytest.mark.slow
def test_the_pipelines_memory_is_counted_and_measured(tmp_path: Path) -> None:
    found = dry_run("pipeline_memory", tmp_path)["pipeline_memory"]
    assert list(found) == ["logits", "chunked", "fused"]
    assert all(record["results"][name]["measured_gb"] >= 0 for name, record in found.items())


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_trains_alike_by_every_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from experiments.bench import huggingface_table

    monkeypatch.setattr(huggingface_table, "_STEPS", 2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # which it sets, put back at the end
    monkeypatch.setattr(huggingface_table, "apart", lambda function, *given: function(*given))
    monkeypatch.setattr(huggingface_table, "SETTINGS", huggingface_table.SETTINGS[-1:])
    (idle, record) = dry_run("huggingface_table", tmp_path)["huggingface_table"].values()
    assert idle["mib"] >= 0
    assert set(record["results"]) == {"plain", "fused", "fused, lean"}
    assert "liger_kernel is not installed" in record["left_out"]["liger"]


@pytest.mark.nightly
@pytest.mark.slow
def test_trainings_in_pytorch_agree(text: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    from experiments.bench import training_evidence, trainings

    monkeypatch.setenv("PYTHONPATH", str(Path(trainings.__file__).parents[2]))
    monkeypatch.chdir(cache)
    config = training_evidence.configs(str(text), dry_run=True)["TRL"]
    for family in ("Hugging Face", "TRL"):
        variants = trainings.FAMILIES[family]
        ours, theirs = (apart(trainings.train, family, config, variant, "cpu") for variant in variants)
        assert len(ours["losses"]) == 8
        largest, _, validation = training_evidence.differences(ours, theirs)
        assert largest < 5e-3
        assert validation < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_every_kind_of_point_is_measured_on_the_gpu(mode: str) -> None:
    setting, shape = torch_gpu.Setting("mosaic_gpu", mode, "cuda"), (512, 4096, 256)
    assert torch_gpu.host_time(shape, setting, 3)["results"]["bridge forward"]["us"] > 0
    assert torch_gpu.compared(shape, setting, 1, "native", torch_gpu.alone)["ratio"] > 0
    # The driver counts all processes, and tests have several.
    assert all(result["in_use_mib"] > 0 for result in torch_gpu.memory(shape, setting)["results"].values())
