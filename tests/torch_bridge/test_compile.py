"""`torch.compile` and `torch.library`'s own checks."""

import jax
import pytest
import torch

from pallas_ce import LowRank
from tests.torch_bridge.problems import MODES, head, value_and_gradients
from torch_bridge import (
    cross_entropy,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    linear_row_statistics,
    selective_log_softmax,
)
from torch_bridge.autograd import NAMESPACE, OPERATORS, namespace
from torch_bridge.programs.functions import Options


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests():
    """The compiled functions of two tests may share their code, hence each other's guards."""
    torch._dynamo.reset()


def problem(tokens=12):
    return *head(tokens, vocabulary=40), torch.rand(tokens) + 0.5


def loss(mode):
    def function(hidden, weight, target, temperature=None):
        return linear_cross_entropy(torch.tanh(hidden), weight, target, backward=mode, label_smoothing=0.1)

    return function


def policy(hidden, weight, target, temperature):
    found = linear_log_probs(torch.tanh(hidden), weight, target, temperature=temperature, return_entropy=True)
    return -(found.log_probs * torch.cos(target.float())).mean() - 0.01 * found.entropy.mean()


def loss_and_statistics(hidden, weight, target, temperature):
    row = linear_row_statistics(hidden, weight, target, statistics=("log_prob", "entropy", "argmax"))
    return loss("auto")(hidden, weight, target) - (row.log_prob + 0.1 * row.entropy).mean()


def of_logits(function):
    return lambda hidden, weight, target, temperature: function(torch.tanh(hidden) @ weight.T, target)


def low_rank(hidden, weight, target, temperature):
    weight = LowRank(weight, torch.sin(weight[:, :3]), torch.cos(weight[:3]), 0.7)
    return linear_cross_entropy(torch.tanh(hidden), weight, target)


def distillation(hidden, weight, target, temperature):
    teacher = torch.cos(hidden.detach()), torch.sin(weight.detach())
    return linear_distillation(hidden, weight, *teacher, divergence="reverse_kl", linear_bias=weight[:, 0])


FUNCTIONS = {
    "in_forward": loss("in_forward"),
    "recompute": loss("recompute"),
    "policy": policy,
    "policy, by a number": lambda hidden, weight, target, _: policy(hidden, weight, target, 0.7),
    "shift": lambda hidden, weight, target, _: linear_cross_entropy(torch.tanh(hidden), weight, target, shift=1),
    "low rank": low_rank,
    "distillation": distillation,
    "in place": of_logits(lambda logits, target: cross_entropy(logits, target, inplace_backward=True)),
    "options": of_logits(lambda logits, target: cross_entropy(
        logits, target, reduction="sum", label_smoothing=0.1, z_loss=0.1, logit_softcap=3.0, vocab_size=30,
        class_weights=torch.linspace(0, 2, 30), token_weights=torch.ones(len(target)) / 3,
    )),
    "selective in place": of_logits(
        lambda logits, target: selective_log_softmax(logits, target, inplace_backward=True).sum()
    ),
    "several": of_logits(
        lambda logits, target: selective_log_softmax(logits, torch.stack([target, target // 2], 1)).sum()
    ),
}  # fmt: skip
LINEAR = list(FUNCTIONS)[:5]


def assert_as_eager(compiled, function, sizes, rtol, atol):
    for tokens in sizes:
        given = problem(tokens)
        want = value_and_gradients(function, *given)
        torch.testing.assert_close(value_and_gradients(compiled, *given), want, rtol=rtol, atol=atol)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [(name, None) for name in FUNCTIONS if "policy" not in name and name != "shift"]
    + [(name, True) for name in (*LINEAR, "options", "several")],
)
def test_a_compiled_function_is_the_eager_one_without_graph_breaks(name, dynamic):
    """At any token count by one program if rows are dynamic, which from the second count on they are in any case."""
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=bool(dynamic) and name in LINEAR):
        sizes = (12, 7, 30, 300) if dynamic else (12, 7, 30)
        assert_as_eager(compiled, FUNCTIONS[name], sizes, 1e-6, 1e-7 if name in LINEAR else 1e-6)


def test_a_compiled_function_of_float64_computes_in_it():
    hidden, weight, target, _ = problem()
    given = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), target
    with jax.enable_x64(True):
        compiled = torch.compile(lambda *given: linear_cross_entropy(*given), fullgraph=True, backend="aot_eager")
        got, want = (value_and_gradients(way, *given) for way in (compiled, linear_cross_entropy))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


@pytest.mark.nightly
def test_a_compiled_function_serves_every_temperature_that_is_a_number():
    compiled = torch.compile(policy, fullgraph=True, backend="aot_eager")
    for temperature in (0.7, 1.0, 1.3, 1.7):
        given = (*problem()[:3], temperature)
        torch.testing.assert_close(compiled(*given), policy(*given), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_functions_name_targets_outside_the_vocabulary_where_they_are_validated(backend):
    def validated(hidden, weight, target):
        return linear_cross_entropy(hidden, weight, target, validate_labels=True)

    compiled, (hidden, weight, target, _) = torch.compile(validated, fullgraph=True, backend=backend), problem()
    given = (hidden, weight, target)
    torch.testing.assert_close(value_and_gradients(compiled, *given), value_and_gradients(linear_cross_entropy, *given))
    target[3] = 40
    with pytest.raises(ValueError, match=r"target\[3\]=40 is neither in \[0, vocab_size=40\)"):
        compiled(hidden, weight, target)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, while inductor is imported
@pytest.mark.parametrize(
    ("function", "sizes"),
    [(loss_and_statistics, (12,)), *((FUNCTIONS[n], (12, 7)) for n in ("in place", "options", "selective in place"))],
)
def test_inductor_compiles_losses_and_statistics(function, sizes):
    assert_as_eager(torch.compile(function, fullgraph=True), function, sizes, 1e-5, 1e-6)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("mean", [True, False])
def test_the_operator_of_stored_logits_passes_torchs_own_checks(mean, inplace):
    logits, target = torch.randn(12, 40, requires_grad=True), problem()[2][:, None]
    valid = torch.arange(12) % 4 != 0 if mean else None
    arguments = (logits, target, valid, None, 40, mean, None, 1.0, inplace)
    torch.library.opcheck(OPERATORS.materialized_row_statistics.default, arguments)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    "name", [*MODES, "log_probs", "log_probs, several", "log_probs, support", "row_statistics", "two"]
)
@pytest.mark.parametrize("differentiated", ["", "input,linear_weight", "input,linear_weight,linear_up,linear_down"])
def test_the_linear_operators_pass_torchs_own_checks(name, differentiated):
    hidden, weight, target, temperature = problem()
    tensors = [x.detach().requires_grad_(bool(differentiated)) for x in (hidden, weight)]
    term = [torch.randn(40, 2, requires_grad=True), torch.randn(2, 8, requires_grad=True)]
    term, scale = (term, 0.7) if "linear_up" in differentiated else ([None, None], 1.0)
    target = (torch.stack([target] * 3, 1) if "several" in name else target).int()
    head, options = (*tensors, target, *term, None, None), {"term_scale": scale}
    if name in MODES:
        operator, others = OPERATORS.linear_cross_entropy, [None] * 5
        options |= {"backward": name, "return_metrics": True}
    elif name == "row_statistics":
        operator, others = OPERATORS.linear_row_statistics, [None, torch.ones(12).bool(), None]
        options |= {"statistics": "lse,entropy,max_logit,argmax"}
    elif name == "two":
        teacher = [torch.randn(12, 5), torch.randn(40, 5), None, None]
        operator, others = OPERATORS.linear_distillation, [*teacher, None, temperature, None, None]
    else:
        support = torch.stack([target, target + 1], 1) if "support" in name else None
        operator, others = OPERATORS.linear_log_probs, [temperature, support]
        options |= {"return_entropy": True, "return_sum_sq_probs": True, "return_hit": True}
    torch.library.opcheck(operator.default, (*head, *others, differentiated, *Options(**options)[1:]))


def test_other_code_has_operators_of_other_names_which_no_graph_on_disk_calls(tmp_path):
    source = tmp_path / "package" / "programs.py"
    source.parent.mkdir()
    found = []
    for text, versions in [("kept = 1", "0.2"), ("kept = 2", "0.2"), ("kept = 2", "0.3")]:
        source.write_text(text)
        found.append(namespace([tmp_path], versions))
    assert len(set(found)) == 3
    assert namespace([tmp_path], "0.3") == found[-1]


def test_all_operators_have_names_of_this_code():
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("pallas_ce")]
    assert len(registered) >= 9
    assert all(name.startswith(f"{NAMESPACE}::") for name in registered)
