"""The functions of a head as PyTorch operators and autograd functions: what they save, which gradients they make.

PyTorch keeps compiled graphs on disk by the names of their operators. So the operators' namespace names the code behind
them: results of other code may differ in number, shapes and meaning.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import torch

import pallas_ce


def namespace(folders: Iterable[Path], versions: str) -> str:
    """A name for the sources in the folders, and for versions of what else the results depend on."""
    digest = hashlib.sha256(versions.encode())
    for source in sorted(source for folder in folders for source in folder.rglob("*.py")):
        digest.update(source.read_bytes())
    return f"pallas_ce_{digest.hexdigest()[:16]}"


NAMESPACE = namespace(
    [Path(pallas_ce.__file__).parent, Path(__file__).parents[1]],
    f"{pallas_ce.__version__} {jax.__version__}",  # the package's for an installation without sources
)
OPERATORS: Any = getattr(torch.ops, NAMESPACE)


def register(name: str, function: Callable[..., Any], schema: str, shapes: Callable[..., Any]) -> Any:
    """A PyTorch operator that changes none of its arguments; `shapes` makes empty results for tracing."""
    made = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema)
    made.register_fake(shapes)
    return made
