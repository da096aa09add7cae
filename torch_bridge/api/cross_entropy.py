"""`cross_entropy` of stored logits, with the loss's options of `pallas_ce.cross_entropy`.

Where the kernels serve all rows at once, one program makes the loss and its gradients. Otherwise the loss is written in
PyTorch's own operators on row statistics that are differentiable in the logits.
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from pallas_ce.api import integration
from pallas_ce.api.integration import documented
from torch_bridge.api import checks
from torch_bridge.api.options import LossOptions
from torch_bridge.autograd import first_order, graph
from torch_bridge.dlpack import exchange
from torch_bridge.materialized import kernels, losses, one_program, rows
from torch_bridge.materialized.chunks import check_inplace, wide

_CONSTANT = ("target", "class_weights")


@documented
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
    **options: Unpack[LossOptions],
) -> Tensor:
    r"""The loss of `pallas_ce.cross_entropy`, whose docstring has the formula, on PyTorch tensors (CPU or CUDA).

    `torch.nn.functional.cross_entropy(logits.float(), target, …)` without a float32 copy of narrower logits, and with
    z-loss, soft cap, token weights and a normaliser. Beside logits and gradient it takes a few numbers a row, on a
    Hopper GPU where V' is a multiple of 16; elsewhere a chunk of rows in float32, too.

    Args:
        logits: `[..., V']` bfloat16, float16, float32 or float64; the class is the last axis. A slice is not copied.
        target: `[...]` integers; those outside `[0, vocab_size)` count as ignored.
        logit_softcap: c > 0 for `c·tanh(x/c)`, or None.
        vocab_size: V; columns from there on are padding. Default V'.
        inplace_backward: write the gradient over the logits' memory, in the backward or at once. They must not be
            needed after this function, by anything: the values there are lost. What `torch.compile` compiles plans
            its memory itself, and leaves them.

    Returns:
        Tensor: float32 (float64 for float64), `[]` or `[...]`; 0.0 when no token counts; differentiable once.

    Raises:
        ValueError: shapes or values that do not fit, `inplace_backward` on a leaf.
        TypeError: dtypes that do not fit.
        NotImplementedError: forward-mode differentiation and transforms of `torch.func`.

    Example:
        >>> import torch
        >>> from torch_bridge import cross_entropy
        >>> logits = torch.zeros(2, 3, 4, requires_grad=True)
        >>> target = torch.tensor([[0, 1, 2], [3, -100, -100]])
        >>> loss = cross_entropy(logits, target)
        >>> loss.backward()
        >>> print(f"{loss.item():.4f}", logits.grad[1, 0])
        1.3863 tensor([ 0.0625,  0.0625,  0.0625, -0.1875])

    References:
        See `pallas_ce.cross_entropy`.
    """
    if checks.floating("logits", logits).ndim < 1:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; they must be [..., V]")
    size, leading = checks.size(vocab_size, logits.shape[-1], "the logits' columns"), logits.shape[:-1]
    check_inplace(logits, inplace_backward)
    takes = checks.loss(leading, size, logits.dtype, target, **options)
    ignore_index = integration.checks.ignored(options.get("ignore_index", -100))
    reduction = options.get("reduction", "mean")
    named: dict[str, Any] = {"target": target, **options}
    tensors = {name: take(named.get(name)) for name, take in takes.items() if take is not None}
    everything = {"logits": logits, **tensors}
    exchange.check_one_device(everything)
    first_order.reverse_mode(everything)
    # Gradients in float16 may underflow before the upstream scalar is known.
    if reduction != "none" and logits.dtype != torch.float16 and graph.serves((logits, *tensors.values())):
        serving = kernels.serving(logits, rows.spec(logits, size, logit_softcap))
        if serving and serving.serve_at_once(logits):
            return one_program.cross_entropy(serving, reduction, ignore_index, logits, tensors, inplace_backward)
    ids = tensors["target"].long()
    counted = losses.counted(ids, size, ignore_index)
    ids = ids.where(counted, 0)
    class_weights = tensors.get("class_weights")
    classes = None if class_weights is None else class_weights.detach().to(wide(logits.dtype))
    # Numbers whose term is left out are None, and left to the defaults.
    once: dict[str, Any] = {
        name: first_order.differentiable_once(x) for name, x in tensors.items() if name not in _CONSTANT
    }
    smoothed = "label_smoothing" in once
    static = rows.Options(size, smoothed, logit_softcap, inplace=inplace_backward)
    mean_weights = classes / size if smoothed and classes is not None else None
    found = rows.row_statistics(logits, ids[:, None], counted, mean_weights, static)
    return losses.cross_entropy(
        found["lse"],
        found["log_prob"][:, 0],
        found.get("mean_log_prob"),
        counted,
        reduction=reduction,
        class_weights=None if classes is None or not size else classes[ids],
        **once,
    ).reshape(leading if reduction == "none" else ())
