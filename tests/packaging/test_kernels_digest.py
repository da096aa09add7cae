"""The kernels' digest: the same in every process, another for another kernel, and what the files with others are."""

from collections.abc import Iterator

import jax
import kernels_digest
import pytest

from experiments.bench import results
from pallas_ce.backends.mosaic_gpu.gemm import launch
from pallas_ce.backends.mosaic_gpu.kernels import epilogues
from pallas_ce.backends.triton import configs

pytest.importorskip("triton")


def forget() -> None:
    jax.clear_caches()
    launch.kernel_function.cache_clear()


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Changes code that is traced; nothing traced before or within outlives that."""
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def test_it_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert results.kernels() == kernels_digest.digest()


def test_a_changed_kernel_changes_it(anew: pytest.MonkeyPatch) -> None:
    before = {name: kernels_digest.kernels(name) for name in ("forward mosaic_gpu", "forward triton")}
    forget()
    anew.setattr(epilogues, "LOG2E", 1.5)
    assert kernels_digest.kernels("forward mosaic_gpu") != before["forward mosaic_gpu"]
    assert kernels_digest.kernels("forward triton") == before["forward triton"]
    forget()
    anew.setitem(configs.NARROW, 90, configs.NARROW[80])
    assert kernels_digest.kernels("forward triton") != before["forward triton"]


def test_statements_of_a_source_count_and_words_do_not() -> None:
    source = '"""A module."""\n\n\ndef f(x):\n    """Doubles."""\n    return 2 * x  # twice\n'
    assert kernels_digest.statements(source) == kernels_digest.statements("def f(x):\n    return 2 * x\n")
    assert kernels_digest.statements(source) != kernels_digest.statements(source.replace("2 * x", "3 * x"))


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"kernels": "ours"}, []),
        ({"kernels": "theirs"}, ["grid.json was measured with kernels theirs; the code's are ours"]),
        ({}, ["grid.json was measured with kernels unknown; the code's are ours"]),
        ({"jax": "0.0.1"}, []),
        ({"device": "cpu"}, []),
    ],
)
def test_files_of_this_jax_and_other_kernels_are_named(
    machine: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_digest, "digest", lambda: "ours")
    document = {"machine": {"device": "NVIDIA H200", "jax": jax.__version__} | machine}
    assert list(kernels_digest.outdated({"grid": document})) == said
