"""What `help` and `inspect.signature` show of the heads: names, types and defaults, the same for Linen and NNX."""

import dataclasses
import inspect

import pytest
from flax import nnx

from flax_modules import linen
from flax_modules import nnx as on_nnx
from flax_modules._head import HeadCalls
from pallas_ce import linear_cross_entropy

METADATA = {f"{x}_metadata" for x in ("kernel", "bias", "lora_a", "lora_b", "projection")}
OF_ONE_FRAMEWORK = {"parent", "name", "rngs", "linear"} | METADATA


@pytest.mark.parametrize("head", ["LossHead", "MultiTokenLossHead"])
def test_constructors_show_their_parameters(head):
    shown = [inspect.signature(getattr(package, head)).parameters for package in (linen, on_nnx)]
    assert "self" not in shown[1]
    ours, theirs = ({n: p.default for n, p in found.items() if n not in OF_ONE_FRAMEWORK} for found in shown)
    assert list(ours) == list(theirs)
    assert len(ours) >= 6
    assert {n: d for n, d in ours.items() if not callable(d)} == {n: d for n, d in theirs.items() if not callable(d)}


def test_a_module_of_ones_own_on_top_shows_its_own_parameters():
    class Head(on_nnx.LossHead):
        def __init__(self, width: int, rngs: nnx.Rngs):
            super().__init__(width, 10, rngs=rngs)

    assert list(inspect.signature(Head).parameters) == ["width", "rngs"]
    assert "labels" in inspect.signature(Head(4, nnx.Rngs(0))).parameters


@pytest.mark.parametrize("head", ["LossHead", "MultiTokenLossHead"])
def test_arrays_are_shown_as_arrays(framework, head):
    for name, parameter in inspect.signature(getattr(framework, head).__call__).parameters.items():
        assert name == "self" or "Any" not in str(parameter.annotation), parameter


def test_every_option_is_described(framework):
    for name in inspect.signature(framework.LossHead).parameters.keys() - {"parent", "name"}:
        assert f"\n    {name}: " in framework.LossHead.__doc__


def test_a_head_has_every_option_of_the_loss_with_its_default():
    of_loss = {n: p.default for n, p in inspect.signature(linear_cross_entropy).parameters.items()}
    of_head = {field.name: field.default for field in dataclasses.fields(HeadCalls)}
    of_call = inspect.signature(HeadCalls.__call__).parameters
    # A head has parameters in their place, and says why it takes no vocab_scale.
    assert of_loss.keys() - of_head.keys() - of_call.keys() == {"weight", "bias", "vocab_axis", "vocab_scale"}
    assert "A head takes no `vocab_scale`" in inspect.getdoc(HeadCalls)
    shared = of_loss.keys() & of_head.keys() - {"vocab_size"}
    assert {n: of_head[n] for n in shared} == {n: of_loss[n] for n in shared}
