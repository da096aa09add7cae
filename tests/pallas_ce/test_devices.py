"""Statements on devices agree: facts, defaults, the backends' own tables, names of GPUs, and the page."""

import re
from pathlib import Path

import devices_table
import jax.numpy as jnp
import pytest

from pallas_ce.backends import device as targets
from pallas_ce.backends import select
from pallas_ce.backends.triton import configs
from pallas_ce.head import HeadSpec

ROOT = Path(__file__).parents[2]
CAPABILITIES = [*targets.GPUS, "7.5"]

# As CUDA names them.
KINDS = {
    "NVIDIA A100-SXM4-80GB": "8.0",
    "NVIDIA A30": "8.0",
    "NVIDIA A10": "8.6",
    "NVIDIA A10G": "8.6",
    "NVIDIA RTX A6000": "8.6",
    "NVIDIA GeForce RTX 3080 Ti Laptop GPU": "8.6",
    "NVIDIA L4": "8.9",
    "NVIDIA L40S": "8.9",
    "NVIDIA RTX 6000 Ada Generation": "8.9",
    "NVIDIA GeForce RTX 4090": "8.9",
    "NVIDIA H100 80GB HBM3": "9.0",
    "NVIDIA H20": "9.0",
    "NVIDIA GH200 480GB": "9.0",
    "NVIDIA B200": "10.0",
    "NVIDIA GB200": "10.0",
    "NVIDIA B300 SXM6 AC": "10.3",
    "NVIDIA GB300": "10.3",
    "NVIDIA GeForce RTX 5090": "12.0",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "12.0",
    "NVIDIA GB10": "12.1",
    # Turing and Volta, one of whose names has an Ada's number in it.
    "Quadro RTX 4000": None,
    "Tesla V100-SXM2-16GB": None,
    "cpu": None,
}


@pytest.mark.parametrize(("kind", "capability"), KINDS.items(), ids=KINDS)
def test_a_model_is_known_by_its_name(kind: str, capability: str | None) -> None:
    assert targets.compute_capability(kind) == capability


def test_each_name_stands_for_one_architecture() -> None:
    for capability, gpus in targets.GPUS.items():
        for name in gpus.models:
            assert targets.compute_capability(f"NVIDIA {name.replace('x', '0')} 80GB") == capability


def test_the_facts_have_each_architecture_that_triton_has_tiles_for() -> None:
    found = {int(capability.replace(".", "")) for capability, gpus in targets.GPUS.items() if "triton" in gpus.kernels}
    assert found == set(configs.NARROW)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_facts_are_those_of_the_backends(capability: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(targets, "local_cuda", lambda: "NVIDIA Test")
    monkeypatch.setattr(targets, "compute_capability", lambda kind: capability)
    spec = HeadSpec(64, 128, 128, 0, jnp.dtype(dtype), None)
    for name in devices_table.IMPLEMENTATIONS:
        served = select.load(name).refusal(spec) is None
        assert (devices_table.status(name, capability, dtype) is not None) == served, name


RESULTS = [
    *devices_table.XLA_RESULTS.values(),
    *(file for gpus in targets.GPUS.values() for file in gpus.kernels.values()),
]
FILES = sorted({file for file in RESULTS if file})


@pytest.mark.parametrize("file", FILES)
def test_what_is_called_tested_has_its_results_in_the_repository(file: str) -> None:
    assert (ROOT / file).is_file()


def test_the_page_has_the_table_of_the_facts() -> None:
    page = (ROOT / "docs" / "adopting.md").read_text()
    found = re.search(r"^\| compute capability .*?\n(?=\n)", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert found[0].rstrip("\n") == devices_table.table()
