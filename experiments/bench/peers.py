"""Other libraries' losses in PyTorch, each `(hidden, weight, labels) -> mean loss`, made only where it is installed."""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

Loss = Callable[[Any, Any, Any], Any]


class Peer(NamedTuple):
    """A contender.

    Attributes:
        name: what tables call it.
        module: what must be installed for it.
        package: the distribution that has the module.
        make: imports it and makes the loss.
    """

    name: str
    module: str
    package: str
    make: Callable[[], Loss]

    def missing(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed (pip install {self.package})"
        return None


def failure(error: Exception) -> str:
    """Why a peer has no results, in a line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def torch_missing(on_gpu: bool, or_else: str) -> str | None:
    """Why PyTorch cannot measure here, and what to do `or_else` without a GPU; None where it can."""
    try:
        import torch
    except ImportError:
        return "this is measured in PyTorch, which is missing: pip install 'pallas-ce[torch]'"
    return f"PyTorch finds no GPU{or_else}" if on_gpu and not torch.cuda.is_available() else None


def _stored(wide: bool) -> Loss:
    from torch.nn import functional

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        logits = hidden @ weight.T
        return functional.cross_entropy(logits.float() if wide else logits, labels)

    return loss


def _compiled() -> Loss:
    import torch

    torch.compiler.reset()  # after 8 shapes it would compile no more, and after the first its sizes would be dynamic
    compiled: Loss = torch.compile(_stored(wide=True))
    return compiled


def _cce(filter_eps: Any) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, labels: linear_cross_entropy(
        hidden, weight, labels, impl="cce", filter_eps=filter_eps
    )


def _liger(chunks: int) -> Loss:
    """Its chunks of logits have `chunks` times the memory of the hidden states; by default once."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return functools.partial(liger_fused_linear_cross_entropy, chunk_mem_const=chunks)


def _liger_cute_stored() -> Loss:
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90

    loss: Loss = fused_linear_cross_entropy_sm90.liger_fused_linear_cross_entropy_sm90
    return loss


def _liger_cute_streamed() -> Loss:
    from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90

    # Its check of the labels would wait for the GPU, which no other contender does.
    os.environ[fused_scaled_cross_entropy_sm90.VALIDATE_TARGETS_ENV] = "0"
    losses = fused_scaled_cross_entropy_sm90.LigerFusedScaledCrossEntropySM90Function
    return lambda hidden, weight, labels: losses.apply(hidden, weight, labels).mean()


def _quack() -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        # Version 0.6.5 refuses a chunk that equals the width, and 4096 is its default.
        chunk = 2048 if hidden.shape[-1] != 2048 else 4096
        return chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=chunk)

    return loss


PEERS = (
    Peer("torch, bfloat16 logits", "torch", "torch", lambda: _stored(wide=False)),
    Peer("torch, float32 logits", "torch", "torch", lambda: _stored(wide=True)),
    Peer("torch.compile", "torch", "torch", _compiled),
    Peer("CCE", "cut_cross_entropy", "cut-cross-entropy", lambda: _cce("auto")),
    Peer("CCE, exact gradients", "cut_cross_entropy", "cut-cross-entropy", lambda: _cce(None)),
    Peer("Liger", "liger_kernel", "liger-kernel", lambda: _liger(1)),
    Peer("Liger, C 16", "liger_kernel", "liger-kernel", lambda: _liger(16)),
    Peer("Liger CuTe, stored logits", "cutlass", "nvidia-cutlass-dsl", _liger_cute_stored),
    Peer("Liger CuTe, streamed", "cutlass", "nvidia-cutlass-dsl", _liger_cute_streamed),
    Peer("quack", "quack", "quack-kernels", _quack),
)
