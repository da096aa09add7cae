"""`python -m pallas_ce.check_device`: what it finds on a CPU, writes, and does when something fails."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.check_device import __main__ as command
from pallas_ce.check_device import checks, timings
from pallas_ce.check_device import oracle as own
from tests.pallas_ce import oracle

MANY = len(checks._OF_XLA) * 2 * len(checks.DTYPES)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases in one dtype, and one round of timings."""
    cases = {name: checks.CASES[name] for name in ("ragged", "row temperatures, ragged")}
    monkeypatch.setattr(checks, "CASES", cases)
    monkeypatch.setattr(checks, "_OF_XLA", tuple(cases))
    monkeypatch.setattr(checks, "DTYPES", ("float32",))
    monkeypatch.setattr(timings, "_ROUNDS", 1)
    monkeypatch.setitem(command._TIMED, "cpu", (16, 8, 32))


def run(path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["--device", "cpu", "--out", str(path), *words])
    return status, json.loads(path.read_text())


@pytest.mark.slow
def test_on_a_cpu_every_check_passes_and_the_file_tells_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(tmp_path / "found.json")
    assert (status, found["passed"], found["device"]) == (0, True, "cpu")
    assert {"jax", "jaxlib", "numpy", "python", "pallas-ce"} <= found["versions"].keys()
    assert len(found["checks"]) == MANY
    for check in found["checks"]:
        assert check["status"] == "pass"
        assert {"loss", "hidden", "weight"} <= check["errors"].keys()
        assert all(0 <= error["error"] <= error["bound"] < 0.02 for error in check["errors"].values())
    for timing in found["timings"]:
        names = [f"{name}, {way}" for name in ("stored logits", "xla") for way in ("forward", "forward+backward")]
        assert list(timing["results"]) == names
        for name, result in timing["results"].items():
            floor = timing["products_ms"][name.rpartition(", ")[2]]
            assert result["ratio"] == pytest.approx(result["ms"] / floor)
            assert len(result["samples"]) == timings._ROUNDS
    assert os.listdir(tmp_path) == ["found.json"]
    printed = capsys.readouterr().out
    assert f"{MANY} checks passed, 0 failed" in printed
    assert "row temperatures" in printed


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "JAX finds no CUDA GPU; --device cpu checks XLA's code on the CPU" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_the_file_is_named_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["--device", "cpu"]) == 0
    assert os.listdir(tmp_path) == ["pallas_ce_cpu.json"]


@pytest.mark.usefixtures("quick")
def test_a_check_that_raises_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_INSTRUCTION")

    monkeypatch.setattr(checks, "linear_loss", broken)
    status, found = run(tmp_path / "found.json")
    assert (status, found["passed"]) == (1, False)
    assert {check["case"]: check["status"] for check in found["checks"]} == {
        "ragged": "pass",
        "row temperatures, ragged": "fail",
    }
    assert found["checks"][-1]["message"] == "RuntimeError: CUDA_ERROR_ILLEGAL_INSTRUCTION"
    assert "xla, forward" in found["timings"][1]["results"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("factor", "message"), [(1.0001, None), (np.nan, "loss or gradients are not finite")])
def test_a_wrong_gradient_or_nan_fails(
    factor: float, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = checks.linear_loss
    scaled = jax.custom_jvp(lambda x: x)
    scaled.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
    monkeypatch.setattr(checks, "linear_loss", lambda *arrays, **options: scaled(right(*arrays, **options)))
    status, found = run(tmp_path / "found.json")
    assert status == 1
    assert [check["status"] for check in found["checks"]] == ["pass", "pass", "fail", "fail"]
    assert found["checks"][-1].get("message") == (message and f"RuntimeError: {message}")
    assert "NaN" not in (tmp_path / "found.json").read_text()


@pytest.mark.usefixtures("quick")
def test_results_that_differ_from_run_to_run_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = checks.linear_loss, iter(range(1000))

    def noisy(*arrays: Any, **options: Any) -> Any:
        return right(*arrays, **options) + jax.pure_callback(
            lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), jnp.float32)
        )

    monkeypatch.setattr(checks, "linear_loss", noisy)
    _, found = run(tmp_path / "found.json")
    assert found["checks"][-1]["message"] == "RuntimeError: two runs of the same program gave different bits"


@pytest.mark.usefixtures("quick")
def test_what_an_implementation_does_not_serve_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command._IMPLEMENTATIONS, "cpu", ("mosaic_gpu", "xla"))
    status, found = run(tmp_path / "found.json")
    assert status == 0
    assert [check["status"] for check in found["checks"]] == ["not served"] * 4 + ["pass"] * 4
    assert "cannot serve this call" in found["checks"][0]["message"]
    assert not [name for name in found["timings"][0]["results"] if "mosaic" in name]


@pytest.mark.usefixtures("quick")
def test_no_room_for_the_timings_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise MemoryError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(timings, "_in_turn", full)
    status, found = run(tmp_path / "found.json")
    assert status == 0
    assert found["timings"][0] == {"dtype": "bfloat16", "message": "MemoryError: RESOURCE_EXHAUSTED"}


def test_a_file_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    command._save(path, {"checks": [1]})

    def interrupted(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command._save(path, {"checks": [1, 2]})
    assert json.loads(path.read_text()) == {"checks": [1]}


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 3.0}, {"label_smoothing": 0.2}])
def test_its_oracle_is_that_of_the_tests(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    arrays = {"hidden": rng.normal(size=(9, 5)), "weight": rng.normal(size=(13, 5)), "bias": rng.normal(size=13)}
    labels = rng.integers(0, 13, size=9)
    labels[2] = -100
    wanted, gradients = oracle.cross_entropy(arrays, labels, options)
    given = arrays | {"labels": labels[:, None]}
    found = own.loss_and_gradients(given, options.get("logit_softcap"), options.get("label_smoothing", 0.0))
    np.testing.assert_allclose(found[0], wanted, rtol=1e-12)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=1e-10, atol=1e-14)


def test_its_oracle_knows_several_labels_and_temperatures() -> None:
    rng = np.random.default_rng(1)
    arrays = {"hidden": rng.normal(size=(7, 5)), "weight": rng.normal(size=(11, 5))}
    labels, temperature = rng.integers(-3, 11, size=(7, 3)), rng.uniform(0.5, 2.0, size=7)
    labels[4] = -1
    labels = np.where(labels < 0, -1, labels)

    def loss(arrays: dict[str, Any]) -> Any:
        values, _ = oracle.statistics(oracle.Logits(arrays, temperature=temperature), labels)
        return -(values["log_prob"] * (labels >= 0)).sum() / (labels >= 0).any(axis=1).sum()

    found = own.loss_and_gradients(arrays | {"labels": labels, "temperature": temperature}, None, 0.0)
    np.testing.assert_allclose(found[0], loss(arrays), rtol=1e-12)
    for name in arrays:
        np.testing.assert_allclose(found[1][name], oracle.differences(loss, arrays, name), rtol=1e-6, atol=1e-8)
