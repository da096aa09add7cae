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
    by_name = sorted((p for p in parameters if p.kind is p.KEYWORD_ONLY), key=lambda p: p.name)
    others = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    last = [p for p in others if p.kind is p.VAR_KEYWORD]
    others = [p for p in others if p.kind is not p.VAR_KEYWORD]
    return f"{name}{inspect.Signature([*others, *by_name, *last])}"


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


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_no_other_argument_is_taken(name: str) -> None:
    own = {n for n, p in inspect.signature(FUNCTIONS[name]).parameters.items() if p.kind is not p.VAR_POSITIONAL}
    of_others = {word for function in FUNCTIONS.values() for word in inspect.signature(function).parameters}
    for word in ("misspelt", *sorted(of_others - own)):
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{word}'"):
            FUNCTIONS[name](**{word: None})


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("targets", "labels"),
        ("softcap", "logit_softcap"),
        ("lse_square_scale", "z_loss"),
        ("ce_weight", "class_weights"),
        ("mask", "token_weights"),
        ("label_smothing", "label_smoothing"),
    ],
)
def test_other_libraries_names_are_recognised(word: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{word}'; it is called '{ours}' here$"):
        FUNCTIONS["linear_cross_entropy"](**{word: None})
