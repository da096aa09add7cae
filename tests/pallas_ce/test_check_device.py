"""`python -m pallas_ce.check_device`: what it finds on a CPU, writes, and does when something fails."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import check_device as command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases in one dtype."""
    cases = {name: command.CASES[name] for name in ("ragged", "row temperatures, ragged")}
    monkeypatch.setattr(command, "CASES", cases)
    monkeypatch.setattr(command, "DTYPES", {"float32": 1e-5})


def spoil(monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[Any], Any]) -> None:
    """Has `linear_loss` return `spoilt` of its value, but in the reference."""
    right = command.linear_loss

    def wrong(*arrays: Any, implementation: Any, **options: Any) -> Any:
        loss = right(*arrays, implementation=implementation, **options)
        return loss if implementation == "reference" else spoilt(loss)

    monkeypatch.setattr(command, "linear_loss", wrong)


def run(path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["--device", "cpu", "--out", str(path), *words])
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("cases", ["quick", pytest.param("all", marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_on_a_cpu_every_check_passes_and_the_file_tells_all(
    cases: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if cases == "quick":
        request.getfixturevalue("quick")
    many = len(command.CASES) * 2 * len(command.DTYPES)
    status, found = run(tmp_path / "found.json")
    assert (status, found["passed"], found["device"]) == (0, True, "cpu")
    assert {"jax", "jaxlib", "numpy", "python", "pallas-ce"} <= found["versions"].keys()
    assert len(found["checks"]) == many
    for check in found["checks"]:
        assert check["status"] == "pass"
        assert {"loss", "hidden", "weight"} <= check["errors"].keys()
        assert all(0 <= error["error"] <= error["bound"] < 0.02 for error in check["errors"].values())
    assert os.listdir(tmp_path) == ["found.json"]
    printed = capsys.readouterr().out
    assert f"{many} checks passed, 0 failed" in printed
    assert "row temperatures" in printed


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "JAX finds no CUDA GPU, or no CPU; --device cpu checks XLA's code on the CPU" in capsys.readouterr().err


def broken(loss: Any) -> Any:
    raise RuntimeError("CUDA_ERROR_ILLEGAL_INSTRUCTION")


def with_gradient_times(factor: float) -> Callable[[Any], Any]:
    scaled = jax.custom_jvp(lambda x: x)
    scaled.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
    return scaled


def noisy(loss: Any) -> Any:
    """Another value in each run."""
    return loss + jax.pure_callback(lambda: np.float32(next(RUNS)), jax.ShapeDtypeStruct((), jnp.float32))


RUNS = itertools.count()


@pytest.mark.nightly(keep=2)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (broken, "RuntimeError: CUDA_ERROR_ILLEGAL_INSTRUCTION"),
        (with_gradient_times(1.0001), None),
        (with_gradient_times(np.nan), "RuntimeError: loss or gradients are not finite"),
        (noisy, "RuntimeError: two runs of the same program gave different bits"),
    ],
)
def test_a_fault_is_recorded_and_the_other_checks_go_on(
    spoilt: Callable[[Any], Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that is named for the device."""
    monkeypatch.chdir(tmp_path)
    spoil(monkeypatch, spoilt)
    assert command.main(["--device", "cpu"]) == 1
    text = Path("pallas_ce_cpu.json").read_text()
    found = json.loads(text)
    assert "NaN" not in text
    assert not found["passed"]
    assert {check["case"]: check["status"] for check in found["checks"]} == {
        "ragged": "pass",
        "row temperatures, ragged": "fail",
    }
    assert found["checks"][-1].get("message") == message


@pytest.mark.usefixtures("quick")
def test_what_an_implementation_does_not_serve_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.IMPLEMENTATIONS, "cpu", ("mosaic_gpu", "xla"))
    status, found = run(tmp_path / "found.json")
    assert status == 0
    assert [check["status"] for check in found["checks"]] == ["not served", "not served", "pass", "pass"] * 2
    assert "cannot serve this call" in found["checks"][0]["message"]


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
