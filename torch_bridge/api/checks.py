"""Checks of the functions' tensors, before PyTorch sees the operator: each error names the argument and its value.

A check returns the function by which the operator takes the tensor. Later calls of the same signature run that alone.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from pallas_ce import LowRank
from pallas_ce.api import integration
from pallas_ce.api.integration import Implementation, PrecisionLike, label_rule
from torch_bridge.autograd import NAMESPACE
from torch_bridge.dlpack import exchange
from torch_bridge.materialized.chunks import wide

_DTYPES = {getattr(torch, name): name for name in ("bfloat16", "float16", "float32", "float64")}

# What errors add where arguments look like another library's: in Liger's order, in one with labels second, a weight
# `[H, V]`, and logits `[N, C, ...]`.
_ORDER = ": the order is input [..., H], linear_weight [V, H], target [...]"
_TRANSPOSED = ": pass linear_weight.T"
_CLASSES_LAST = ": classes are the last axis, so pass logits.movedim(1, -1)"

# The widths that the operators take. Others become int64, which holds every id of a vocabulary.
_LABELS = (torch.int32, torch.int64)

# Scalars: the number whose term is left out, and the bounds of others.
_SCALARS: dict[str, tuple[float | None, *tuple[float, ...]]] = {
    "logit_scale": (1.0,),
    "teacher_logit_scale": (1.0,),
    "label_smoothing": (0.0, 0.0, 1.0),
    "z_loss": (0.0, 0.0),
    "normalizer": (None, 0.0),
}


# What an operator takes of a checked argument; it holds none of the call's tensors.
type Take = Callable[[Any], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    """The argument."""
    return tensor


class Head(NamedTuple):
    """A checked head: what operators take of it by name, input's leading shape, V, and the products' dtype."""

    given: dict[str, Any]
    leading: torch.Size
    size: int
    dtype: torch.dtype


def weight(given: Tensor | LowRank) -> LowRank:
    """The tensors of a weight `[V', H]`; `up` and `down` are None where it has no term."""
    read: LowRank = integration.read_weight(given, floating, "linear_weight")
    if read.weight.ndim != 2:
        raise _wrong_shape("linear_weight", read.weight, "[V, H]", _ORDER if read.weight.ndim > 2 else "")
    if read.up is not None:
        if read.up.ndim != 2 or not read.up.shape[1]:
            raise _wrong_shape("linear_weight.up", read.up, "[V, r], r at least 1")
        rank = read.up.shape[1]
        shape("linear_weight.up", read.up, (read.weight.shape[0], rank))
        shape("linear_weight.down", read.down, (rank, read.weight.shape[1]))
    return read


def head(input: Tensor, of_weight: Tensor | LowRank, **options: Any) -> Head:
    """Checks a head's tensors, and which of a call's options decide over them; programs check all others."""
    read, linear_bias = weight(of_weight), options.get("linear_bias")
    rows, width = read.weight.shape
    floating("input", input)
    if linear_bias is not None:
        floating("linear_bias", linear_bias)
    if input.ndim < 1:
        raise ValueError("input is a scalar; it must be [..., H]")
    if input.shape[-1] != width:
        raise ValueError(
            f"input has shape {tuple(input.shape)} and linear_weight {tuple(read.weight.shape)}: the hidden size is "
            f"{input.shape[-1]} in the one and {width} in the other{_TRANSPOSED if input.shape[-1] == rows else ''}"
        )
    shape("linear_bias", linear_bias, (rows,))
    dtype, leading = _of_products(input), input.shape[:-1]
    given = {
        "input": by_row(leading),
        "linear_weight": as_it_is,
        "linear_up": None if read.up is None else as_it_is,
        "linear_down": None if read.down is None else as_it_is,
        "linear_bias": None if linear_bias is None else as_it_is,
        "term_scale": read.scale,
        "dtype": _DTYPES[dtype],
        "precision": precision_of(options.get("precision"), input.device),
        "scratch_bytes": integration.checks.scratch(options.get("scratch_bytes")),
        **scalars(dtype, options, "logit_scale"),
    }
    return Head(given, leading, size(options.get("vocab_size"), rows, "linear_weight's rows"), dtype)


def _of_products(input: Tensor) -> torch.dtype:
    """The dtype in which products are made: input's, or autocast's."""
    kind = input.device.type
    is_cast = input.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else input.dtype


def teacher(
    input: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float | Tensor, leading: Sequence[int], size: int
) -> dict[str, Any]:
    """Checks a teacher's tensors, constants; what the operator takes of them. `size` is the student's V."""
    for name, tensor in (("teacher_input", input), ("teacher_weight", weight), ("teacher_bias", bias)):
        if tensor is not None:
            floating(name, tensor)
    if weight.ndim != 2:
        raise _wrong_shape("teacher_weight", weight, "[V, H_t]")
    shape("teacher_input", input, (*leading, weight.shape[1]), _order(input.shape[:-1], leading, size))
    shape("teacher_bias", bias, weight.shape[:1])
    dtype, rows = _of_products(input), by_row(leading)
    return {
        "teacher_input": lambda x: rows(x.detach()),
        "teacher_weight": Tensor.detach,
        "teacher_bias": None if bias is None else Tensor.detach,
        "teacher_dtype": _DTYPES[dtype],
        **scalars(dtype, {"teacher_logit_scale": logit_scale}),
    }


def mask(row_mask: Tensor | None, input: Tensor) -> Take:
    """bool `[N]`; all rows by default, without those that a program pads with."""
    leading, device = input.shape[:-1], input.device
    if row_mask is None:
        return lambda _: torch.ones(leading.numel(), dtype=torch.bool, device=device)
    shape("row_mask", row_mask, leading)
    if row_mask.dtype != torch.bool:
        raise TypeError(f"row_mask has dtype {row_mask.dtype}; it must be bool: pass row_mask != 0")
    return by_row(leading)


def loss(
    leading: Sequence[int], size: int, dtype: torch.dtype, target: Tensor, *, shift: int = 0, **options: Any
) -> dict[str, Take | None]:
    """The tensors of cross entropy beside its logits; `size` is V."""
    integration.checks.check_reduction(options.get("reduction", "mean"), options.get("normalizer"))
    shape("class_weights", options.get("class_weights"), (size,))
    return {
        "target": labels(target, leading, shift=shift, size=size, **options),
        "class_weights": None if options.get("class_weights") is None else as_it_is,
        "token_weights": of_tokens(options.get("token_weights"), leading, shift),
        **scalars(dtype, options, "label_smoothing", "z_loss", "normalizer"),
    }


def refuse_unknown(given: Iterable[str], known: Collection[str], further: Collection[str] = ()) -> None:
    """Refuses options that are not known; the caller has `further` arguments."""
    if unknown := sorted(set(given) - set(known)):
        names = sorted({*known, *further})
        hint = integration.called_here(unknown[0], names)
        raise TypeError(f"unknown option {unknown[0]!r}{hint}; choose from {', '.join(names)}")


def kept(options: Mapping[str, Any]) -> None:
    """Checks options of cross entropy that are kept for later calls, as far as they need no tensors."""
    reduction, backward = options.get("reduction", "mean"), options.get("backward", "auto")
    integration.checks.check_reduction(reduction, options.get("normalizer"), backward)
    scalars(torch.float32, options, "label_smoothing", "z_loss", "logit_scale", "normalizer")
    if (implementation := options.get("implementation")) is not None:
        integration.checks.choice("implementation", implementation, get_args(Implementation))
    integration.checks.shift(options.get("shift", 0), (), (1,))  # labels and rows are not known yet
    integration.checks.scratch(options.get("scratch_bytes"))
    integration.checks.ignored(options.get("ignore_index", -100))


def of_tokens(token_weights: Tensor | None, leading: Sequence[int], shift: int = 0) -> Take | None:
    """Token weights `[N]`."""
    shape("token_weights", token_weights, leading)
    return None if token_weights is None else functools.partial(_by_row_shifted, shift=shift, leading=leading, fill=0)


def precision_of(value: PrecisionLike | None, device: torch.device) -> str:
    """How float32 operands are multiplied: as asked for, or as PyTorch's own products on that device."""
    if value is None:
        return "tensorfloat32" if device.type == "cuda" and _tf32_on_cuda() else "highest"
    return value if isinstance(value, str) else integration.precision_name(value)


def _tf32_on_cuda() -> bool:
    """Whether PyTorch multiplies float32 matrices in TF32 on CUDA devices, whichever of its interfaces has said so.

    The older ones, `allow_tf32` and `get_float32_matmul_precision`, raise when they are read after this one was set.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def settings() -> Hashable:
    """What PyTorch is set to, as far as checks read it."""
    kinds = ("cpu", "cuda") if torch._C._is_any_autocast_enabled() else ()
    return _tf32_on_cuda(), *[torch.is_autocast_enabled(x) and torch.get_autocast_dtype(x) for x in kinds]


# Dynamo cannot trace the getter, but compiles anew when the setting changes. `torch.compiler.assume_constant_result`
# sets this too, but imports all of Dynamo: a second that callers who do not compile need not wait.
_tf32_on_cuda._dynamo_marked_constant = True  # type: ignore[attr-defined]


def floating(name: str, tensor: Any) -> Tensor:
    """The tensor, checked to be dense and of a dtype that there are losses for."""
    exchange.check_dense(name, tensor)
    if tensor.dtype not in _DTYPES:
        order = _ORDER if name == "linear_weight" and tensor.dtype in _LABELS else ""
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be one of {list(_DTYPES.values())}{order}")
    return cast(Tensor, tensor)


def size(vocab_size: int | None, most: int, of: str) -> int:
    """V, which is `most` by default."""
    if vocab_size is None:
        return most
    if not integration.checks.is_int(vocab_size) or not 1 <= vocab_size <= most:
        raise ValueError(f"vocab_size={vocab_size!r} must be an int between 1 and the number of {of}, {most}")
    return vocab_size


def by_row(leading: Sequence[int]) -> Take:
    """The tensor with one axis in place of its leading ones; itself where it has only one, for autograd's sake."""
    count = len(leading)
    return as_it_is if count == 1 else lambda x: x.reshape(-1, *x.shape[count:])


def labels(
    target: Tensor,
    leading: Sequence[int],
    *,
    several: bool = False,
    shift: int = 0,
    size: int = 0,
    ignore_index: int | None = -100,
    validate_labels: bool = False,
    **_: Any,
) -> Take:
    """int32 or int64 `[N]` of integers, with `several` or `[N, K]`: each row's of `shift` positions later.

    With `validate_labels` these are read, and ones outside the vocabulary of that size raise a ValueError.
    """
    _integers("target", target)
    if target.shape != leading and not (several and _several(target, leading)):
        either = ", or that with K >= 1 targets for each row behind it" if several else ""
        order = _order(target.shape, leading, size)
        order = _CLASSES_LAST if target.shape == (*leading[:1], *leading[2:], size) and leading[1:] else order
        raise ValueError(f"target has shape {tuple(target.shape)}; it must be {tuple(leading)}{either}{order}")
    take, ignored = _ids(target, leading, shift), integration.checks.ignored(ignore_index)
    if not isinstance(validate_labels, bool):
        raise TypeError(f"{validate_labels=} must be True or False")
    if not validate_labels:
        return take
    shift, axis = integration.checks.shift(shift, target, tuple(leading)), len(leading) - 1
    return lambda x: take(_with_valid_values(x, size, ignored, shift, axis))


def _order(of_tokens: Sequence[int], leading: Sequence[int], size: int) -> str:
    """What an error adds where the tokens are as many as the vocabulary's entries, and "input" is the weight."""
    return _ORDER if len(leading) == 1 and tuple(of_tokens) == (size,) else ""


def support(ids: Tensor, target: Tensor, leading: Sequence[int], shift: int) -> Take:
    """int32 or int64 `[N, K]` of integers, where there is one target for each row."""
    _integers("support", ids)
    if not _several(ids, leading):
        raise ValueError(f"support has shape {tuple(ids.shape)}; it must be {tuple(leading)} with K >= 1 ids behind it")
    if target.shape != leading:
        raise ValueError(
            f"support takes one target of each row, {tuple(leading)}, and target has shape {tuple(target.shape)}"
        )
    return _ids(ids, leading, shift)


def _ids(ids: Tensor, leading: Sequence[int], shift: int) -> Take:
    """int32 or int64 by row."""
    rows = functools.partial(_by_row_shifted, shift=shift, leading=leading, fill=label_rule.NO_TARGET)
    return rows if ids.dtype in _LABELS else lambda x: rows(x.long())


def _integers(name: str, tensor: Tensor) -> None:
    exchange.check_dense(name, tensor)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        instead = "pass ids [..., K], padded with -1" if name == "support" else "class probabilities are not supported"
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must hold integers: {instead}")


def _several(ids: Tensor, leading: Sequence[int]) -> bool:
    return ids.shape[:-1] == leading and ids.ndim == len(leading) + 1 and ids.shape[-1] > 0


def _by_row_shifted(by_token: Tensor, shift: int, leading: Sequence[int], fill: int) -> Tensor:
    """`[N, *K]` values of tokens `[..., *K]` at the rows that predict these; `fill` where there is none."""
    # The default costs no check; False would be an error.
    if (type(shift) is int and shift == 0) or not (shift := integration.checks.shift(shift, by_token, tuple(leading))):
        return by_row(leading)(by_token)
    behind = by_token.narrow(len(leading) - 1, gone := min(shift, leading[-1]), leading[-1] - gone)
    padded = nn.functional.pad(behind, (*(0, 0) * (by_token.ndim - len(leading)), 0, gone), value=fill)
    return by_row(leading)(padded)


# An operator, which torch.compile does not trace. Its result is used, so that it stays in the program.
@torch.library.custom_op(f"{NAMESPACE}::with_valid_values", mutates_args=())
def _with_valid_values(target: Tensor, vocab_size: int, ignore_index: int | None, shift: int, axis: int) -> Tensor:
    label_rule.check(target.numpy(force=True), ignore_index, vocab_size, "target", shift, axis)
    return target.clone()


@_with_valid_values.register_fake
def _(target: Tensor, vocab_size: int, ignore_index: int | None, shift: int, axis: int) -> Tensor:
    return torch.empty_like(target)


def shape(name: str, tensor: Tensor | None, expected: Sequence[int], hint: str = "") -> None:
    """Checks a dense tensor of that shape, or None."""
    if tensor is None:
        return
    exchange.check_dense(name, tensor)
    if tensor.shape != tuple(expected):
        raise _wrong_shape(name, tensor, tuple(expected), hint)


def _wrong_shape(name: str, tensor: Tensor, expected: Any, hint: str = "") -> ValueError:
    hint = f": {exchange.SHARDED}" if getattr(tensor, "_fsdp_flattened", False) else hint
    return ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {expected}{hint}")


def temperature(value: float | Tensor, leading: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """A number, which is compiled in, or else a tensor `[]` or `[N]` in the dtype of the sums."""
    if not isinstance(value, Tensor):
        if not isinstance(number := integration.checks.temperature(value, tuple(leading)), float):
            raise TypeError(f"temperature is a {type(value).__name__}; it must be a number or a torch.Tensor")
        return {"fixed_temperature": number}
    exchange.check_dense("temperature", value)
    if not value.dtype.is_floating_point:
        raise TypeError(f"temperature has dtype {value.dtype}; it must be a floating dtype")
    if value.ndim and tuple(value.shape) != tuple(leading):
        raise ValueError(
            f"temperature has shape {tuple(value.shape)}; it must be a scalar or have input's leading shape "
            f"{tuple(leading)}"
        )
    of_sums, rows = wide(dtype), by_row(leading) if value.ndim else as_it_is
    return {"temperature": lambda x: rows(x.to(of_sums))}


def scalars(dtype: torch.dtype, given: Mapping[str, Any], *names: str) -> dict[str, Take | None]:
    """0-d tensors in the dtype of the sums, of some or all that are given; None for a number whose term is left out."""
    found: dict[str, Take | None] = {}
    of_sums = wide(dtype)
    for name in names or given:
        absent, *bounds = _SCALARS[name]
        value, found[name] = given.get(name, absent), None
        if value is absent or (isinstance(value, float) and value == absent):
            continue
        if isinstance(value, Tensor):
            shape(name, value, ())
            found[name] = lambda x: x.to(of_sums)
        elif (number := integration.checks.scalar(name, value, *bounds)) != absent:
            constant = torch.tensor(number, dtype=of_sums, device="cpu")
            found[name] = functools.partial(lambda constant, _: constant, constant)
    return found
