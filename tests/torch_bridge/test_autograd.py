"""What PyTorch's autograd does with an operation: partial, repeated and retained backward, autocast, checkpoints."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pallas_ce import LowRank
from tests.torch_bridge.problems import MODES, assert_exact, stored_loss
from torch_bridge import linear_cross_entropy, linear_log_probs
from torch_bridge.autograd import operator as ops
from torch_bridge.programs import calls
from torch_bridge.programs.functions import Options

WIDTH, VOCABULARY, TOKENS = 8, 50, 20

in_forward = functools.partial(linear_cross_entropy, backward="in_forward")
assert_close, gradients = torch.testing.assert_close, torch.autograd.grad


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
@pytest.mark.parametrize("frozen", ["input", "linear_weight", None])
def test_a_backward_keeps_the_inputs_and_in_forward_sums_of_what_is_not_frozen(head, asked, mode, frozen):
    differentiated = dict(zip(("input", "linear_weight"), head, strict=False))
    if frozen is not None:
        differentiated.pop(frozen).requires_grad_(False)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        linear_cross_entropy(*head, backward=mode).backward()
    assert asked == [tuple(differentiated)]
    beside = [x.shape for place, x in kept.items() if place not in {x.data_ptr() for x in head}]
    assert beside == [x.shape for x in differentiated.values() if mode == "in_forward"]


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("trained", ["up", "down", "up down", "hidden up down", "weight up"])
@pytest.mark.parametrize("transposed", [False, True])
def test_of_a_low_rank_head_only_what_requires_gradients_has_those_of_the_merged_weight(head, trained, transposed):
    given = dict(zip(("hidden", "weight"), head, strict=False))
    given |= {"up": torch.randn(VOCABULARY, 3), "down": torch.randn(3, WIDTH)}
    given = {name: x.detach().requires_grad_(name in trained) for name, x in given.items()}

    def merged(x):
        return x["weight"] + 0.7 * x["up"] @ x["down"]

    want = linear_cross_entropy(given["hidden"], merged(given), head[2])
    exact = gradients(want, [given[name] for name in trained.split()])
    weight = given["weight"].detach()
    weight = given["weight"] = (weight.t().contiguous().t() if transposed else weight).requires_grad_(
        "weight" in trained
    )
    term = given["up"], given["down"], 0.7
    loss = linear_cross_entropy(given["hidden"], LowRank(weight, *term), head[2])
    assert_close(loss, want)
    loss.backward()
    assert_close([given[name].grad for name in trained.split()], list(exact), rtol=1e-4, atol=1e-5)
    assert all(x.grad is None for name, x in given.items() if name not in trained)
    with torch.autocast("cpu", torch.bfloat16):  # gradients keep their tensors' dtypes
        narrow = linear_cross_entropy(given["hidden"], LowRank(weight.bfloat16(), *term), head[2])
    assert_close(narrow, want, rtol=2e-2, atol=0)
    assert {x.dtype for x in gradients(narrow, [given[name] for name in trained.split()])} == {torch.float32}


@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_the_gradients_computes_that_part_alone(head, asked, mode):
    hidden, weight, target = head
    both = gradients(linear_cross_entropy(*head, backward=mode), (hidden, weight))
    again = linear_cross_entropy(hidden * 1.0, weight, target, backward=mode)
    (for_hidden,) = gradients(again, hidden, retain_graph=True)
    again.backward(inputs=[weight])
    assert asked[1:] == [("input",), ("linear_weight",)]
    assert_close((for_hidden, weight.grad), both, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_retained_and_repeated_backward_with_any_upstream_is_exact_each_time(head, mode):
    inputs = head[:2]
    loss = linear_cross_entropy(*head, backward=mode)
    once = gradients(loss, inputs, retain_graph=True)
    for factor in (3.0, 0.5, 3.0):
        again = gradients(loss * factor, inputs, retain_graph=True)
        assert_close(again, tuple(factor * x for x in once), rtol=1e-5, atol=1e-7)
    (3 * loss).backward()
    assert_close(tuple(x.grad for x in inputs), tuple(3 * x for x in once), rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [TOKENS, 256])  # padded and not
def test_the_last_backward_of_a_graph_gives_what_one_that_keeps_it_does(head, dtype, transposed, tokens):
    hidden, weight, target = head
    hidden = hidden.detach().to(dtype).repeat(-(-tokens // TOKENS), 1)[:tokens].requires_grad_()
    weight = weight.detach().to(dtype)
    weight = (weight.t().contiguous().t() if transposed else weight).requires_grad_()
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)
    # Gradients of these two are computed, not handed over.
    options = {
        name: torch.tensor(x, requires_grad=True) for name, x in (("label_smoothing", 0.1), ("logit_scale", 0.7))
    }
    inputs = hidden, weight, bias, *options.values()
    loss = in_forward(hidden, weight, target.repeat(13)[:tokens], linear_bias=bias, **options)
    for upstream in (1.0, 3.0):  # the last of them loses the graph
        kept = gradients(loss * upstream, inputs, retain_graph=True)
    last = gradients(loss * upstream, inputs)
    assert_close(last, kept, rtol=0, atol=0)
    assert [x.stride() for x in last] == [x.stride() for x in inputs]


def test_numbers_as_options_are_where_the_inputs_are(head):
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "normalizer": 7.0, "logit_scale": 0.5}
    want = linear_cross_entropy(*head, **options)
    with torch.device("meta"):
        assert torch.equal(linear_cross_entropy(*head, **options), want)


@pytest.mark.parametrize("tokens", [5, 256])
def test_losses_by_row_may_be_changed_in_place(tokens):
    """With as many rows as a program has, and with fewer."""
    head, target = (torch.randn(tokens, 8, requires_grad=True), torch.randn(50, 8)), torch.arange(tokens) % 50
    want = gradients(2 * linear_log_probs(*head, target).sum(), head[:1])
    assert_close(gradients(linear_log_probs(*head, target).mul_(2).sum(), head[:1]), want)


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_may_be_changed_in_place_but_not_the_weight_before_the_backward(head, mode):
    loss = linear_cross_entropy(*head, backward=mode)
    loss /= 4
    loss.backward(retain_graph=True)
    with torch.no_grad():
        head[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients_nothing_is_kept(head):
    with torch.no_grad():
        assert linear_cross_entropy(*head).grad_fn is None
    with torch.inference_mode():
        linear_cross_entropy(*head)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(head, mode, reentrant):
    hidden, weight, target = head

    def block(hidden):
        return linear_cross_entropy(torch.tanh(hidden), weight, target, backward=mode)

    want = gradients(block(hidden), (hidden, weight))
    checkpoint(block, hidden, use_reentrant=reentrant).backward()
    assert_close((hidden.grad, weight.grad), want, rtol=0, atol=0)


def log_probs(hidden, weight, target, backward):
    return linear_log_probs(hidden, weight, target, temperature=torch.linspace(0.5, 1.5, TOKENS)).sum()


@pytest.mark.parametrize(
    ("function", "mode"), [(linear_cross_entropy, MODES[0]), (linear_cross_entropy, MODES[1]), (log_probs, None)]
)
def test_autocast_computes_in_its_dtype_and_float32_weights_get_float32_gradients(head, function, mode):
    hidden, weight, target = head
    with torch.autocast("cpu", torch.bfloat16):
        got = function(hidden, weight, target, backward=mode)
    narrow = weight if function is linear_cross_entropy else weight.bfloat16()
    assert got.dtype == torch.float32
    assert torch.equal(got, function(hidden.bfloat16(), narrow, target, backward=mode))
    assert not torch.equal(got, function(hidden, weight, target, backward=mode))
    (for_weight,) = gradients(got, weight)
    assert for_weight.dtype == torch.float32
    assert not torch.equal(for_weight, for_weight.bfloat16().float())  # the sum itself, not one that was rounded


def test_small_float16_gradients_survive_until_the_loss_is_scaled(head):
    """A gradient scaler multiplies a loss whose own gradients lie below float16's range."""
    hidden, weight, target = (x.detach() for x in head)
    low = [x.half().requires_grad_() for x in (hidden, weight)]
    tiny = 2.0**-24
    got = gradients(in_forward(*low, target, normalizer=TOKENS / tiny) / tiny, low)
    assert_close(got, gradients(in_forward(*low, target), low), rtol=2e-3, atol=0)


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize(
    ("options", "dtype", "narrow"),
    [
        ({"reduction": "sum", "z_loss": 0.1, "label_smoothing": 0.1}, torch.float32, False),
        ({"logit_scale": 0.7, "logit_softcap": 5.0, "return_metrics": True}, torch.bfloat16, False),
        ({"vocab_size": VOCABULARY - 3, "normalizer": 7.0}, torch.float64, False),
        ({}, torch.float32, True),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_microbatches_add_up_in_a_main_grad_of_any_dtype_beside_the_gradients_without_it(
    head, mode, options, dtype, narrow
):
    hidden, weight, target = head
    weight = weight.detach().to(torch.bfloat16 if narrow else torch.float32).requires_grad_()
    target = torch.where(torch.arange(TOKENS) % 3 > 0, target.clamp(max=VOCABULARY - 4), -100)
    bias = torch.linspace(-1, 1, VOCABULARY).requires_grad_()

    def loss():
        given = hidden.to(weight.dtype), weight, target
        found = linear_cross_entropy(*given, linear_bias=bias, backward=mode, **options)
        return -3 * (found[0] if "return_metrics" in options else found)

    of_hidden, of_weight, of_bias = gradients(loss(), (hidden, weight, bias))
    weight.main_grad = torch.full_like(weight, 0 if narrow else 1, dtype=dtype)
    before = weight.main_grad.clone()
    assert_close(gradients(loss(), weight), (of_weight,), rtol=0, atol=0)  # one that is asked for is not added
    for _ in range(2):
        loss().backward()
    assert weight.grad is None
    assert_close((hidden.grad, bias.grad), (2 * of_hidden, 2 * of_bias), rtol=1e-5, atol=1e-6)
    rounding = 1e-5 if dtype != torch.bfloat16 and not narrow else 2**-7
    assert_close(weight.main_grad, before + 2 * of_weight.to(dtype), rtol=rounding, atol=1e-3 if narrow else rounding)
    if narrow:  # in_forward has made the gradient, and rounded it, when it is asked for
        rounded = torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())
        assert rounded == (mode == "in_forward")


@pytest.mark.parametrize("asked", [("linear_weight",), ("input", "linear_weight"), ("linear_weight", "linear_bias")])
def test_a_recomputing_backward_adds_to_main_grad_where_it_lies(asked):
    """Neither a copy of it nor an array of the gradient beside it."""
    rows, width, vocabulary = 64, 128, 4096
    operation, of_weight = ops.LINEAR_CROSS_ENTROPY, (vocabulary, width)
    tensors = {
        "input": torch.ones(rows, width),
        "linear_weight": torch.ones(of_weight),
        "target": torch.ones(rows, dtype=torch.int32),
        "linear_bias": torch.ones(vocabulary),
    }
    options = Options(dtype="bfloat16", backward="recompute", scratch_bytes=2**18)[1:]
    program = operation.program(
        [tensors.get(name) for name in operation.tensors], ("input,linear_weight,linear_bias", *options)
    )
    assert calls.adds_to(program, torch.zeros(of_weight), tensors["linear_weight"], asked)
    backward = program.backward(asked, (True,), adds=True)
    taken = program.structs()
    memory = backward.run.lower(*(taken[i] for i in backward.reads)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * vocabulary * width
    assert memory.temp_size_in_bytes < 4 * vocabulary * width


@pytest.mark.parametrize("tied", [False, True])
def test_megatrons_hooks_still_see_a_gradient(head, tied):
    """Of a tied weight zeros, to which the embedding's gradient is added, before they go into `main_grad`."""
    weight = head[1]
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    weight.zero_out_wgrad = tied
    (linear_cross_entropy(*head) + (weight.sum() if tied else 0)).backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    assert weight.main_grad.any()
    assert not tied or torch.equal(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize("total", [torch.zeros(WIDTH, VOCABULARY), torch.zeros(VOCABULARY, WIDTH).long()])
def test_a_main_grad_that_cannot_hold_the_gradient_is_named(head, total):
    head[1].main_grad = total
    with pytest.raises(ValueError, match=rf"linear_weight\.main_grad has .* it must be \({VOCABULARY}, {WIDTH}\)"):
        linear_cross_entropy(*head).backward()


def test_scalar_tensors_are_differentiated(head):
    numbers = {"logit_scale": 0.7, "z_loss": 0.1, "label_smoothing": 0.2, "normalizer": 7.0}
    given = {"input": head[0].detach(), "linear_weight": head[1].detach()}
    given |= {name: torch.tensor(x) for name, x in numbers.items()}
    assert_exact(linear_cross_entropy, stored_loss, given, {"target": head[2]}, slopes=(1e-5, 1e-6))
