"""PyTorch bridge: the losses of `pallas_ce` for PyTorch models, on the model's own tensors.

`linear_cross_entropy`, `linear_log_probs` and `linear_row_statistics` take a head, `linear_distillation` two;
`cross_entropy` and `selective_log_softmax` take stored logits. `LinearCrossEntropyLoss` is the module.
`PipelineFusedLoss` serves a pipeline-parallel model, `vocab_parallel_cross_entropy`, `vocab_parallel_log_probs` and
`vocab_parallel_distillation` heads split over a process group, and `patch_causal_lm` a Hugging Face model. `to_jax` and
`to_torch` exchange tensors and arrays; `memory_usage` shows a device's memory.

Needs the extra `torch`. Importing this package does not import PyTorch; it keeps a JAX that has not started yet from
taking most of a GPU's memory (see `torch_bridge.memory`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_bridge import memory

if TYPE_CHECKING:
    from torch_bridge.api.cross_entropy import cross_entropy as cross_entropy
    from torch_bridge.api.distillation import linear_distillation as linear_distillation
    from torch_bridge.api.distillation import vocab_parallel_distillation as vocab_parallel_distillation
    from torch_bridge.api.linear import linear_cross_entropy as linear_cross_entropy
    from torch_bridge.api.linear import linear_log_probs as linear_log_probs
    from torch_bridge.api.linear import linear_row_statistics as linear_row_statistics
    from torch_bridge.api.modules import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from torch_bridge.api.vocab_parallel import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from torch_bridge.api.vocab_parallel import vocab_parallel_log_probs as vocab_parallel_log_probs
    from torch_bridge.dlpack.exchange import to_jax as to_jax
    from torch_bridge.dlpack.exchange import to_torch as to_torch
    from torch_bridge.integrations.huggingface import patch_causal_lm as patch_causal_lm
    from torch_bridge.integrations.huggingface import unpatch_causal_lm as unpatch_causal_lm
    from torch_bridge.integrations.pipeline import PipelineFusedLoss as PipelineFusedLoss
    from torch_bridge.integrations.pipeline import put_head_back as put_head_back
    from torch_bridge.integrations.pipeline import returning as returning
    from torch_bridge.integrations.pipeline import take_head as take_head
    from torch_bridge.memory import memory_usage as memory_usage
    from torch_bridge.selective import selective_log_softmax as selective_log_softmax

_HOMES = {
    name: home
    for home, names in {
        "api.cross_entropy": ["cross_entropy"],
        "api.distillation": ["linear_distillation", "vocab_parallel_distillation"],
        "api.linear": ["linear_cross_entropy", "linear_log_probs", "linear_row_statistics"],
        "api.modules": ["LinearCrossEntropyLoss"],
        "api.vocab_parallel": ["vocab_parallel_cross_entropy", "vocab_parallel_log_probs"],
        "dlpack.exchange": ["to_jax", "to_torch"],
        "integrations.huggingface": ["patch_causal_lm", "unpatch_causal_lm"],
        "integrations.pipeline": ["PipelineFusedLoss", "put_head_back", "returning", "take_head"],
        "memory": ["memory_usage"],
        "selective": ["selective_log_softmax"],
    }.items()
    for name in names
}

__all__ = list(_HOMES)

memory.share_device()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module(f"{__name__}.versions")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"torch_bridge.{name} needs PyTorch: pip install '.[torch]' in a clone of pallas-ce", name="torch"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
