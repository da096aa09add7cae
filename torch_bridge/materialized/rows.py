"""Statistics of rows of stored logits, and their gradient: the operator `materialized_row_statistics`.

Rows are taken a chunk at a time, by `pallas_ce`'s kernels on a Hopper GPU. Elsewhere, and for a few rows that are left
over, PyTorch makes one copy of the chunk in float32. With z the (capped) logits, p = softmax(z), and cotangents g by
statistic, the gradient is, rounded once,

    dz_v = p_v·(g_lse - Σ_k g_log_prob[k] - g_mean·Σ_w u_w) + Σ_k [v = i_k]·g_log_prob[k] + u_v·g_mean.

Of the logits only `lse` holds the size: all else is made of their distances from the row's maximum, which a common
offset does not round.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import torch
from torch import Tensor

from pallas_ce.api.integration import HeadSpec, logits_spec
from torch_bridge.autograd import OPERATORS, first_order, graph, register
from torch_bridge.dlpack.exchange import TO_JAX
from torch_bridge.materialized import kernels
from torch_bridge.materialized.chunks import chunks, powers, wide
from torch_bridge.materialized.losses import times


class Options(NamedTuple):
    """Static options; the operator's arguments behind the tensors."""

    vocab_size: int
    mean: bool = False  # whether `mean_log_prob` is asked for, beside `lse` and `log_prob`
    softcap: float | None = None
    temperature: float = 1.0
    inplace: bool = False  # write the gradient over the logits' memory, where autograd alone follows the call

    @property
    def names(self) -> tuple[str, ...]:
        """Of the statistics."""
        return ("lse", "log_prob", "mean_log_prob") if self.mean else ("lse", "log_prob")


def row_statistics(
    logits: Tensor, index: Tensor, valid: Tensor | None, mean_weights: Tensor | None, options: Options
) -> dict[str, Tensor]:
    """Statistics by name of N rows `[..., V']`, in the dtype of sums; differentiable in the logits, once.

    `log_prob` `[N, K]` is read at `index`, int64 in `[0, V)`. In `mean_log_prob = Σ_v u_v·log p_v` u is `mean_weights`
    `[V]`, or 1/V each. Rows that are not `valid` `[N]` have statistics and gradients of 0, whatever they hold. A row
    with NaN or +inf has NaN for all. One of -inf throughout has `lse` and `log_prob` -inf, and gradient 0.
    """
    first_order.reverse_mode({"logits": logits, "index": index})
    arguments = (logits, index, valid, mean_weights, *options)
    if not graph.serves((logits, index, valid, mean_weights)):
        found = OPERATORS.materialized_row_statistics(*arguments)
    elif torch.is_grad_enabled() and logits.requires_grad:
        function: Any = _Eager
        found = function.apply(*arguments)
    else:
        found = _forward(*arguments)
    return dict(zip(options.names, found, strict=False))


def _forward(
    logits: Tensor, index: Tensor, valid: Tensor | None, mean_weights: Tensor | None, *static: Any
) -> list[Tensor]:
    """The statistics; behind them what the kernels' gradient is made of `[2, N]`, and which rows have none."""
    options, logits = Options(*static), logits.detach()
    served, parts, columns = _served(logits, index, mean_weights, options)
    *statistics, normaliser, _ = [x.zero_() for x in _empty(logits, index, None, None, *options)]
    found = dict(zip(options.names, statistics, strict=True))
    for part, rows in parts:
        if served and served.serve(rows):
            if valid is None:
                rows.gather(1, index[part])  # raises an error for an index out of range
            names = (*found, *kernels.KEPT)
            given = {"rows": rows, "ids": index[part, 0].int(), "u": columns}
            *values, normaliser[0, part], normaliser[1, part] = served.run(kernels.statistics, names, given, False)
        else:
            values = _statistics(rows, index[part], mean_weights, options)
        for kept, value in zip(found.values(), values, strict=True):
            kept[part] = value.view(kept[part].shape)
    without_gradient = found["lse"].isneginf()
    found["log_prob"].masked_fill_(without_gradient[:, None], -torch.inf)
    if valid is not None:
        without_gradient |= ~valid
        for x in found.values():
            x.masked_fill_(~valid.view(-1, *[1] * (x.ndim - 1)), 0.0)
    return [*found.values(), normaliser, without_gradient]


def _backward(
    logits: Tensor,
    index: Tensor,
    mean_weights: Tensor | None,
    normaliser: Tensor,
    without_gradient: Tensor,
    cotangents: Sequence[Tensor | None],
    *static: Any,
) -> Tensor:
    """The logits' gradient, in memory of its own or in theirs."""
    options, logits = Options(*static), logits.detach()
    served, parts, columns = _served(logits, index, mean_weights, options)
    given = {name: x for name, x in zip(options.names, cotangents, strict=True) if x is not None}
    gradient = logits if options.inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for part, rows in parts:
        of_rows = rows if options.inplace else gradient.view(-1, logits.shape[-1])[part]
        by_name = {name: x[part] for name, x in given.items()}
        if served and served.serve(rows):
            if not options.inplace:
                of_rows.copy_(rows)
            by_name = {name: x.view(-1) for name, x in by_name.items()}
            of_row = {"ids": index[part, 0].int(), "valid": ~without_gradient[part], "u": columns}
            kept = dict(zip(kernels.KEPT, normaliser[:, part], strict=True))
            served.run(kernels.gradient, tuple(by_name), {"rows": of_rows, **of_row, **kept, **by_name}, True)
            continue
        found = _gradient(rows, index[part], mean_weights, by_name, options)
        of_rows[:, : options.vocab_size] = found.masked_fill_(without_gradient[part, None], 0.0)
        of_rows[:, options.vocab_size :] = 0.0
    return gradient


def _statistics(rows: Tensor, index: Tensor, mean_weights: Tensor | None, options: Options) -> list[Tensor]:
    """The statistics of a chunk, by PyTorch."""
    dtype, z = wide(rows.dtype), _logits(rows, options)
    largest = (z if options.temperature == 1.0 else rows[:, : options.vocab_size]).amax(1).to(dtype)
    largest = largest / options.temperature
    # PyTorch's own converts as it reads.
    log_p = torch.log_softmax(z, 1, dtype=dtype)
    found = [torch.where(largest.isneginf(), largest, largest - log_p.amax(1)), log_p.gather(1, index)]
    if options.mean:
        found.append(log_p.mean(1) if mean_weights is None else times(mean_weights, log_p).sum(1))
    return found


def _gradient(
    rows: Tensor, index: Tensor, mean_weights: Tensor | None, cotangents: dict[str, Tensor], options: Options
) -> Tensor:
    """The gradient of a chunk `[n, V]` by PyTorch, in the dtype of sums."""
    dtype, z = wide(rows.dtype), _logits(rows, options)
    cotangents = {name: x / options.temperature for name, x in cotangents.items()}
    for_log_prob = cotangents.get("log_prob", torch.zeros(index.shape, dtype=dtype, device=index.device))
    of_softmax = cotangents.get("lse", 0.0) - for_log_prob.sum(1)
    if (for_mean := cotangents.get("mean_log_prob")) is not None:
        u = z.new_full(z.shape[1:], 1.0 / options.vocab_size, dtype=dtype) if mean_weights is None else mean_weights
        of_softmax = of_softmax - for_mean * u.sum()
    found = torch.softmax(z, 1, dtype=dtype).mul_(of_softmax[:, None])
    found.scatter_add_(1, index, for_log_prob)
    if for_mean is not None:
        found.addr_(for_mean, u)
    if options.softcap is not None:
        found.mul_(1 - (z / options.softcap) ** 2)
    return found


def _logits(rows: Tensor, options: Options) -> Tensor:
    """The rows' logits without padding; themselves where nothing is to be done, else in the dtype of sums.

    A temperature divides their distances from the maxima, so that nothing large is rounded.
    """
    rows, dtype = rows[:, : options.vocab_size], wide(rows.dtype)
    if options.temperature != 1.0:
        largest = rows.amax(1, keepdim=True).to(dtype)
        rows = (rows.to(dtype) - largest).div_(options.temperature)
    return rows if options.softcap is None else (rows.to(dtype) / options.softcap).tanh_().mul_(options.softcap)


def _served(logits: Tensor, index: Tensor, mean_weights: Tensor | None, options: Options) -> tuple[Any, Any, Any]:
    """The kernels or None, the parts of the rows, and the mean's u as kernels take it, `[V']` and 0 for padding."""
    served, columns = None, None
    if index.shape[1] == 1 and options.temperature == 1.0:
        served = kernels.serving(logits, spec(logits, options.vocab_size, options.softcap))
    if served and options.mean:
        columns = torch.zeros(logits.shape[-1], dtype=wide(logits.dtype), device=logits.device)
        columns[: options.vocab_size] = 1.0 / options.vocab_size if mean_weights is None else mean_weights
    return served, (powers if served else chunks)(logits), columns


def spec(logits: Tensor, vocab_size: int, softcap: float | None) -> HeadSpec:
    """Static facts of the logits, checked."""
    return logits_spec(jax.ShapeDtypeStruct(logits.shape, TO_JAX[logits.dtype]), vocab_size or None, softcap)


def _empty(logits: Tensor, index: Tensor, valid: Any, mean_weights: Any, *static: Any) -> list[Tensor]:
    """What `_forward` fills, in shape and dtype."""
    by_row, names = index.shape[:1], Options(*static).names
    shapes = [index.shape if name == "log_prob" else by_row for name in names]
    numbers = [logits.new_empty(shape, dtype=wide(logits.dtype)) for shape in (*shapes, (len(kernels.KEPT), *by_row))]
    return [*numbers, logits.new_empty(by_row, dtype=torch.bool)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    logits, index, _, mean_weights, *ctx.static = inputs
    ctx.save_for_backward(logits, index, mean_weights, *output[-2:])
    ctx.mark_non_differentiable(*output[-2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, cotangents: Sequence[Tensor | None], eager: bool = False) -> tuple[Tensor | None, ...]:
    """The gradients of all arguments."""
    gradient, given = None, list(cotangents[:-2])
    if any(x is not None for x in given):
        first_order.one_by_one(given)
        # Only the operator raises where the gradient is to be differentiated in turn.
        past = eager and not torch.is_grad_enabled()
        compute = _backward if past else OPERATORS.materialized_row_statistics_backward
        gradient = compute(*ctx.saved_tensors, given, *ctx.static)
    return gradient, *[None] * (3 + len(Options._fields))


class _Eager(torch.autograd.Function):
    """`(logits, index, valid, mean_weights, *options)` to what `_forward` returns, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        found = _forward(*inputs)
        _save(ctx, inputs, found)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, cotangents, eager=True)


_STATIC = "SymInt vocab_size, bool mean, float? softcap, float temperature, bool inplace"
register(
    "materialized_row_statistics",
    _forward,
    f"(Tensor logits, Tensor index, Tensor? valid, Tensor? mean_weights, {_STATIC}) -> Tensor[]",
    _empty,
).register_autograd(_differentiate, setup_context=_save)
register(
    "materialized_row_statistics_backward",
    # What may be compiled does not overwrite the logits: a compiled graph plans all memory itself.
    lambda *arguments: _backward(*arguments[:-1], False),
    "(Tensor logits, Tensor index, Tensor? mean_weights, Tensor normaliser, Tensor without_gradient, "
    f"Tensor?[] cotangents, {_STATIC}) -> Tensor",
    lambda logits, *_: logits.new_empty(logits.shape),
).register_autograd(first_order.refuse)
