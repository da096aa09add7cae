"""What `help` shows of the public functions: arguments as `signatures.txt` has them, each of them described."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pallas_ce

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function for name in pallas_ce.__all__ if inspect.isfunction(function := getattr(pallas_ce, name))
}


def _shown(name: str) -> str:
    """The signature without types; arguments that are passed by name only in alphabetical order."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(FUNCTIONS[name]).parameters.values()]
    parameters.sort(key=lambda p: (p.kind, p.name if p.kind is p.KEYWORD_ONLY else ""))
    return f"{name}{inspect.Signature(parameters)}"


def test_no_argument_or_default_has_changed() -> None:
    known = Path(__file__).with_name("signatures.txt").read_text(encoding="utf-8").splitlines()
    assert [_shown(name) for name in sorted(FUNCTIONS)] == known


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name: str) -> None:
    described = inspect.getdoc(FUNCTIONS[name]) or ""
    section = re.search(r"^Args:\n(.*?)\n\n(?=\S)", described, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    \**(\w+): (.{4,})", section[1] if section else "", re.MULTILINE)
    names = list(inspect.signature(FUNCTIONS[name]).parameters)
    assert sorted(entry for entry, _ in entries) == sorted(names)


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
        "mask": "token_weights", "label_smothing": "label_smoothing"}  # fmt: skip


@pytest.mark.parametrize(("word", "ours"), OURS.items())
def test_other_libraries_names_are_recognised(word: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{word}'; it is called '{ours}' here$"):
        FUNCTIONS["linear_cross_entropy"](**{word: None})
