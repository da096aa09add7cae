"""What `help` shows of all that is public: arguments and fields as `signatures.txt` has them, functions' described."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pallas_ce
from pallas_ce.streaming.gradient_products import INPUTS, PerInput

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function for name in pallas_ce.__all__ if inspect.isfunction(function := getattr(pallas_ce, name))
}


# Modules of public names, and the package that each needs.
MODULES = {"pallas_ce": "jax", "torch_bridge": "torch"} | dict.fromkeys(
    ("flax_modules.nnx", "flax_modules.linen", "flax_modules.integrations.maxtext", "flax_modules.integrations.tunix"),
    "flax",
)


def _shown(name: str, of: Any) -> Iterator[str]:
    """Signatures of a function, or a class and its methods, without types; arguments passed by name only are sorted."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(of).parameters.values()]
    parameters.sort(key=lambda p: (p.kind, p.name if p.kind is p.KEYWORD_ONLY else ""))
    # A class or function that is a default is shown by its name, without an address.
    defaults = r"<(?:\w+ )?'?(?:(?:\w+|<locals>)\.)*(\w+)'?(?: object)?(?: at \w+)?>"
    yield name + re.sub(defaults, r"\1", str(inspect.Signature(parameters)))
    for method in dir(of) if inspect.isclass(of) else ():
        home = str(getattr(own := getattr(of, method), "__module__", "")).partition(".")[0]
        if home == name.partition(".")[0] and inspect.isroutine(own) and (method == "__call__" or method[0] != "_"):
            yield from _shown(f"{name}.{method}", own)


@pytest.mark.parametrize("module", MODULES)
def test_no_argument_field_or_default_has_changed(module: str) -> None:
    pytest.importorskip(MODULES[module])
    of = importlib.import_module(module)
    own = [name for name, x in vars(of).items() if getattr(x, "__module__", "") == module and name[0] != "_"]
    names = sorted(getattr(of, "__all__", own))
    found = [line for name in names for line in _shown(f"{module}.{name}", getattr(of, name))]
    known = Path(__file__).with_name("signatures.txt").read_text(encoding="utf-8").splitlines()
    assert found == [line for line in known if line.startswith(f"{module}.")]


def test_values_for_each_input_are_given_by_name() -> None:
    """All have one type, so a wrong order would go unnoticed."""
    with pytest.raises(TypeError, match="positional"):
        PerInput(*range(len(INPUTS)))


def described_arguments(function: Callable[..., Any]) -> list[str]:
    """Names out of the docstring's section."""
    described = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n(.*?)(?:\n\n(?=\S)|\Z)", described, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    \**(\w+): (.{4,})", section[1] if section else "", re.MULTILINE)
    return sorted(entry for entry, _ in entries)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name: str) -> None:
    assert described_arguments(FUNCTIONS[name]) == sorted(inspect.signature(FUNCTIONS[name]).parameters)


# Not arrays: options by name, a configuration, a function.
NO_ARRAYS = {"options", "config", "sampler"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_annotations_say_what_is_an_array_and_a_precision_comes_with_each_compute_dtype(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    for parameter in parameters.values():
        assert "Any" not in str(parameter.annotation) or parameter.name in NO_ARRAYS, parameter
    for prefix in ("", "teacher_"):
        assert (f"{prefix}dtype" in parameters) == (f"{prefix}precision" in parameters)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_no_other_argument_is_taken(name: str) -> None:
    own = {n for n, p in inspect.signature(FUNCTIONS[name]).parameters.items() if p.kind is not p.VAR_POSITIONAL}
    of_others = {word for function in FUNCTIONS.values() for word in inspect.signature(function).parameters}
    for word in ("misspelt", *sorted(of_others - own)):
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{word}'"):
            FUNCTIONS[name](**{word: None})


OURS = {"targets": "labels", "softcap": "logit_softcap", "lse_square_scale": "z_loss", "ce_weight": "class_weights",
        "mask": "token_weights", "label_smothing": "label_smoothing",
        "label_smoothing_factor": "label_smoothing", "z_loss_weight": "z_loss", "shift_labels": "labels",
        "label": "labels", "num_items_in_batch": "normalizer"}  # fmt: skip


@pytest.mark.parametrize(("word", "ours"), OURS.items())
def test_other_libraries_names_are_recognised(word: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{word}'; it is called '{ours}' here$"):
        FUNCTIONS["linear_cross_entropy"](**{word: None})
