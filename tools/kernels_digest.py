"""Prints a digest of the kernels as they are traced for an H200, by which a result file is known to be the code's.

usage: python -m tools.kernels_digest        (from the project's root)

Nothing is compiled, and no GPU is needed. A kernel of Mosaic's is traced with its body. Of Triton's the trace has tiles
and constants only, so their source counts, too, without comments and docstrings.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_ce import cross_entropy, linear_cross_entropy, linear_distillation, linear_top_k
from pallas_ce.backends.triton import configs

_N, _V, _H = 4096, 32768, 1024
_LOGITS, _LABELS = jax.ShapeDtypeStruct((_N, _V), jnp.bfloat16), jax.ShapeDtypeStruct((_N,), jnp.int32)
_HEAD = jax.ShapeDtypeStruct((_N, _H), jnp.bfloat16), jax.ShapeDtypeStruct((_V, _H), jnp.bfloat16)


def _calls() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Programs by name, and what they take."""
    for name in ("mosaic_gpu", "triton"):
        loss: Callable[..., Any] = functools.partial(linear_cross_entropy, implementation=name)
        yield f"forward {name}", loss, (*_HEAD, _LABELS)
        for mode in ("in_forward", "recompute"):
            yield f"{mode} {name}", jax.grad(functools.partial(loss, backward=mode), (0, 1)), (*_HEAD, _LABELS)
    stored = functools.partial(cross_entropy, implementation="mosaic_gpu")
    yield "stored logits", jax.value_and_grad(stored), (_LOGITS, _LABELS)
    yield "top-k", functools.partial(linear_top_k, k=64, implementation="mosaic_gpu"), _HEAD
    two = functools.partial(linear_distillation, implementation="triton")
    yield "distillation", jax.value_and_grad(two, (0, 1)), (*_HEAD, *_HEAD)


CALLS = {name: (program, arrays) for name, program, arrays in _calls()}

# Operations of JAX that hold a kernel: Mosaic's, by version, and ours.
_KERNELS = ("mpmd_map", "core_map", "pallas_call", "pallas_ce_triton")


def kernels(name: str) -> list[str]:
    """The kernels of a call, in the order of the program, without their names.

    Raises:
        RuntimeError: there are none, as on a jax that has another operation for them.
    """
    program, arrays = CALLS[name]
    device = AbstractDevice("NVIDIA H200", 132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        found = list(_found(jax.make_jaxpr(program)(*arrays).jaxpr))
    if not found:
        raise RuntimeError(f"jax {jax.__version__} shows no kernel of {name} among {', '.join(_KERNELS)}")
    return [re.sub(r"0x\w+|\bname=\S+", "", str(operation)) for operation in found]


def _found(jaxpr: Any) -> Iterator[Any]:
    for operation in jaxpr.eqns:
        if operation.primitive.name in _KERNELS:
            yield operation
        else:
            for inner in jax.tree.leaves(list(operation.params.values())):
                inner = getattr(inner, "jaxpr", inner)
                yield from _found(inner) if hasattr(inner, "eqns") else ()


def statements(source: str) -> str:
    """A module's source without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


@functools.cache
def digest() -> str:
    """Of all calls' kernels."""
    sources = [Path(configs.__file__).with_name(name).read_text() for name in ("kernel.py", "product_kernel.py")]
    parts = [*map(statements, sources), *(kernel for name in CALLS for kernel in kernels(name))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def outdated(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Names each result file that this jax measured on a GPU with kernels that are not the code's, or not known."""
    for name, document in documents.items():
        machine = document["machine"]
        theirs = machine.get("kernels", "unknown")
        if machine["device"] != "cpu" and machine["jax"] == jax.__version__ and theirs != digest():
            yield f"{name}.json was measured with kernels {theirs}; the code's are {digest()}"


if __name__ == "__main__":
    print(digest())
