"""The table of Hugging Face models: its command on a CPU, and what its figures are made of."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
huggingface = pytest.importorskip("experiments.bench.huggingface")

from experiments import huggingface_table, site  # noqa: E402
from experiments.bench import peers, report, summary  # noqa: E402
from experiments.bench.results import FOLDER  # noqa: E402

SETTING = huggingface.Setting(32, 1, 16, vocabulary=300, head_size=16)


def process(milliseconds: float, first_step_seconds: float, loss: float = 5.0) -> dict[str, Any]:
    return {
        "loss": loss,
        "head_gradient": 1.0,
        "first_step_seconds": first_step_seconds,
        "samples": [milliseconds] * 3,
        "torch_peak_mib": 100.0,
        "driver_mib": 20.0 * milliseconds,
    }


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for processes; the variants that were run."""
    ran: list[str] = []
    started: list[Any] = []

    def stands_in(function: Any, *arguments: Any) -> Any:
        if function is huggingface.idle_mib:
            return 10.0
        _, setting, variant, _ = arguments
        ran.append(variant)
        started.append((setting, variant))
        milliseconds = {"plain": 10.0, "liger": 12.0, "fused": 9.0, "fused, lean": 9.5}[variant]
        return process(milliseconds, 5.0 if started.count((setting, variant)) == 1 else 2.0)

    monkeypatch.setattr(huggingface, "_apart", stands_in)
    monkeypatch.setattr(peers.Peer, "missing", lambda _: None)
    return ran


def test_all_losses_train_the_same_model_on_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_MOST_STEPS", 4)
    plain, *ours = (huggingface.train(SETTING, variant, "cpu") for variant in ("plain", "fused", "fused, lean"))
    for fused in ours:
        assert huggingface.differs(fused, plain) is None
        assert len(fused["samples"]) == 4
        assert all(number > 0 for name, number in fused.items() if name != "samples")


def test_losses_take_turns_and_a_first_process_has_empty_caches(apart: list[str]) -> None:
    record = huggingface.measure(SETTING, "cpu", 3)
    assert apart == [*huggingface.VARIANTS, *huggingface.VARIANTS[::-1], *huggingface.VARIANTS]
    fused = record["results"]["fused"]
    assert fused["first_step_seconds"] == {"before": 5.0, "after": 2.0}
    assert fused["ms"] == 9.0
    assert len(fused["processes"]) == 3


def test_what_fails_or_differs_is_left_out_with_the_reason(apart: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in = huggingface._apart

    def fails(function: Any, *arguments: Any) -> Any:
        if arguments[2] == "plain":
            raise RuntimeError("out of memory\nand more")
        return stands_in(function, *arguments)

    monkeypatch.setattr(huggingface, "_apart", fails)
    record = huggingface.measure(SETTING, "cpu", 2)
    assert record["left_out"] == {"plain": "RuntimeError: out of memory"}
    assert set(record["results"]) == {"liger", "fused", "fused, lean"}

    def wrong(variant: str) -> Any:
        return lambda _, *arguments: process(10, 2, 5.5 if arguments[2] == variant else 5.0)

    monkeypatch.setattr(huggingface, "_apart", wrong("liger"))
    assert (
        "differs by more than bfloat16 explains: loss 5.5 and 5"
        in huggingface.measure(SETTING, "cpu", 2)["left_out"]["liger"]
    )
    monkeypatch.setattr(huggingface, "_apart", wrong("fused"))
    with pytest.raises(RuntimeError, match=r"fused and plain: differs by more than bfloat16 explains: loss 5.5 and 5"):
        huggingface.measure(SETTING, "cpu", 2)


def test_its_results_make_targets_and_a_section_of_the_page(
    apart: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert huggingface_table.main(["--dry-run", "--out", str(tmp_path)]) == 0
    assert "fused 9.0 ms, 100 and 180 MiB, first step 5.0 s and 2.0 s" in capsys.readouterr().out
    document = json.loads((tmp_path / "huggingface_table.json").read_text())
    assert {"device", "jax", "torch", "transformers", "date"} <= set(document["machine"])
    assert list(document["points"]) == [
        "JAX idle",
        "H 2048, 4 layers, 8192 tokens",
        "H 2048, 4 layers, 32768 tokens",
        "H 1024, 8 layers, 1024 tokens",
    ]
    found = {target.what: target for target in summary.targets({"huggingface_table": document["points"]})}
    largest, smallest = "H 2048, 4 layers, 32768 tokens", "H 1024, 8 layers, 1024 tokens"
    for name, bound in ((largest, 1.0), (smallest, 1.05)):
        assert found[f"{name}: step / with the model's own loss"][1:3] == (bound, 0.9)
        assert found[f"{name}: step / with Liger"][1:3] == (1.0, 0.75)
    memory = found[f"{largest}: driver's MiB, without JAX's idle ones / with Liger"]
    assert memory[1:3] == (1.05, (180 - 10) / 240)
    assert found["a model's first step, seconds before its programs are kept, worst"][1:3] == (6.0, 5.0)
    assert found["a model's first step, seconds after its programs are kept, worst"][1:3] == (3.0, 2.0)

    report.write(tmp_path)
    row = "| H 1024, 8 layers, 1024 tokens | fused | 9.0 | 100 | 180 | 5.0 | 2.0 |"
    assert row in (tmp_path / "gpu_report.md").read_text()
    for path in FOLDER.glob("*.json"):
        if path.name != "huggingface_table.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    page = site.page(tmp_path)
    assert row in page
    assert "JAX idle: 10 MiB" in page
    (tmp_path / "huggingface_table.json").unlink()
    assert "Hugging Face" not in site.page(tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_dry_run_measures_every_size_and_can_be_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dry-run", "--out", str(tmp_path)]
    assert huggingface_table.main(words) == 0
    points = json.loads((tmp_path / "huggingface_table.json").read_text())["points"]
    assert len(points) == 4
    assert all({"plain", "fused"} <= set(point["results"]) for point in points.values() if "results" in point)
    capsys.readouterr()
    assert huggingface_table.main(words) == 0
    assert capsys.readouterr().out == ""


def test_one_round_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        huggingface_table.main(["--dry-run", "--out", str(tmp_path), "--rounds", "1"])
    assert "--rounds must be at least 2" in capsys.readouterr().err
