"""PyTorch bridge: the losses of `pallas_ce` for PyTorch models, on the model's own tensors.

`linear_cross_entropy`, `linear_log_probs` and `linear_row_statistics` are the functions, `cross_entropy` and
`selective_log_softmax` those of stored logits, `LinearCrossEntropyLoss` the module, `PipelineFusedLoss` the loss of a
pipeline-parallel model, `vocab_parallel_cross_entropy` that of a head split over a process group, `patch_causal_lm`
the one line for a Hugging Face model.
`to_jax` and `to_torch` exchange tensors and arrays, `memory_usage` shows what both frameworks hold of a device.

Needs the extra `torch`. Importing this package does not import PyTorch; it keeps JAX, where that has not started yet,
from taking most of a GPU's memory for itself (see `torch_bridge.memory`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_bridge import memory

if TYPE_CHECKING:
    from torch_bridge.exchange import to_jax as to_jax
    from torch_bridge.exchange import to_torch as to_torch
    from torch_bridge.functions import linear_cross_entropy as linear_cross_entropy
    from torch_bridge.functions import linear_row_statistics as linear_row_statistics
    from torch_bridge.huggingface import patch_causal_lm as patch_causal_lm
    from torch_bridge.huggingface import unpatch_causal_lm as unpatch_causal_lm
    from torch_bridge.log_probs import linear_log_probs as linear_log_probs
    from torch_bridge.materialized_logits import cross_entropy as cross_entropy
    from torch_bridge.memory import memory_usage as memory_usage
    from torch_bridge.modules import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from torch_bridge.pipeline import PipelineFusedLoss as PipelineFusedLoss
    from torch_bridge.pipeline import put_head_back as put_head_back
    from torch_bridge.pipeline import returning as returning
    from torch_bridge.pipeline import take_head as take_head
    from torch_bridge.selective import selective_log_softmax as selective_log_softmax
    from torch_bridge.vocab_parallel import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy

_HOMES = {
    "LinearCrossEntropyLoss": "modules",
    "PipelineFusedLoss": "pipeline",
    "cross_entropy": "materialized_logits",
    "linear_cross_entropy": "functions",
    "linear_log_probs": "log_probs",
    "linear_row_statistics": "functions",
    "memory_usage": "memory",
    "patch_causal_lm": "huggingface",
    "put_head_back": "pipeline",
    "returning": "pipeline",
    "selective_log_softmax": "selective",
    "take_head": "pipeline",
    "to_jax": "exchange",
    "to_torch": "exchange",
    "unpatch_causal_lm": "huggingface",
    "vocab_parallel_cross_entropy": "vocab_parallel",
}

__all__ = list(_HOMES)

memory.share_device()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"torch_bridge.{name} needs PyTorch: pip install 'pallas-ce[torch]'", name="torch"
        ) from error
