"""Heads whose parameters are partitioned as by DeepSpeed's ZeRO-3, or sharded by FSDP1."""

import enum
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pallas_ce import LowRank
from tests.torch_bridge.models import VOCABULARY, batch, make, step
from tests.torch_bridge.problems import LINEAR, head, value_and_gradients
from torch_bridge import (
    LinearCrossEntropyLoss,
    PipelineFusedLoss,
    linear_cross_entropy,
    linear_distillation,
    patch_causal_lm,
)
from torch_bridge.integrations.trl import FusedHead

Status = enum.Enum("Status", ["AVAILABLE", "NOT_AVAILABLE"])
FUNCTIONS = LINEAR | {"auto": linear_cross_entropy}


class GatheredParameters:
    def __init__(self, params):
        self.params = params

    def __enter__(self):
        for x in self.params:
            assert x.ds_status is Status.NOT_AVAILABLE
            x.data, x.ds_status, x.gathers = x.whole.clone(), Status.AVAILABLE, x.gathers + 1

    def __exit__(self, *_):
        for x in self.params:
            x.data.fill_(torch.nan)  # for whoever reads it later
            x.data, x.ds_status = torch.empty(0), Status.NOT_AVAILABLE


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    # transformers looks for the `__spec__`, and then for a version, which there is not.
    stand_in = types.SimpleNamespace(zero=sys.modules[__name__], __spec__=True)
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)


def partitioned(whole):
    """A parameter whose hook takes its gradient, in `taken`."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_shape, parameter.ds_status = 0, whole.shape, Status.NOT_AVAILABLE
    parameter.whole, parameter.gathers, parameter.taken = whole.detach(), 0, []

    def take(x):
        x.taken.append(x.grad)
        x.grad = None

    parameter.register_post_accumulate_grad_hook(take)
    return parameter


def check_is_partitioned(parameter, gathers):
    assert (parameter.shape, parameter.ds_status, parameter.gathers) == ((0,), Status.NOT_AVAILABLE, gathers)


@pytest.mark.parametrize("rows", [20, 0, "none that counts"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_backward_gather_equally_often_on_every_process(name, rows):
    hidden, weight, target = head(20 if rows else 0)
    target = torch.full_like(target, -100) if isinstance(rows, str) else target
    function, parameter = FUNCTIONS[name], partitioned(weight)
    want = [*value_and_gradients(function, hidden, weight, target)]
    with torch.no_grad():
        torch.testing.assert_close(function(hidden, parameter, target), want[0])
    check_is_partitioned(parameter, 1)
    loss = function(hidden, parameter, target)
    check_is_partitioned(parameter, 2)
    loss.backward()
    in_backward = name != "in_forward"
    check_is_partitioned(parameter, 2 + in_backward)
    torch.testing.assert_close([loss.detach(), hidden.grad, *parameter.taken], want)
    with FlopCounterMode(display=False):  # by the operator
        function(hidden, parameter, target).backward()
    check_is_partitioned(parameter, 4 + in_backward)
    torch.testing.assert_close(parameter.taken[1], want[2])


@pytest.mark.parametrize("name", ["in_forward", "recompute"])
def test_one_graph_with_several_gradients_of_a_parameter_or_none(name):
    hidden, weight, target = head()
    function, parameter = FUNCTIONS[name], partitioned(weight)
    (function(hidden, weight, target) + function(2 * hidden, weight, target)).backward()
    (function(hidden, parameter, target) + function(2 * hidden, parameter, target)).backward()
    torch.testing.assert_close(parameter.taken, [weight.grad])
    (of_weight,) = torch.autograd.grad(function(hidden, parameter, target), parameter)
    torch.testing.assert_close(of_weight, value_and_gradients(function, hidden, weight, target)[2])
    torch.autograd.grad(function(hidden, parameter, target), hidden)
    check_is_partitioned(parameter, 8 if name == "recompute" else 4)


def test_every_parameter_of_a_head_and_one_that_others_hold():
    hidden, weight, target = head()
    plain = [weight, *(torch.randn(*shape, requires_grad=True) for shape in [(50, 2), (2, 8), (50,)])]
    zero = [partitioned(x) for x in plain]
    for w, up, down, bias in (plain, zero):
        loss = linear_cross_entropy(hidden, LowRank(w, up, down), target, linear_bias=bias, backward="recompute")
        loss.backward()
    for x, parameter in zip(plain, zero, strict=True):
        torch.testing.assert_close(parameter.taken, [x.grad])
        check_is_partitioned(parameter, 2)
    with GatheredParameters(zero[:1]):  # as TRL does, around the forward alone
        row = FusedHead(None).apply(hidden, zero[0], None, target, 1.0, 32768)
    row[0].sum().backward()
    check_is_partitioned(zero[0], 4)
    torch.testing.assert_close(zero[0].taken[1], value_and_gradients(LINEAR["log_probs"], hidden, weight, target)[2])


def test_a_modules_loss_and_logits_gather_its_head():
    hidden, weight, target = head()
    plain = [nn.Parameter(weight.detach()), nn.Parameter(torch.randn(50))]
    zero = [partitioned(x) for x in plain]
    modules = []
    for w, bias in (plain, zero):
        layer = nn.Linear(8, 50)
        layer.weight, layer.bias = w, bias
        modules.append(LinearCrossEntropyLoss.shared_with(layer, logit_softcap=3.0))
        modules.append(PipelineFusedLoss(layer, logit_softcap=3.0))
    whole, _, parts, in_pipeline = modules
    assert repr(parts) == repr(whole)
    with torch.no_grad():
        torch.testing.assert_close(parts.logits(hidden), whole.logits(hidden), rtol=0, atol=0)
        for module in (parts, in_pipeline):
            torch.testing.assert_close(module(hidden, target), whole(hidden, target))
    for parameter in zero:
        check_is_partitioned(parameter, 3)
    with pytest.raises(RuntimeError, match="size"):
        parts.logits(hidden).sum().backward()


@pytest.mark.filterwarnings(
    "ignore:.*lora_bias=True.*", "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_patched_models_loss_and_gradients_and_check_of_labels(adapted):
    model = patch_causal_lm(make("phi"))  # whose head has a bias
    if adapted:
        peft = pytest.importorskip("peft")
        options = {"init_lora_weights": False, "lora_bias": True, "target_modules": ["lm_head"]}
        peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    want, whole = step(model)
    zero = {}
    for module in list(model.lm_head.modules()):
        for name, x in module.named_parameters(recurse=False):
            zero[name, module] = partitioned(x).requires_grad_(x.requires_grad)
            setattr(module, name, zero[name, module])
    loss, _ = step(model)
    torch.testing.assert_close(loss.loss, want.loss)
    taken = [x.taken[0] for x in zero.values() if x.requires_grad]
    torch.testing.assert_close(taken, [x for name, x in whole.items() if "lm_head" in name])
    with pytest.raises(RuntimeError, match="a label lies outside the vocabulary"):
        model(**batch() | {"labels": torch.full_like(batch()["labels"], VOCABULARY)})
    for x in zero.values():
        assert (x.shape, x.ds_status) == ((0,), Status.NOT_AVAILABLE)


def test_a_model_that_is_not_known_is_patched_before_its_weights_are_partitioned():
    model = make("olmo2")
    model.lm_head.weight = partitioned(model.lm_head.weight)
    with pytest.raises(ValueError, match=r"must be run.*its weights are partitioned by ZeRO-3. Patch it before"):
        patch_causal_lm(model)


def test_what_fsdp1_has_sharded_is_refused_by_name():
    hidden, weight, target = head()
    part = nn.Parameter(weight.detach()[:10].flatten())
    part._fsdp_flattened = True
    weight.untyped_storage().resize_(0)
    for sharded in (part, weight):
        with pytest.raises(ValueError, match=r"linear_weight has .*FSDP1.*summon_full_params"):
            linear_cross_entropy(hidden, sharded, target)
    weight = torch.ones(7, hidden.shape[-1])
    for of in ({"linear_bias": part}, {"class_weights": part}, {"linear_weight": LowRank(weight, part, part)}):
        with pytest.raises(ValueError, match=rf"{next(iter(of))}\S* has shape.*FSDP1"):
            linear_cross_entropy(**{"input": hidden, "linear_weight": weight, "target": target} | of)
    with pytest.raises(ValueError, match=r"teacher_weight has shape.*FSDP1"):
        linear_distillation(hidden, weight, hidden, part)
