"""The kernels' digest: the same in every process, another for another kernel, and what the files with others are."""

from collections.abc import Callable, Iterator

import jax
import kernels_digest
import pytest

from experiments.bench import results
from pallas_ce.backends.mosaic_gpu.gemm import launch
from pallas_ce.backends.mosaic_gpu.kernels import epilogues
from pallas_ce.backends.triton import configs

pytest.importorskip("triton")


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Forgets what was traced: called before code changes, and at the end."""

    def clear() -> None:
        jax.clear_caches()
        launch.kernel_function.cache_clear()

    yield clear
    clear()


@pytest.mark.nightly
def test_it_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert results.kernels() == kernels_digest.digest()


def test_a_changed_kernel_changes_it(forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> list[list[str]]:
        forget()
        return [kernels_digest.kernels(name) for name in ("forward mosaic_gpu", "forward triton")]

    mosaic, triton = traced()
    with monkeypatch.context() as patch:
        patch.setattr(epilogues, "LOG2E", 1.5)
        patched_mosaic, same = traced()
        assert patched_mosaic != mosaic
        assert same == triton
        patch.setitem(configs.NARROW, 90, configs.NARROW[80])
        assert traced()[1] != triton


def test_statements_of_a_source_count_and_words_do_not() -> None:
    source = '"""A module."""\n\n\ndef f(x):\n    """Doubles."""\n    return 2 * x  # twice\n'
    assert kernels_digest.statements(source) == kernels_digest.statements("def f(x):\n    return 2 * x\n")
    assert kernels_digest.statements(source) != kernels_digest.statements(source.replace("2 * x", "3 * x"))


@pytest.mark.parametrize(
    ("machine", "named"),
    [({"kernels": "ours"}, False), ({"kernels": "theirs"}, True), ({}, True), ({"jax": "0.0.1"}, False),
     ({"device": "cpu"}, False)],
)  # fmt: skip
def test_files_of_this_jax_and_other_kernels_are_named(
    machine: dict[str, str], named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_digest, "digest", lambda: "ours")
    document = {"machine": {"device": "NVIDIA H200", "jax": jax.__version__} | machine}
    theirs = machine.get("kernels", "unknown")
    said = f"grid.json was measured with kernels {theirs}; the code's are ours"
    assert list(kernels_digest.outdated({"grid": document})) == [said] * named
