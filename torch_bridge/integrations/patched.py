"""The class that `patch_causal_lm` gives a model: a subclass of its own, which computes the loss without logits.

A forward among the model's attributes would not survive a copy, a pickle, a replica of `torch.nn.DataParallel`, or
wrapping and unwrapping. Models of one kind share the class, and each holds its options.
"""

import dataclasses
import functools
import inspect
import typing
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_bridge.api.linear import linear_cross_entropy
from torch_bridge.autograd import partitioned
from torch_bridge.integrations import causal_lm, trl

# Options that change the loss in training only: evaluation has the model's own.
_IN_TRAINING = {"label_smoothing", "z_loss"}
OF_A_LOSS = _IN_TRAINING | {"validate_labels"}
OF_A_HEAD = {"precision", "implementation", "scratch_bytes"}

# Arguments of the model's forward that are for its head and loss, and not for its backbone.
_FOR_THE_HEAD = {"labels", "shift_labels", "num_items_in_batch", "ignore_index", "return_dict"}
_FOR_THE_HEAD |= {"logits_to_keep", "num_logits_to_keep"}

# The attribute of a patched model that holds its `Patch`.
_ATTRIBUTE = "_causal_lm_patch"


@dataclasses.dataclass(frozen=True)
class Patch:
    """Options of `linear_cross_entropy`, and whether evaluation with labels goes without logits, too."""

    options: dict[str, Any]
    skip_logits: bool


def of(model: Any) -> Patch | None:
    """What a model was patched with; None where it is not patched."""
    found: Patch | None = model.__dict__.get(_ATTRIBUTE)
    return found


def put(model: Any, patch: Patch) -> None:
    """Patches a model that has its class's own forward, and serves TRL's trainers: first, as that may fail."""
    _serve(model, patch)
    model.__dict__.pop("forward", None)  # as a wrapper that was taken off again leaves it
    if not isinstance(model, _Patched):
        kind: Any = type(model)
        model.__class__ = _class(kind)
    model.__dict__[_ATTRIBUTE] = patch


def take_away(model: Any) -> None:
    """Undoes `put`."""
    model.__dict__.pop("forward", None)
    del model.__dict__[_ATTRIBUTE]
    if own := _own_class(model):
        model.__class__ = own


class _Patched:
    """What a patched class adds to the model's own, beside the forward."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        own = _own_class(self)
        return (_new, (own,), *reduced[2:]) if own else reduced

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if patch := of(self):
            _serve(self, patch)

    def __setattr__(self, name: str, value: Any) -> None:
        patch = of(self) if name == "forward" else None
        if patch:
            trl.check_options(self, value, [name for name, x in patch.options.items() if name in OF_A_LOSS and x])
        super().__setattr__(name, value)
        if patch:
            first, *_ = functions = causal_lm.forwards(self)
            if functions[-1] is not type(self).forward:  # type: ignore[attr-defined]
                name = f"{first.__module__}.{getattr(first, '__qualname__', type(first).__qualname__)}"
                warnings.warn(
                    f"the forward of this patched {type(self).__name__} was replaced by {name}: what patch_causal_lm "
                    f"was given ({patch.options}) no longer counts, unless that calls the forward that was there. "
                    "Leave it away (for Trainer, use_liger_kernel=False), or use unpatch_causal_lm first",
                    stacklevel=2,
                )


def _own_class(model: Any) -> type | None:
    """The class that was patched; None where the model's has another over it, such as FSDP2's."""
    return type(model).__dict__.get("_own_class")


def _new(own: type) -> Any:
    """A patched model without attributes, for pickle to fill."""
    kind: Any = _class(own)
    return kind.__new__(kind)


@functools.cache
def _class(own: Any) -> type:
    """The patched class of a class of transformers; transformers writes its name, the same, into configurations."""
    theirs = own.forward
    signature = inspect.signature(theirs)
    kind = _output(signature.return_annotation)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = of(self)
        if patch is None:
            return theirs(self, *args, **kwargs)
        return _forward(theirs, signature, kind, patch, self, *args, **kwargs)

    functools.update_wrapper(forward, theirs)
    del forward.__wrapped__  # type: ignore[attr-defined]  # whoever unwraps a forward is to stop here
    forward.__signature__ = signature  # type: ignore[attr-defined]
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own.__name__, (_Patched, own), {**names, "forward": forward, "_own_class": own})


def _output(stated: Any) -> Any:
    """The class of outputs that a forward states to return; where it does not say, what most models return."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    fields = ((x, getattr(x, "__dataclass_fields__", ())) for x in (stated, *typing.get_args(stated)))
    return next((x for x, names in fields if {"loss", "logits"}.issubset(names)), CausalLMOutputWithPast)


def _check_arguments(model: Any, signature: inspect.Signature, given: dict[str, Any]) -> None:
    """Refuses arguments of a user's own forward that the backbone does not name, and would let pass."""
    from transformers.utils.generic import TransformersKwargs

    known = TransformersKwargs.__annotations__.keys() | {"use_cache", "cache_position"}
    known |= inspect.signature(causal_lm.backbone(model).forward).parameters.keys()
    for name, value in given.items():
        own = signature.parameters.get(name)
        if own is not None and name not in known and value is not own.default:
            raise ValueError(
                f"{name} is an argument of {type(model).__name__}'s own forward, which a loss without logits passes "
                "over: use LinearCrossEntropyLoss in that forward, or unpatch_causal_lm(model)"
            )


def _serve(model: Any, patch: Patch) -> None:
    trl.serve(model, {name: x for name, x in patch.options.items() if name in OF_A_HEAD})


def _forward(
    theirs: Callable[..., Any],
    signature: inspect.Signature,
    kind: Any,
    patch: Patch,
    model: Any,
    *args: Any,
    skip_logits: bool | None = None,
    reduction: Any = None,
    **kwargs: Any,
) -> Any:
    given = dict(signature.bind(model, *args, **kwargs).arguments)
    del given["self"]
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL and given.pop(parameter.name, ()):
            raise TypeError(f"the forward of {type(model).__name__} takes any arguments: pass them by name")
    kept, shifted = given.get("logits_to_keep", 0), given.get("shift_labels")
    labels, shift = (given.get("labels"), 1) if shifted is None else (shifted, 0)
    if skip_logits is None:
        skip_logits = model.training or patch.skip_logits or reduction is not None
    if not skip_logits or labels is None or not (isinstance(kept, int) and kept == 0):
        if reduction is not None:
            raise ValueError(
                f"reduction={reduction!r} needs a loss without logits: pass labels, and neither logits_to_keep nor "
                "skip_logits=False"
            )
        return theirs(model, *args, **kwargs)

    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    for_backbone = {name: value for name, value in given.items() if name not in _FOR_THE_HEAD and value is not None}
    if with_routers := causal_lm.with_routers(model, given.get("output_router_logits")):
        for_backbone["output_router_logits"] = True
    if not theirs.__module__.startswith("transformers."):
        _check_arguments(model, signature, for_backbone)
    head = causal_lm.head(model)
    if why := causal_lm.passed_over(model, head):  # changed since it was patched
        raise ValueError(f"{why}, or use unpatch_causal_lm(model)")
    out = causal_lm.backbone(model)(**for_backbone, return_dict=True)
    options = {name: x for name, x in patch.options.items() if model.training or name not in _IN_TRAINING}

    items: Any = given.get("num_items_in_batch")
    # A replica of DataParallel gets its part of a vector; the model's own loss has the shape of what it is divided by.
    of_a_vector = isinstance(items, Tensor) and items.ndim > 0 and items.numel() == 1

    ignored = given.get("ignore_index", causal_lm.IGNORED)

    def loss_of(hidden: Tensor) -> Tensor:
        weight, bias = causal_lm.parameters(head)
        device = head.weight.device
        return linear_cross_entropy(
            hidden.to(device),  # elsewhere where the model is split over devices
            weight,
            labels.to(device),
            linear_bias=bias,
            shift=shift,
            ignore_index=ignored,
            reduction=reduction or "mean",
            normalizer=items.reshape(()) if of_a_vector else items,
            **options,
        )

    loss = causal_lm.in_place_of_logits(model, loss_of, out.last_hidden_state)
    if "validate_labels" not in options:
        # Without the host's waiting, on a GPU as in the model's own loss.
        counted = labels[..., shift:]
        valid = (counted == ignored) | (counted >= 0) & (counted < partitioned.whole_shape(head.weight)[0])
        torch._assert_async(
            valid.all(),
            f"a label lies outside the vocabulary and is not ignore_index={ignored}: patch_causal_lm(model, "
            "validate_labels=True) names it, validate_labels=False takes such labels for ignored ones",
        )
    loss = loss.reshape(items.shape) if of_a_vector else loss
    further: dict[str, Any] = {}
    if with_routers:
        kind = kind if "aux_loss" in kind.__dataclass_fields__ else MoeCausalLMOutputWithPast
        if routers := causal_lm.router_loss(model, out.get("router_logits"), given.get("attention_mask")):
            further["aux_loss"] = routers[0].to(loss.device)
            loss = loss + routers[1] * further["aux_loss"] if reduction in (None, "mean") else loss
    # Taken over by name: the cache is `past_key_values` up to transformers 5.23, and `cache` after.
    shared = kind.__dataclass_fields__.keys() & out.keys()  # torch.compile does not trace dataclasses.fields
    found = kind(loss=loss, **further, **{name: out[name] for name in shared})
    return found if given.get("return_dict", True) is not False else found.to_tuple()
