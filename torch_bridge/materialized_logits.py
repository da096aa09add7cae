"""`cross_entropy` of logits that are there already, with every option of `pallas_ce.cross_entropy`.

The statistics of a row are differentiable; the loss is written on top of them in PyTorch's own operators, which
differentiate everything else. Statistics and gradient are `pallas_ce`'s kernels' on a Hopper GPU, and elsewhere, and of
a few rows that are left over, PyTorch's, by chunks of which one wide copy exists at a time.
"""

from typing import Any, Literal

import jax
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pallas_ce.api import checks as arguments
from torch_bridge import checks, eager, exchange, losses, materialized_kernels
from torch_bridge.chunks import check_inplace, gradient_chunks, way, wide
from torch_bridge.materialized_kernels import Kernels, Loss
from torch_bridge.scaling import scale_


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float | Tensor = 0.0,
    z_loss: float | Tensor = 0.0,
    logit_softcap: float | None = None,
    ignore_index: int | None = -100,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    normalizer: float | Tensor | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    r"""The loss of `pallas_ce.cross_entropy`, whose docstring has the formula, on PyTorch tensors of any device.

    `torch.nn.functional.cross_entropy(logits.float(), target, …)` without a float32 copy of narrower logits, and with
    z-loss, soft cap, token weights and a normaliser. Beside logits and gradient it takes a few numbers a row, on a
    Hopper GPU where V' is a multiple of 16; elsewhere a chunk of rows in float32, too. `torch.compile` breaks its graph
    here, as there is nothing to fuse; `fullgraph=True` refuses that.

    Args:
        logits: `[..., V']` bfloat16, float16, float32 or float64; the class is the last axis. A slice is not copied.
        target: `[...]` integers; those outside `[0, vocab_size)` count as ignored.
        label_smoothing: in [0, 1]; differentiable, as a tensor.
        z_loss: factor β of `β·lse²`; likewise.
        logit_softcap: c > 0 for `c·tanh(x/c)`, or None.
        ignore_index: tokens with this target have loss 0 and gradient 0.
        class_weights: `[V]`, PyTorch's `weight`; a constant.
        token_weights: `[...]`, differentiable.
        reduction: "mean", "sum", or "none" for `[...]`.
        normalizer: what the mean divides by, in place of the (weighted) number of tokens that count.
        vocab_size: V; columns from there on are padding. Default V'.
        inplace_backward: write the gradient over the logits' memory, in the backward or at once. They must not be
            needed after this function, by anything: the values there are lost.

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
    arguments.check_reduction(reduction, normalizer, "auto")
    ignore_index = arguments.ignored(ignore_index)
    kind = checks.floating("logits", logits)
    spec = arguments.logits_spec(jax.ShapeDtypeStruct(logits.shape, kind), vocab_size, logit_softcap)
    leading, size = logits.shape[:-1], spec.vocab_size
    checks.labels(target, leading)
    checks.shape("token_weights", token_weights, leading)
    checks.shape("class_weights", class_weights, (size,))
    arguments.scalar("label_smoothing", label_smoothing, 0.0, 1.0)
    arguments.scalar("z_loss", z_loss)
    normalizer = arguments.normalizer(normalizer)
    check_inplace(logits, inplace_backward)
    checks.reverse_mode({"logits": logits})
    kernels = (
        materialized_kernels.serving(logits, spec)
        if eager.serves((logits, target, class_weights, token_weights))
        else None
    )
    at_once = kernels and reduction != "none" and logits.dtype != torch.float16  # whose gradients may underflow
    if kernels and at_once and kernels.serve_at_once(logits):
        tensors = {
            "target": checks.labels(target, leading),
            "class_weights": class_weights,
            "token_weights": None if token_weights is None else checks.by_row(token_weights, leading),
            "label_smoothing": checks.scalar(label_smoothing, 0.0, kind),
            "z_loss": checks.scalar(z_loss, 0.0, kind),
            "normalizer": checks.scalar(normalizer, None, kind),
        }
        return _at_once(kernels, reduction, ignore_index, logits, tensors, inplace_backward)
    ids = checks.labels(target, leading).long()
    dtype, smooth = wide(logits.dtype), isinstance(label_smoothing, Tensor) or label_smoothing != 0
    counts = (ids >= 0) & (ids < size)
    if ignore_index is not None:
        counts &= ids != ignore_index
    ids = ids.where(counts, 0)
    classes = None if class_weights is None else class_weights.detach().to(dtype)
    function: Any = _RowStatistics
    u = None if classes is None else classes / size
    lse, chosen, mean = function.apply(logits, ids, counts, u, kernels, spec.softcap, size, smooth, inplace_backward)

    return losses.cross_entropy(
        lse,
        chosen,
        mean if smooth else None,
        counts,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        token_weights=None if token_weights is None else checks.by_row(token_weights, leading),
        reduction=reduction,
        normalizer=normalizer,
        class_weights=None if classes is None or not size else (classes[ids], classes.mean()),
    ).reshape(leading if reduction == "none" else ())


def _at_once(
    kernels: Kernels,
    reduction: str,
    ignore_index: int | None,
    logits: Tensor,
    given: dict[str, Tensor | None],
    inplace: bool,
) -> Tensor:
    """The loss by one program of JAX's, which makes all gradients, too."""
    tensors = {name: x for name, x in given.items() if x is not None}
    exchange.check_one_device(logits=logits, **tensors)
    checks.reverse_mode(tensors)
    varied: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        varied = ("rows",) if logits.requires_grad else ()
        varied += tuple(name for name, x in tensors.items() if x.requires_grad and name != "class_weights")
    what = materialized_kernels.Loss(reduction, ignore_index, varied)
    function: Any = _LossAndGradients
    return function.apply(kernels, what, inplace, tuple(tensors), logits, *tensors.values())


class _LossAndGradients(torch.autograd.Function):
    """`(…, logits [..., V'], *tensors) -> loss`; all gradients but for the upstream scalar are made in the forward."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, what: Loss, inplace: bool, names: tuple[str, ...], logits: Tensor, *tensors: Tensor
    ) -> Tensor:
        # With a count of changes of its own: one of a view's would make PyTorch forget where the view comes from.
        rows = logits.data.view(-1, logits.shape[-1])
        if "rows" in what.differentiated and not inplace:
            rows = rows.clone()
        value, found = kernels.loss(what, {"rows": rows, **dict(zip(names, tensors, strict=True))})
        ctx.save_for_backward(*([rows] if "rows" in what.differentiated else []), *found)
        ctx.static = what.differentiated, names, logits.shape
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        differentiated, names, shape = ctx.static
        gradients = dict(zip(differentiated, ctx.saved_tensors, strict=True))
        if (for_rows := gradients.pop("rows", None)) is not None:
            if torch._C._autograd._get_current_graph_task_keep_graph():
                for_rows = for_rows.clone()
            scale_([for_rows], upstream)
            for_rows = for_rows.detach().view(shape)
        others = [
            (upstream * gradients[name]).to(gradients[name].dtype) if name in gradients else None for name in names
        ]
        return None, None, None, None, for_rows, *others


def _capped(rows: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
    """Logits in `dtype`; the rows themselves where nothing is to be done."""
    z = rows.to(dtype)
    return z if softcap is None else (z / softcap).tanh_().mul_(softcap)


class _RowStatistics(torch.autograd.Function):
    """`(logits [..., V'], ids [N], counts [N], u [V] or None, …) -> lse, logit of the id, Σ u·logits`, `[N]` each.

    0 in rows that do not count, and so are their gradients. Without u it is 1/V.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        counts: Tensor,
        u: Tensor | None,
        kernels: Kernels | None,
        softcap: float | None,
        size: int,
        smooth: bool,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = wide(logits.dtype)
        lse, chosen, mean = torch.zeros((3, ids.shape[0]), dtype=dtype, device=logits.device)
        whole_u = _padded(u, size, logits) if smooth and kernels else None
        for part, rows in way(kernels)(logits):
            if kernels and kernels.serve(rows):
                names = ("lse", "target_logit", *["mean_logit"][:smooth])
                found = kernels.statistics(names, rows, ids[part].int(), whole_u)
                for kept, x in zip((lse, chosen, mean), found, strict=False):
                    kept[part] = x
                continue
            z = _capped(rows[:, :size], softcap, dtype)
            lse[part] = z.logsumexp(1)
            chosen[part] = z.gather(1, ids[part, None])[:, 0]
            if smooth:
                mean[part] = z.mean(1) if u is None else torch.where(u == 0, 0.0, z).mv(u)
        found = [x.masked_fill(~counts, 0.0) for x in (lse, chosen, mean)]
        ctx.save_for_backward(logits, ids, ~counts | lse.isneginf(), u, found[0] if kernels else None)
        ctx.static = kernels, softcap, size, smooth, inplace_backward
        return found[0], found[1], found[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_lse: Tensor, for_chosen: Tensor, for_mean: Tensor) -> tuple[Tensor | None, ...]:
        """`p·g + onehot·g' + u·g''`, rounded once; a row of -inf throughout has no p, and gradient 0."""
        logits, ids, left_out, u, lse = ctx.saved_tensors
        kernels, softcap, size, smooth, inplace = ctx.static
        gradient, filled = gradient_chunks(logits, inplace, way(kernels))
        whole_u = _padded(u, size, logits) if smooth and kernels else None
        for part, rows, of_rows in filled:
            if kernels and kernels.serve(rows):
                if not inplace:
                    of_rows.copy_(rows)
                given = {"lse": for_lse, "target_logit": for_chosen} | ({"mean_logit": for_mean} if smooth else {})
                upstream = {name: x[part] for name, x in given.items()}
                kernels.replace_by_gradient(of_rows, ids[part].int(), lse[part], upstream, whole_u, ~left_out[part])
                continue
            z = _capped(rows[:, :size], softcap, for_lse.dtype)
            found = torch.softmax(z, 1).mul_(for_lse[part, None])
            found.scatter_add_(1, ids[part, None], for_chosen[part, None])
            if smooth:
                found.add_(for_mean[part, None] * (1.0 / size if u is None else u))
            if softcap is not None:
                found.mul_(1 - (z / softcap) ** 2)
            of_rows[:, :size] = found.masked_fill_(left_out[part, None], 0.0)
            of_rows[:, size:] = 0.0
        return gradient, *[None] * 8


def _padded(u: Tensor | None, size: int, logits: Tensor) -> Tensor:
    """u `[V']`, 0 for padding."""
    padded = torch.zeros(logits.shape[-1], dtype=wide(logits.dtype), device=logits.device)
    padded[:size] = 1.0 / size if u is None else u
    return padded
