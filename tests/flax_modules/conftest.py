import jax
import jax.numpy as jnp
import pytest

from flax_modules import linen
from flax_modules import nnx as on_nnx
from tests.flax_modules.oracle import FEATURES


@pytest.fixture
def hidden():
    """Hidden states of two rows of seven tokens."""
    return jax.random.normal(jax.random.key(0), (2, 7, FEATURES))


@pytest.fixture
def labels():
    """Labels: the last column of the vocabulary, and ignored ones at the end of a row."""
    return jnp.array([[3, 36, 0, 5, 11, 2, 9], [1, 1, 30, 8, 22, -100, -100]])


@pytest.fixture(params=[linen, on_nnx], ids=["linen", "nnx"])
def framework(request):
    """The package whose heads are tested."""
    return request.param


@pytest.fixture(params=[None, (4, 2)], ids=["one device", "fsdp 4 x tp 2"])
def shape(request):
    """The shape of the mesh that a trainer's model is laid out on, or None."""
    if request.param and jax.device_count() < 8:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return request.param
