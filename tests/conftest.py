"""Settings and fixtures for all tests."""

import os

# Before JAX starts. The tests compile thousands of small programs and run each once. LLVM's optimisation costs more
# than it gains; and XLA's older emitters, with all kernels of a program in one LLVM module, compile three times as fast
# as its newer ones. Memory assignment, which some tests read, depends on neither. `make test-nightly` takes the newer.
# And a test process of several is faster on processors of its own, without threads that wait for each other's turn.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = (
            f"{flags} --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
            " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        )
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
        processors, workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, processors[int(worker.removeprefix("gw")) % len(processors) :: workers])
    # XLA's threads: each warpgroup that waits in the GPU interpreter keeps one.
    os.environ.setdefault("NPROC", "16")

import collections
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from _pytest.doctest import DoctestModule
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.internal.conjecture import providers

# Drawn examples compile, so they have no deadline; they are the same on every machine and in every run.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=3, print_blob=True)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("default"), max_examples=8)
# For a fault that was planted: whether a test fails, not by which least example.
hypothesis.settings.register_profile(
    "mutants",
    parent=hypothesis.settings.get_profile("default"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
# `make fuzz` repeats it. New examples each time, and those that failed before.
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=10,
    print_blob=True,
    report_multiple_bugs=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.reuse, hypothesis.Phase.generate, hypothesis.Phase.shrink],
)
hypothesis.settings.load_profile("default")


@pytest.fixture
def key() -> jax.Array:
    """A random key."""
    return jax.random.key(0)


_MAPS = Path("/proc/self/maps")  # where the system has one


@contextlib.contextmanager
def _giving_back_memory_maps() -> Iterator[None]:
    """Afterwards drops compiled programs when this process has a quarter of the memory maps that Linux allows, 65,530.

    Each kernel of a program compiled for the CPU keeps three, and XLA crashes where Linux refuses another. A quarter
    leaves one test room for two hundred programs, and keeps counting below 20 ms.
    """
    try:
        yield
    finally:
        if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > 16_000:
            jax.clear_caches()


@pytest.fixture(autouse=True)
def _memory_maps() -> Iterator[None]:
    with _giving_back_memory_maps():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `make test-nightly`."""
    parser.addoption(
        "--cases", type=int, metavar="N", help="of what a test leaves to the night, run only N varied cases"
    )
    parser.addoption("--in-all", type=int, metavar="N", help="of each parametrised test, run only N varied cases")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the examples from depending on sources, but for `make fuzz`, which is to find new ones.

    Hypothesis also draws constants of the modules that a process has loaded so far: other ones in every process, and
    after every change.
    """
    if not config.pluginmanager.hasplugin("tests.fuzzing"):
        providers._get_local_constants = providers.Constants


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Iterator[None]:
    """Looks for doctests in the packages alone: among the tests that would import what runs in other processes."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks drawn tests, takes the mark `nightly` from the cases that it is to keep, and heeds the options.

    Memory maps are given back after each drawn example too: one test may compile hundreds of programs.
    """
    wrapped, repeated = set(), list[pytest.Item]()
    for item in items:
        if drawn := getattr(getattr(item, "obj", None), "hypothesis", None):
            item.add_marker("drawn")
            if id(drawn) not in wrapped:
                wrapped.add(id(drawn))
                drawn.inner_test = _giving_back_memory_maps()(drawn.inner_test)
        on_gpu = item.get_closest_marker("gpu") is not None
        if not on_gpu and any(mark.name == "nightly" and mark.kwargs for mark in item.own_markers):
            repeated.append(item)
    for cases in _by_test(repeated):
        mark = next(cases[0].iter_markers("nightly"))
        for item in _varied(cases, mark.kwargs["keep"]):
            item.own_markers.remove(next(item.iter_markers("nightly")))
    yield  # pytest leaves out what `-m` and `-k` do
    for option, limits in (("cases", [x for x in items if x.get_closest_marker("nightly")]), ("in_all", items)):
        if most := config.getoption(option):
            kept = {id(item) for cases in _by_test(limits) for item in _varied(cases, most)}
            left = {id(item) for item in limits} - kept
            config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
            items[:] = [item for item in items if id(item) not in left]


def _by_test(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The cases of each test."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    return cases.values()


def _varied(items: list[Any], count: int) -> list[Any]:
    """Takes `count` cases of a parametrised test, each in turn with the most new, else the rarest values."""
    if len(items) <= count:
        return items
    left, seen = dict[Any, list[set[Any]]](), collections.Counter[Any]()
    for item in items:
        values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
        left[item] = [set(itertools.combinations(values, size)) for size in (1, 2)]

    def worth(item: Any) -> tuple[int, int, int]:
        values, pairs = left[item]
        return len(values - seen.keys()), len(pairs - seen.keys()), -sum(seen[value] for value in values)

    for _ in range(count):
        seen.update(itertools.chain(*left.pop(max(left, key=worth))))
    return [item for item in items if item not in left]
