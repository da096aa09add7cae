"""Sharing a device's memory: settings, the warning, and usage."""

import os
import subprocess
import sys

import jax
import pytest

import torch_bridge
from torch_bridge import memory


def test_importing_the_bridge_needs_no_pytorch_and_switches_preallocation_off():
    program = (
        "import os, sys; sys.modules['torch'] = None; import torch_bridge\n"
        "assert os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'\n"
        "assert os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] == 'cuda_async'\n"
        "try: torch_bridge.linear_cross_entropy\n"
        "except ModuleNotFoundError as error: assert '.[torch]' in str(error), error\n"
        "else: raise SystemExit('no error')"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    subprocess.run([sys.executable, "-W", "error", "-c", program], env=environment, check=True)


@pytest.mark.parametrize(
    "name", ["XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"]
)
def test_settings_of_the_users_own_are_left_alone(monkeypatch, name):
    monkeypatch.setattr(memory.xla_bridge, "backends_are_initialized", lambda: False)
    environment = {name: "whatever"}
    memory.share_device(environment)
    assert environment == {name: "whatever"}


def test_a_jax_that_has_taken_a_gpu_already_is_warned_of(monkeypatch):
    jax.devices()
    environment: dict[str, str] = {}
    memory.share_device(environment)  # on a CPU there is nothing to warn of
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(UserWarning, match="Import torch_bridge first"):
        memory.share_device(environment)
    assert environment == {}


@pytest.fixture
def told(monkeypatch):
    """What CUDA is told of pools; the third device has none."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="PyTorch's build for CPUs alone comes without it")
    success, unsupported = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    found = []

    def default_pool(device):
        return (unsupported, None) if device == 2 else (success, f"pool of {device}")

    def set_attribute(*given):
        found.append(given)
        return (success,)

    monkeypatch.setattr(driver, "cuDeviceGet", lambda ordinal: (success, ordinal))
    monkeypatch.setattr(driver, "cuDeviceGetDefaultMemPool", default_pool)
    monkeypatch.setattr(driver, "cuMemPoolSetAttribute", set_attribute)
    return found


def test_cuda_is_told_to_keep_the_pool_of_the_settings_that_were_made_and_no_other(told):
    for name in memory.SHARING:
        for other in (memory.SHARING | {name: "other"}, {k: v for k, v in memory.SHARING.items() if k != name}):
            memory.keep_pool(0, other)
    assert not told
    memory.keep_pool(1, memory.SHARING)
    ((pool, attribute, value),) = told
    assert (pool, attribute.name, int(value)) == ("pool of 1", "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD", 2**64 - 1)


def test_a_pool_that_is_not_kept_is_warned_of(told, monkeypatch):
    with pytest.warns(UserWarning, match="slower.*CUDA_ERROR_NOT_SUPPORTED"):
        memory.keep_pool(2, memory.SHARING)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.warns(UserWarning, match="pip install cuda-bindings"):
        memory.keep_pool(0, memory.SHARING)
    assert not told


def test_usage_is_shown_and_unknown_without_a_gpu():
    assert "12 MiB in tensors" in str(memory.MemoryUsage(torch_allocated=12 * 2**20))
    assert "unknown" in str(memory.memory_usage())


def test_everything_promised_is_there_and_nothing_else():
    assert all(callable(getattr(torch_bridge, name)) for name in torch_bridge.__all__)
    assert set(torch_bridge.__all__) < set(dir(torch_bridge))
    with pytest.raises(AttributeError, match="no attribute 'linear'"):
        _ = torch_bridge.linear
