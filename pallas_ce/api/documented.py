"""Public functions show the options that they share with others: in `help`, in an editor, and on the API's pages."""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

from pallas_ce.api.problem import Options, Problem

_DEFAULTS: dict[str, Any] = vars(Options()) | (Problem.read.__kwdefaults__ or {})

# What may stand before the name of a head's option: PyTorch's names of its arrays begin so, and a teacher's options.
_PREFIX = re.compile("linear_|teacher_")

# One argument's names here, in the bridge, and in other libraries.
_NAMES = (
    ("hidden", "input", "_input", "x", "e", "hidden_states", "embeddings"),
    ("weight", "linear_weight", "lin_weight", "c", "classifier"),
    ("labels", "target", "targets"),
    ("bias", "linear_bias"),
    ("class_weights", "ce_weight", "weight"),
    ("token_weights", "weights", "loss_mask"),
    ("logit_softcap", "softcap", "logits_soft_cap", "final_logit_softcapping"),
    ("z_loss", "lse_square_scale", "z_loss_multiplier"),
    ("return_metrics", "return_z_loss"),
    ("implementation", "impl"),
)


def documented[**P, Out](function: Callable[P, Out]) -> Callable[P, Out]:
    """`function`, whose last parameter is `**options: Unpack[...]`, with a signature and texts of these options.

    A text of the function's own goes before the shared one.
    """
    return _public(function, None)


def computed_by[**P, Out](compute: Callable[..., Out]) -> Callable[[Callable[P, Any]], Callable[P, Out]]:
    """Makes a public function, `documented`, of one that checks the arguments and returns what `compute` takes."""
    return lambda read: _public(read, compute)


def _public(function: Callable[..., Any], compute: Callable[..., Any] | None) -> Any:
    *own, last = inspect.signature(function).parameters.values()
    (options,) = typing.get_args(last.annotation)
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[_PREFIX.sub("", name)], annotation=annotation
        )
        for name, annotation in options.__annotations__.items()
    ]
    known = frozenset(x.name for x in (*own, *shared) if x.kind is not x.VAR_POSITIONAL)

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        if not known.issuperset(kwargs):
            unknown = next(name for name in kwargs if name not in known)
            called = [name for names in _NAMES if unknown in names for name in names if name in known]
            hint = f"; it is called {called[0]!r} here" if called else ""
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown!r}{hint}")
        found = function(*args, **kwargs)
        return found if compute is None else compute(*found)

    returned = inspect.signature(compute or function).return_annotation
    signature = inspect.Signature([*own, *shared], return_annotation=returned)
    public.__signature__ = signature  # type: ignore[attr-defined]
    before, returns, after = inspect.cleandoc(function.__doc__ or "").partition("\n\nReturns:\n")
    texts = [text for name, text in _texts(options).items() if f"\n    {name}: " not in before]
    public.__doc__ = "\n".join([before, *texts]) + returns + after
    return public


def _texts(options: type) -> dict[str, str]:
    """By name, the entries of all options, in the order of the fields."""
    texts: dict[str, str] = {}
    for base in types.get_original_bases(options):
        if isinstance(base, type):  # `TypedDict` itself is none
            texts |= _texts(base)
    section = inspect.cleandoc(options.__doc__ or "").partition("Attributes:\n")[2]
    return texts | {entry.split(":")[0].strip(): entry for entry in re.split(r"\n(?=    \S)", section) if entry}
