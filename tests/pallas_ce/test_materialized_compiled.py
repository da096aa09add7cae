"""What the compiler makes of stored logits: dlogits in their buffer, and no float32 copy of them."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_ce import chunked_cross_entropy, cross_entropy, selective_log_softmax
from tests import compile_for_h200 as h200

N, V = 8192, 131072
BLOCK_BYTES = 8 * 2**20

GRADIENTS = {
    "cross_entropy": jax.value_and_grad(cross_entropy),
    "cross_entropy by XLA": jax.value_and_grad(lambda z, t: cross_entropy(z, t, implementation="xla")),
    "chunked_cross_entropy": jax.value_and_grad(chunked_cross_entropy),
    "every option": jax.value_and_grad(
        lambda z, t: cross_entropy(
            z, t, label_smoothing=0.1, z_loss=1e-4, logit_softcap=30.0, token_weights=jnp.ones(N), return_metrics=True
        ),
        has_aux=True,
    ),
    "by row": jax.value_and_grad(lambda z, t: jnp.sum(jnp.square(cross_entropy(z, t, reduction="none")))),
    "selective": jax.value_and_grad(lambda z, t: jnp.sum(jnp.square(selective_log_softmax(z, t)))),
    "selective of several": jax.value_and_grad(
        lambda z, t: jnp.sum(jnp.square(selective_log_softmax(z, jnp.stack([t, t + 1], 1))))
    ),
}
BY_XLA = {"cross_entropy by XLA", "selective of several"}
PROGRAMS: dict[str, Any] = GRADIENTS | {"value": cross_entropy, "selective value": selective_log_softmax}


def _compiled(device: str, name: str, dtype: Any, donate: bool) -> h200.Compiled:
    function, donated, shapes = PROGRAMS[name], (0,) if donate else (), (((N, V), dtype), ((N,), jnp.int32))
    if device == "h200" and name not in BY_XLA:
        return h200.clean(function, *h200.arrays(*shapes), donate_argnums=donated)
    if device == "h200":
        compiled, _ = h200.compile_for_h200(function, *h200.arrays(*shapes), donate_argnums=donated)
    else:
        arguments = itertools.starmap(jax.ShapeDtypeStruct, shapes)
        compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
    return h200.Compiled(compiled.as_text(), compiled.memory_analysis(), 0)


def _copies(text: str, kinds: str = "copy(?:-start)?") -> int:
    return len(re.findall(rf"= \(?\w+\[{N},{V}\][^=]* (?:{kinds})\(", text))


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_donated_buffer_becomes_the_gradient_with_no_copy_of_it(device: str, dtype: Any, name: str) -> None:
    """Two kernels read it twice and write it once: beside them, XLA reads and writes nothing but vectors."""
    text, memory, kernels = _compiled(device, name, dtype, donate=True)
    assert memory.alias_size_in_bytes >= N * V * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes <= 4 * BLOCK_BYTES
    assert _copies(text) == 0
    if dtype == jnp.bfloat16:
        assert f"f32[{N},{V}]" not in text
    if device == "h200" and name not in BY_XLA:
        assert kernels == 2
        assert _copies(text[text.index("ENTRY") :], "copy(?:-start)?|fusion|while") == 0
        assert len(re.findall(r" fusion\(", text)) <= 24


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize(
    ("name", "blocks", "copies"), [("cross_entropy", 4, 1), ("value", 2, 0), ("selective value", 2, 0)]
)
def test_logits_that_are_kept_are_copied_once_for_a_gradient(device: str, name: str, blocks: int, copies: int) -> None:
    """Values alone take a block."""
    text, memory, _ = _compiled(device, name, jnp.bfloat16, donate=False)
    assert memory.temp_size_in_bytes <= blocks * BLOCK_BYTES
    assert _copies(text) == copies
    assert f"f32[{N},{V}]" not in text


@pytest.mark.parametrize(("v", "copied"), [(V, False), (V + 16, True)])
def test_rows_of_larger_logits_are_copied_only_where_they_may_begin_anywhere(v: int, copied: bool) -> None:
    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits[1:], labels)

    arguments = h200.arrays(((N + 1, v), jnp.bfloat16), ((N,), jnp.int32))
    text, memory, kernels = h200.clean(loss, *arguments)
    assert kernels == 1
    assert bool(h200.slices_of_kernels(text)) is not copied
    assert (memory.temp_size_in_bytes > 2 * N * v) is copied


def test_logits_made_inside_a_step_give_their_buffer_to_the_gradient() -> None:
    """One array of the logits' size in the whole step, hidden states and weight differentiated."""
    n, h, v = 4096, 64, 32768

    def step(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        return cross_entropy(hidden @ weight, labels, z_loss=1e-4)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, h), (h, v))]
    labels = jax.ShapeDtypeStruct((n,), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(step, argnums=(0, 1))).lower(*arguments, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * n * v + 4 * BLOCK_BYTES + 8 * v * h
