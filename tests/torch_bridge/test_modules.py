"""The head module, and the pipeline's pieces in one process."""

import pytest
import torch
from torch import nn

from torch_bridge import LinearCrossEntropyLoss, PipelineFusedLoss, linear_cross_entropy, put_head_back, take_head


def problem():
    torch.manual_seed(0)
    return torch.randn(2, 5, 8), torch.randint(0, 30, (2, 5))


@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_fit_those_of_a_linear_layer_both_ways(bias):
    linear, head = nn.Linear(8, 30, bias=bias), LinearCrossEntropyLoss(8, 30, bias=bias, class_weights=torch.ones(30))
    head.load_state_dict(linear.state_dict())
    linear.load_state_dict(head.state_dict())
    x, target = problem()
    want = nn.functional.cross_entropy(linear(x).flatten(0, 1), target.flatten())
    torch.testing.assert_close(head(x, target), want)
    torch.testing.assert_close(head.logits(x), linear(x))


def test_a_shared_head_trains_the_embedding_it_is_tied_to():
    embedding = nn.Embedding(30, 8)
    head = LinearCrossEntropyLoss.shared_with(embedding, label_smoothing=0.1)
    x, target = problem()
    head(x, target).backward()
    assert head.weight is embedding.weight
    assert embedding.weight.grad.any()


def test_options_buffers_and_arguments_of_a_call_reach_the_loss():
    x, target = problem()
    c = torch.linspace(0.5, 1.5, 30)
    head = LinearCrossEntropyLoss(8, 30, class_weights=c, reduction="sum", logit_softcap=3.0, z_loss=0.1)
    w = torch.rand(2, 5)
    want = linear_cross_entropy(
        x, head.weight, target, class_weights=c, reduction="sum", logit_softcap=3.0, z_loss=0.1, token_weights=w
    )
    assert torch.equal(head(x, target, token_weights=w), want)
    assert "logit_softcap=3.0" in repr(head)
    assert list(head.state_dict()) == ["weight"]
    assert head.logits(x).abs().max() <= 3.0
    mean = LinearCrossEntropyLoss.shared_with(head, normalizer=4)
    torch.testing.assert_close(mean(x, target, normalizer=2), 2 * mean(x, target))


def test_unknown_options_and_layers_without_a_weight_are_refused():
    with pytest.raises(TypeError, match="softcap"):
        LinearCrossEntropyLoss(8, 30, softcap=3.0)
    with pytest.raises(TypeError, match="Dropout has no parameter"):
        PipelineFusedLoss(nn.Dropout())
    layer = nn.Linear(4, 9)
    layer.base_layer = nn.Linear(4, 9)
    with pytest.raises(TypeError, match=r"Linear is a layer with an adapter.*LowRank"):
        LinearCrossEntropyLoss.shared_with(layer)


def test_options_are_checked_when_the_module_is_made():
    with pytest.raises(ValueError, match="reduction='avg' is unknown"):
        LinearCrossEntropyLoss(8, 30, reduction="avg")
    with pytest.raises(TypeError, match=r"logit_scale is an nn\.Parameter"):
        LinearCrossEntropyLoss(8, 30, logit_scale=nn.Parameter(torch.ones(())))
    wrong = {"implementation": "fast", "shift": -1, "vocab_size": 31, "scratch_bytes": 0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            LinearCrossEntropyLoss(8, 30, **{name: value})
    with pytest.raises(ValueError, match=r"class_weights has shape \(30,\); it must be \(29,\)"):
        LinearCrossEntropyLoss(8, 30, vocab_size=29, class_weights=torch.ones(30))


def test_taking_the_head_moves_its_use_and_not_its_parameters():
    model = nn.Sequential()
    model.add_module("trunk", nn.Linear(8, 8))
    model.add_module("lm_head", nn.Linear(8, 30))
    before, names = dict(model.named_parameters()), list(model.state_dict())
    x, target = problem()
    want = nn.functional.cross_entropy(model(x).flatten(0, 1), target.flatten())
    logits = model(x)
    loss_fn = take_head(model)
    assert list(model.state_dict()) == names
    assert all(x is before[name] for name, x in model.named_parameters())
    assert model(x).shape == (2, 5, 8)
    torch.testing.assert_close(loss_fn(model(x), target), want)
    assert loss_fn.options["backward"] == "recompute"
    torch.testing.assert_close(model.eval()(x), logits)
    with pytest.raises(ValueError, match="returned logits"):
        loss_fn(model(x), target)
    model.lm_head.weight = nn.Parameter(torch.zeros(30, 8))
    put_head_back(model)
    assert type(model.lm_head) is nn.Linear
    assert not model.lm_head.weight.any()
    with pytest.raises(TypeError, match="not a head that take_head took"):
        put_head_back(model)
    model.to("meta")
    loss_fn = take_head(model)
    model.to_empty(device="cpu")
    model.load_state_dict({name: torch.randn(x.shape) for name, x in model.state_dict().items()}, assign=True)
    hidden = model.train()(x)
    want = nn.functional.linear(hidden, model.lm_head.weight, model.lm_head.bias).flatten(0, 1)
    loss = loss_fn(hidden, target)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(want, target.flatten()))
    loss.backward()
    assert model.lm_head.weight.grad.any()
    assert loss_fn.weight is model.lm_head.weight
    with pytest.raises(TypeError, match="0 is a ReLU"):
        take_head(nn.Sequential(nn.ReLU()), "0")


def test_heads_that_began_on_the_meta_device_are_initialised_by_each_modules_reset_parameters():
    """FSDP2's usual start. Each weight is drawn as an `nn.Linear`'s, and class weights are those that were given."""
    classes = torch.rand(50)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 50))
        parts = [nn.Linear(16, 50), LinearCrossEntropyLoss(16, 50, bias=True, class_weights=classes)]
    take_head(model, "1")
    drawn = []
    for part in (*parts, model):
        part.to_empty(device="cpu")
        for parameter in part.parameters():
            nn.init.constant_(parameter, 1e30)
        torch.manual_seed(0)
        for module in reversed(list(part.modules())):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        drawn.append(list(part.parameters())[-2:])
    for weight, bias in drawn[1:]:
        assert torch.equal(weight, drawn[0][0])
        assert torch.equal(bias, drawn[0][1])
    assert torch.equal(parts[1].class_weights, classes)


class Cut(nn.Module):
    """A model with its head at the end, for the tracing front end to cut."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.middle, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 30)

    def forward(self, x):
        return self.lm_head(self.middle(torch.relu(self.trunk(x))))


@pytest.mark.filterwarnings("ignore")  # the front end's own
def test_the_tracing_front_end_of_pipelining_gives_the_last_stage_the_head_that_a_loss_took():
    from torch.distributed.pipelining import SplitPoint, pipeline

    x, target = problem()
    model = Cut()
    nn.functional.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss_fn = take_head(model)
    pipe = pipeline(model, mb_args=(x,), split_spec={"middle": SplitPoint.BEGINNING})
    first, last = pipe.get_stage_module(0), pipe.get_stage_module(1)
    assert {"lm_head.weight", "lm_head.bias"} <= set(last.state_dict())
    assert last.get_parameter("lm_head.weight") is model.lm_head.weight
    loss_fn(last(first(x)), target).backward()
    found = dict(first.named_parameters()) | dict(last.named_parameters())
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(found[name].grad, gradient)


def test_a_module_is_one_call_in_a_symbolic_trace_and_other_traces_are_refused_by_name():
    head, (x, target) = LinearCrossEntropyLoss(8, 30, bias=True, label_smoothing=0.1), problem()
    torch.testing.assert_close(torch.fx.symbolic_trace(head)(x, target), head(x, target))
    with pytest.raises(TypeError, match=r"input is a Proxy.*for torch.fx.symbolic_trace, torch.fx.wrap"):
        torch.fx.symbolic_trace(lambda x: linear_cross_entropy(x, head.weight, target))
