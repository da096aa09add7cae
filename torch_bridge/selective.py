"""`selective_log_softmax` in PyTorch: what reinforcement learning libraries import under that name, in O(rows) memory.

On a Hopper GPU `pallas_ce`'s kernels serve one index a row, where V is a multiple of 16. Elsewhere PyTorch takes rows
in chunks (64 MiB in float32 at most, and a sixteenth of the logits) and holds a float32 copy of one chunk. The backward
makes the gradient the same way, in the logits' dtype.
"""

import torch

from torch_bridge.dlpack import exchange
from torch_bridge.materialized import rows
from torch_bridge.materialized.chunks import check_inplace


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor, *, inplace_backward: bool = False) -> torch.Tensor:
    r"""`log_softmax(logits)` at `index` only, for each row `z_i - log Σ_v exp z_v`.

    A drop-in for the function of this name in TRL: `trl.trainer.utils.selective_log_softmax = selective_log_softmax`.
    It equals `logits.float().log_softmax(-1).gather(-1, index)`, also for bfloat16 logits, and returns float32 for them
    where TRL's returns bfloat16. Beside logits and gradient it takes a chunk of rows and a few numbers a row.

    Args:
        logits: `[..., V]` bfloat16, float16, float32 or float64.
        index: `[...]` or `[..., K]` integers in `[0, V)`.
        inplace_backward: write the gradient over the logits' memory. They must not be needed after this function, by
            anything: the values there are lost. What `torch.compile` compiles plans its memory itself, and leaves them.

    Returns:
        Tensor: the shape of `index`, float32 (float64 for float64); differentiable once.

    Raises:
        ValueError: shapes that do not fit, `inplace_backward` on a leaf.
        TypeError: dtypes that do not fit.
        RuntimeError: from PyTorch, an index out of range.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        >>> import torch
        >>> from torch_bridge.selective import selective_log_softmax
        >>> logits = torch.tensor([[1.0, 2.0, 5.0], [3.0, 3.0, 2.0]]).log()
        >>> selective_log_softmax(logits, torch.tensor([2, 0])).exp()
        tensor([0.6250, 0.3750])
        >>> selective_log_softmax(logits, torch.tensor([[2, 0], [0, 1]])).exp()
        tensor([[0.6250, 0.1250],
                [0.3750, 0.3750]])

    References:
        "Reducing VRAM Footprint in PPO and GRPO Using Selective Log-Softmax".
    """
    return _picked(logits, index, 1.0, inplace_backward)


def _picked(logits: torch.Tensor, index: torch.Tensor, temperature: float, inplace_backward: bool) -> torch.Tensor:
    for name, tensor in (("logits", logits), ("index", index)):
        exchange.check_dense(name, tensor)
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise TypeError(f"logits have dtype {logits.dtype}; supported are bfloat16, float16, float32 and float64")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"index has dtype {index.dtype}; it must be an integer one")
    leading = logits.shape[:-1]
    if logits.ndim < 1 or index.shape[: len(leading)] != leading or index.ndim > logits.ndim:
        raise ValueError(
            f"index has shape {tuple(index.shape)}; logits' leading shape {tuple(leading)} is needed, or that and an "
            "axis of K entries"
        )
    check_inplace(logits, inplace_backward)
    if index.numel() and not logits.shape[-1]:
        raise ValueError(f"index asks for entries of logits of shape {tuple(logits.shape)}, which have none")
    picked = index.reshape(leading.numel(), index.shape[len(leading) :].numel()).long()
    options = rows.Options(logits.shape[-1], temperature=temperature, inplace=inplace_backward)
    return rows.row_statistics(logits, picked, None, None, options)["log_prob"].reshape(index.shape)


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = False) -> torch.Tensor:
    """`selective_log_softmax` under the name and with the arguments that verl calls it by.

    verl's own has `inplace_backward=True` by default, which overwrites the logits.
    """
    return selective_log_softmax(logits, labels, inplace_backward=inplace_backward)


def log_probs_from_logits(logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """`selective_log_softmax(logits / temperature, labels)`, under OpenRLHF's name and with its arguments.

    The logits are left as they are, where OpenRLHF divides them in place: a chunk at a time is divided, in float32.

    Args:
        logits: `[..., V]`.
        labels: `[...]` integers.
        temperature: above 0.

    Returns:
        Tensor: `[...]` float32 (float64 for float64).

    Raises:
        ValueError: a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be above 0")
    return _picked(logits, labels, temperature, inplace_backward=False)
