"""The commands that measure in PyTorch, at small sizes on a CPU, and what they compare."""

import importlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.bench import peers, torch_gpu, torch_timing, training_evidence, trainings  # noqa: E402
from experiments.bench.processes import apart  # noqa: E402
from tests.experiments.test_bench import dry_run  # noqa: E402

LATER = (pytest.mark.nightly, pytest.mark.slow)


@pytest.fixture
def given() -> tuple[Any, Any, Any]:
    return torch_timing.inputs((40, 300, 64), "cpu")


@pytest.mark.parametrize(
    ("name", "words", "points", "programs"),
    [
        pytest.param("peers", ["--peers", "torch, bfloat16 logits", "quack"], 1,
                     {"forward", "in_forward", "torch, bfloat16 logits", "bare"}, marks=pytest.mark.slow),
        pytest.param("torch_gpu", [], 14, {"bridge", "native", "torch", "kept", "in place"}, marks=LATER),
        pytest.param("huggingface_table", [], 2, {"plain", "fused", "fused, lean"}, marks=LATER),
    ],
)  # fmt: skip
def test_every_command_measures_what_it_names_and_says_what_is_left_out(
    name: str, words: list[str], points: int, programs: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "huggingface_table":
        pytest.importorskip("transformers")
    module = importlib.import_module(f"experiments.bench.{name}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # which one command sets, put back at the end
    here = {"apart": lambda function, *given, **_: function(*given)}
    smaller = {
        "torch_gpu": lambda: here,
        "peers": lambda: {"GRID": [], "HEADS": {"GPT-2": peers.HEADS["GPT-2"]}},
        "huggingface_table": lambda: {
            "_WARM_STEPS": 1, "_STEPS": 2, "SETTINGS": [module.SETTINGS[-1]._replace(layers=1)], **here,
        },
    }[name]  # fmt: skip
    for attribute, value in smaller().items():
        monkeypatch.setattr(module, attribute, value)
    ((_, found),) = dry_run(name, tmp_path, *words).items()
    assert len(found) == points
    assert programs <= {program for point in found.values() for program in point.get("results", {})}
    why = {
        "peers": "quack is not installed (pip install --upgrade quack-kernels)",
        "huggingface_table": "liger_kernel is not",
    }
    assert why.get(name, "") in str([point.get("left_out") for point in found.values()])


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_peer_that_is_wrong_is_found_out(given: tuple[Any, Any, Any], factor: float) -> None:
    want, stored = peers.exact(*given), peers._stored(True)
    assert peers.wrong(stored, given, want)[1] is None
    _, reason = peers.wrong(lambda *x: factor * stored(*x), given, want)
    assert str(reason).startswith("wrong by more than bfloat16 explains: loss")


def test_torch_s_own_chunked_loss_is_right_where_torch_has_it(given: tuple[Any, Any, Any]) -> None:
    (peer,) = (peer for peer in peers.PEERS if peer.name == "torch, chunked")
    if peer.missing():
        assert not hasattr(torch.nn.functional, "linear_cross_entropy")
    else:
        assert peers.wrong(peer.make(), given, peers.exact(*given))[1] is None


@pytest.mark.parametrize("mode", ["in_forward", "recompute"])
def test_both_callers_compute_the_same_loss_and_gradients(given: tuple[Any, Any, Any], mode: str) -> None:
    setting = torch_gpu.Setting("xla", mode, "cpu")
    loss, gradients = torch_gpu.made("bridge", setting, True)(*given)
    want_loss, want = torch_gpu.made("native", setting, True)(*torch_gpu.given("native", given))
    assert loss.item() == pytest.approx(float(want_loss), rel=1e-6)
    for got, exactly in zip(gradients, want, strict=True):
        # One rounding to bfloat16 apart at most.
        torch.testing.assert_close(got, torch.utils.dlpack.from_dlpack(exactly), rtol=2.0**-7, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.slow
def test_trainings_in_pytorch_agree(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setenv("PYTHONPATH", str(Path(trainings.__file__).parents[2]))
    monkeypatch.chdir(cache)
    config = training_evidence.configs(str(text), dry_run=True)["TRL"]
    for family in ("Hugging Face", "TRL"):
        ours, theirs = (apart(trainings.train, family, config, x, "cpu") for x in trainings.FAMILIES[family])
        assert len(ours["losses"]) == 8
        largest, _, validation = training_evidence.differences(ours, theirs)
        assert largest < 5e-3
        assert validation < 1e-3
