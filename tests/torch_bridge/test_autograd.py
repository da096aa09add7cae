"""What PyTorch's autograd does with an operation: partial, repeated and retained backward, autocast, checkpoints."""

import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torch_bridge import linear_cross_entropy, linear_row_statistics
from torch_bridge.autograd import operator as ops
from torch_bridge.programs import calls

MODES = ["in_forward", "recompute"]
WIDTH, VOCABULARY, TOKENS = 8, 50, 20


@pytest.fixture
def head():
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,))


@pytest.fixture
def asked(monkeypatch):
    """Which gradients each backward computes."""
    seen = []

    def counted(original):
        def call(*arguments):
            seen.append(arguments[-1])
            return original(*arguments)

        return call

    for name in ("backward", "handed_over"):
        monkeypatch.setattr(calls, name, counted(getattr(calls, name)))
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["input", "linear_weight"])
def test_a_frozen_side_is_not_computed_and_keeps_nothing(head, asked, mode, frozen):
    hidden, weight, target = head
    {"input": hidden, "linear_weight": weight}[frozen].requires_grad_(False)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(id(x), x), lambda x: x):
        loss = linear_cross_entropy(hidden, weight, target, backward=mode)
    loss.backward()
    (names,) = asked
    assert frozen not in names
    sums = {tuple(x.shape) for x in kept.values() if x.dtype == torch.float32 and x is not hidden and x is not weight}
    if frozen == "linear_weight" and mode == "in_forward":
        assert (TOKENS, WIDTH) in sums
    assert sum(x.numel() == VOCABULARY * WIDTH for x in kept.values()) == 1 + (
        mode == "in_forward" and frozen == "input"
    )


def test_recompute_keeps_a_few_numbers_for_each_token(head):
    hidden, weight, target = head
    count = 0

    def pack(x):
        nonlocal count
        count += x.numel() if x is not hidden and x is not weight else 0
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        linear_cross_entropy(hidden, weight, target, backward="recompute")
    assert count <= hidden.numel() + weight.numel() + 4 * TOKENS  # the inputs themselves are saved, not copied


@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_the_gradients_computes_that_part_alone(head, asked, mode):
    hidden, weight, target = head
    loss = linear_cross_entropy(hidden, weight, target, backward=mode)
    both = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    scaled = (hidden * 1.0).requires_grad_()
    again = linear_cross_entropy(scaled, weight, target, backward=mode)
    (for_hidden,) = torch.autograd.grad(again, hidden, retain_graph=True)
    again.backward(inputs=[weight])
    assert asked[1:] == [("input",), ("linear_weight",)]
    torch.testing.assert_close(for_hidden, both[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(weight.grad, both[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_retained_and_repeated_backward_with_any_upstream_is_exact_each_time(head, mode):
    hidden, weight, target = head
    loss = linear_cross_entropy(hidden, weight, target, backward=mode)
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for factor in (3.0, 0.5, 3.0):
        again = torch.autograd.grad(loss * factor, (hidden, weight), retain_graph=True)
        for got, want in zip(again, once, strict=True):
            torch.testing.assert_close(got, factor * want, rtol=1e-5, atol=1e-7)
    (3 * loss).backward()
    for x, want in zip((hidden, weight), once, strict=True):
        torch.testing.assert_close(x.grad, 3 * want, rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_several_losses_add_up(head):
    hidden, weight, target = head
    one = linear_cross_entropy(hidden, weight, target, backward="in_forward")
    want = torch.autograd.grad(one, (hidden, weight))
    losses = [linear_cross_entropy(hidden, weight, target, backward="in_forward") for _ in range(3)]
    (losses[0] + 2 * losses[1]).backward()
    losses[2].backward()
    for x, gradient in zip((hidden, weight), want, strict=True):
        torch.testing.assert_close(x.grad, 4 * gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [TOKENS, 256])  # padded and not
def test_the_last_backward_of_a_graph_gives_what_one_that_keeps_it_does(head, dtype, transposed, tokens):
    hidden, weight, target = head
    hidden = hidden.detach().to(dtype).repeat(-(-tokens // TOKENS), 1)[:tokens].requires_grad_()
    weight = weight.detach().to(dtype)
    weight = (weight.t().contiguous().t() if transposed else weight).requires_grad_()
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)
    smoothing = torch.tensor(0.1, requires_grad=True)  # its gradient is computed, not handed over
    inputs = hidden, weight, bias, smoothing
    loss = linear_cross_entropy(
        hidden, weight, target.repeat(13)[:tokens], linear_bias=bias, label_smoothing=smoothing, backward="in_forward"
    )
    for upstream in (1.0, 3.0):  # the last of them loses the graph
        kept = torch.autograd.grad(loss * upstream, inputs, retain_graph=True)
    for got, want, x in zip(torch.autograd.grad(loss * upstream, inputs), kept, inputs, strict=True):
        assert got.stride() == x.stride()
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_learned_scale_is_not_forgotten_in_the_last_backward(head):
    hidden, weight, target = head
    scale = torch.tensor(0.7, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, target, logit_scale=scale, backward="in_forward")
    kept = torch.autograd.grad(loss, (hidden, weight, scale), retain_graph=True)
    for got, want in zip(torch.autograd.grad(loss, (hidden, weight, scale)), kept, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


def test_the_loss_may_be_changed_in_place(head):
    hidden, weight, target = head
    loss = linear_cross_entropy(hidden, weight, target)
    loss /= 4
    loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_changed_between_forward_and_backward_is_noticed(head, mode):
    hidden, weight, target = head
    loss = linear_cross_entropy(hidden, weight, target, backward=mode)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients_nothing_is_kept(head):
    hidden, weight, target = head
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, target).grad_fn is None
    with torch.inference_mode():
        linear_cross_entropy(hidden, weight, target)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(head, mode, reentrant):
    hidden, weight, target = head

    def block(hidden):
        return linear_cross_entropy(torch.tanh(hidden), weight, target, backward=mode)

    want = torch.autograd.grad(block(hidden), (hidden, weight))
    checkpoint(block, hidden, use_reentrant=reentrant).backward()
    assert torch.equal(hidden.grad, want[0])
    assert torch.equal(weight.grad, want[1])


@pytest.mark.parametrize("mode", MODES)
def test_autocast_computes_in_its_dtype_and_float32_weights_get_float32_gradients(head, mode):
    hidden, weight, target = head
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, target, backward=mode)
    want = linear_cross_entropy(hidden.bfloat16(), weight, target, backward=mode)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    assert not torch.equal(got, linear_cross_entropy(hidden, weight, target, backward=mode))
    (for_weight,) = torch.autograd.grad(got, weight)
    assert for_weight.dtype == torch.float32
    assert not torch.equal(for_weight, for_weight.bfloat16().float())  # the sum itself, not one that was rounded


@pytest.mark.parametrize("mode", MODES)
def test_low_precision_is_as_accurate_as_torch_itself(head, mode):
    hidden, weight, target = head

    def gradients(loss, arrays):
        return torch.autograd.grad(loss(*arrays), arrays)

    def ours(h, w):
        return linear_cross_entropy(h, w, target, backward=mode)

    def stored(h, w):
        return torch.nn.functional.cross_entropy((h @ w.T).float(), target)

    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    exact = gradients(stored_in_float64(target), [x.detach().double().requires_grad_() for x in low])
    for got, plain, want in zip(gradients(ours, low), gradients(stored, low), exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() <= 1.5 * (plain.double() - want).norm()


def stored_in_float64(target):
    return lambda h, w: torch.nn.functional.cross_entropy(h @ w.T, target)


def test_small_float16_gradients_survive_until_the_loss_is_scaled(head):
    """A gradient scaler multiplies a loss whose own gradients lie below float16's range."""
    hidden, weight, target = (x.detach() for x in head)
    low = [x.half().requires_grad_() for x in (hidden, weight)]
    tiny = 2.0**-24
    loss = linear_cross_entropy(*low, target, normalizer=TOKENS / tiny, backward="in_forward")
    got = torch.autograd.grad(loss / tiny, low)
    want = torch.autograd.grad(linear_cross_entropy(*low, target, backward="in_forward"), low)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_microbatches_add_up_in_a_float32_main_grad(head, mode):
    hidden, weight, target = (x.detach() for x in head)
    weight = weight.bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(weight.shape)
    for part in (slice(0, 10), slice(10, 20)):
        loss = linear_cross_entropy(hidden[part].bfloat16(), weight, target[part], backward=mode)
        loss.backward()
    assert weight.grad is None
    plain = weight.detach().clone().requires_grad_()
    want = torch.zeros(weight.shape)
    for part in (slice(0, 10), slice(10, 20)):
        (gradient,) = torch.autograd.grad(
            linear_cross_entropy(hidden[part].bfloat16(), plain, target[part], backward=mode), plain
        )
        want += gradient
    assert torch.equal(weight.main_grad, want)


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_asked_for_is_returned_and_not_added_to_main_grad(head, mode):
    hidden, weight, target = head
    (want,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, backward=mode), weight)
    weight.main_grad = torch.zeros_like(weight)
    (got,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, backward=mode), weight)
    assert torch.equal(got, want)
    assert not weight.main_grad.any()


def test_megatrons_hooks_still_see_a_gradient(head):
    hidden, weight, target = head
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    linear_cross_entropy(hidden, weight, target).backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    assert weight.main_grad.any()


def test_of_a_tied_weight_megatrons_hooks_see_zeros(head):
    """To which the embedding's gradient is added, before they go into `main_grad`."""
    hidden, weight, target = head
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    weight.zero_out_wgrad = True
    (linear_cross_entropy(hidden, weight, target) + weight.sum()).backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_statistics_that_are_not_used_cost_no_gradient(head):
    hidden, weight, target = head
    row = linear_row_statistics(hidden, weight, target, statistics=("lse", "entropy", "argmax"))
    assert not row.argmax.requires_grad
    row.lse.sum().backward()
    want = torch.autograd.grad(torch.logsumexp(hidden @ weight.T, 1).sum(), (hidden, weight))
    torch.testing.assert_close(hidden.grad, want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, want[1], rtol=1e-5, atol=1e-6)


def test_scalar_tensors_are_differentiated(head):
    hidden, weight, target = (x.detach() for x in head)
    scale, beta = torch.tensor(0.7, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    smoothing, norm = torch.tensor(0.2, requires_grad=True), torch.tensor(7.0, requires_grad=True)
    loss = linear_cross_entropy(
        hidden, weight, target, logit_scale=scale, z_loss=beta, label_smoothing=smoothing, normalizer=norm
    )
    z = scale * (hidden @ weight.T)
    lse, picked = torch.logsumexp(z, 1), z.gather(1, target[:, None])[:, 0]
    each = (1 - smoothing) * (lse - picked) + smoothing * (lse - z.mean(1)) + beta * lse**2
    inputs = (scale, beta, smoothing, norm)
    got, want = torch.autograd.grad(loss, inputs), torch.autograd.grad(each.sum() / norm, inputs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def program_of(hidden, weight, target, mode):
    options = [3, "float32", "mean", -100, None, None, mode, None, None, False]
    return ops.LINEAR_CROSS_ENTROPY.program([hidden, weight, target, *[None] * 7], options)


def names_read(program, backward):
    """What it takes, with the shapes of the arrays that the forward kept."""
    shapes = (*program.inputs, *program.outputs, *program.kept)
    taken = program.layout.taken
    return {taken[i][0] if i < len(program.inputs) else shapes[i].shape for i in backward.reads if i < len(shapes)}


@pytest.mark.parametrize(
    ("mode", "reads"),
    [
        ("in_forward", {(256, WIDTH), (VOCABULARY, WIDTH)}),
        ("recompute", {"input", "linear_weight", "target", (256,)}),
    ],
)
def test_a_backward_takes_only_what_it_computes_from(head, mode, reads):
    """The rest is neither padded nor handed over."""
    program = program_of(*head, mode)
    assert names_read(program, program.backward(("input", "linear_weight"), (True,))) == reads


@pytest.mark.parametrize(
    ("asked", "products"), [(("input", "linear_weight"), 3), (("input",), 2), (("linear_weight",), 2)]
)
def test_half_a_recomputing_backward_has_no_product_of_the_other_half(head, asked, products):
    """Counted in the compiled program: the logits again, and one product for each gradient asked for."""
    program = program_of(*head, "recompute")
    backward = program.backward(asked, (True,))
    taken = (*program.inputs, *program.outputs, *program.kept, *program.outputs)
    compiled = backward.run.lower(*(taken[i] for i in backward.reads)).compile()
    assert len(re.findall(r"= f32\S* dot\(", compiled.as_text())) == products
