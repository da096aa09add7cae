"""`torch.compile` and `torch.library`'s own checks."""

import pytest
import torch

from torch_bridge import cross_entropy, linear_cross_entropy, linear_row_statistics, selective_log_softmax

MODES = ["in_forward", "recompute"]


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests():
    """The compiled functions of two tests may share their code, hence each other's guards."""
    torch._dynamo.reset()


def problem(tokens=12):
    torch.manual_seed(tokens)
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    return hidden, weight, torch.randint(0, 40, (tokens,))


def loss(mode, hidden, weight, target, scale=1.0):
    return linear_cross_entropy(torch.tanh(hidden), weight, target, backward=mode, label_smoothing=0.1) * scale


def gradients(function, hidden, weight, target):
    value = function(hidden, weight, target)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_loss_is_the_eager_one_without_graph_breaks(mode):
    def function(*given):
        return loss(mode, *given)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled, *problem()), gradients(function, *problem()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, while inductor is imported
def test_inductor_compiles_loss_and_statistics():
    def function(hidden, weight, target):
        row = linear_row_statistics(hidden, weight, target, statistics=("log_prob", "entropy", "argmax"))
        return loss("auto", hidden, weight, target) - (row.log_prob + 0.1 * row.entropy).mean()

    compiled = torch.compile(function, fullgraph=True)
    for got, want in zip(gradients(compiled, *problem()), gradients(function, *problem()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_changing_token_counts_are_compiled_once(mode):
    def function(*given):
        return loss(mode, *given)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (12, 7, 30, 300):
            for got, want in zip(
                gradients(compiled, *problem(tokens)), gradients(function, *problem(tokens)), strict=True
            ):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


MATERIALIZED = {
    "in place": lambda logits, target: cross_entropy(logits, target, inplace_backward=True),
    "none": lambda logits, target: cross_entropy(logits, target, reduction="none").square().sum(),
    "options": lambda logits, target: cross_entropy(
        logits, target, reduction="sum", label_smoothing=0.1, z_loss=0.1, logit_softcap=3.0, vocab_size=30,
        class_weights=torch.linspace(0, 2, 30), token_weights=torch.ones(len(target)) / 3,
    ),
    "normalizer": lambda logits, target: cross_entropy(logits, target, normalizer=target.sum()),
    "selective in place": lambda logits, target: selective_log_softmax(logits, target, inplace_backward=True).sum(),
    "several": lambda logits, target: selective_log_softmax(logits, torch.stack([target, target // 2], 1)).sum(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, None) for name in MATERIALIZED), ("options", True), ("several", True)]
)
def test_losses_of_stored_logits_are_compiled_without_graph_breaks(name, dynamic):
    def function(hidden, weight, target):
        return MATERIALIZED[name](torch.tanh(hidden) @ weight.T, target)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (12, 7, 30):  # the second makes the rows dynamic where they are not from the start
        for got, want in zip(gradients(compiled, *problem(tokens)), gradients(function, *problem(tokens)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, while inductor is imported
@pytest.mark.parametrize("name", ["in place", "options", "selective in place"])
def test_inductor_compiles_losses_of_stored_logits(name):
    def function(hidden, weight, target):
        return MATERIALIZED[name](torch.tanh(hidden) @ weight.T, target)

    compiled = torch.compile(function, fullgraph=True)
    for tokens in (12, 7):
        for got, want in zip(gradients(compiled, *problem(tokens)), gradients(function, *problem(tokens)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("statistics", ["lse,target_logit,mean_logit", "lse,log_prob"])
def test_the_operator_of_stored_logits_passes_torchs_own_checks(statistics, inplace):
    logits, target = torch.randn(12, 40, requires_grad=True), problem()[2][:, None]
    valid = torch.arange(12) % 4 != 0 if "mean_logit" in statistics else None
    arguments = (logits, target, valid, None, statistics, 40, None, 1.0, inplace)
    torch.library.opcheck(torch.ops.pallas_ce.materialized_row_statistics.default, arguments)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("differentiated", [0, 3])
def test_the_loss_operator_passes_torchs_own_checks(mode, differentiated):
    hidden, weight, target = problem()
    tensors = [x.detach().requires_grad_(differentiated > 0) for x in (hidden, weight)]
    options = [differentiated, "float32", "mean", -100, None, None, mode, None, None, True]
    arguments = (*tensors, target.int(), *[None] * 7, *options)
    torch.library.opcheck(torch.ops.pallas_ce.linear_cross_entropy.default, arguments)


def test_the_statistics_operator_passes_torchs_own_checks():
    hidden, weight, target = problem()
    arguments = (hidden, weight, target.int(), None, None, None, torch.ones(12, dtype=torch.bool), None)
    options = (3, "float32", "lse,entropy,max_logit,argmax", None, None, None, None, 1.0)
    torch.library.opcheck(torch.ops.pallas_ce.linear_row_statistics.default, (*arguments, *options))


@pytest.mark.parametrize("mode", MODES)
def test_a_dispatch_mode_sees_the_operators_and_gets_what_is_computed_without_one(mode):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    def function(*given):
        return loss(mode, *given)

    want = gradients(function, *problem())
    with Recorder():
        got = gradients(function, *problem())
    ours = [name for name in seen if name.startswith("pallas_ce")]
    assert ours == ["pallas_ce::linear_cross_entropy", "pallas_ce::linear_cross_entropy_backward"]
    assert all(map(torch.equal, got, want))


def test_shapes_are_known_without_computing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden, weight = torch.empty(2, 3, 8, requires_grad=True), torch.empty(40, 8, requires_grad=True)
        target = torch.empty(2, 3, dtype=torch.int64)
        value = linear_cross_entropy(hidden, weight, target, reduction="none")
        value.sum().backward()
    assert value.shape == (2, 3)
    assert weight.grad.shape == (40, 8)
