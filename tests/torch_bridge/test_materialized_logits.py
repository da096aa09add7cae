"""`torch_bridge.cross_entropy` on stored logits, against float64."""

from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.torch_bridge.problems import as_on_a_gpu, stored_loss
from torch_bridge import cross_entropy, selective_log_softmax
from torch_bridge.materialized import chunks


def problem(dtype=torch.float64, shape=(3, 7), size=19, scale=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*shape, size, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    target = torch.randint(0, size, shape, generator=generator)
    target.view(-1)[0] = -100
    return logits, target


FIRST_ON = st.sampled_from([True, False])  # the first example is the simplest: here that is the richest
OPTIONS = {
    "label_smoothing": st.sampled_from([0.2, 1.0]),
    "z_loss": st.sampled_from([1e-2, 0.1]),
    "logit_softcap": st.sampled_from([3.0, 30.0]),
    "ignore_index": st.sampled_from([3, None]),
    "vocab_size": st.sampled_from([16, 1]),
    "class_weights": st.just(True),
    "token_weights": st.just(True),
}
DIFFERENTIATED = "token_weights", "z_loss", "label_smoothing"


def exact(logits, target, options, upstream):
    """The loss, and the gradients of the logits, then of what else is a tensor that wants one."""
    given = {"logits": logits} | {name: x for name, x in options.items() if torch.is_tensor(x)}
    given = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in given.items()}
    loss = stored_loss(given, {"target": target, **options, **given})
    asked = [given[name] for name in ("logits", *DIFFERENTIATED) if name in given and given[name].requires_grad]
    return loss.detach(), torch.autograd.grad((loss * upstream).sum(), asked)


def close(got, want, unit, terms):
    """As close as `want` rounded to the dtype of `got`; a sum may be the small remainder of `terms`."""
    rounding = (want.to(got.dtype).double() - want).norm()
    assert got.shape == want.shape
    assert (got.double() - want).norm() <= 1.05 * rounding + 64 * unit * want.norm() + 8 * unit * terms


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_loss_and_gradients_match_float64_for_any_options(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = data.draw(st.sampled_from([(4, 2), (3, 7), (1,), (2, 1, 3)]))
    size = data.draw(st.sampled_from([19, 16, 400]))
    spare = data.draw(st.sampled_from([0, 1]))  # positions that are cut off: a view of the logits, which is not copied
    scale, seed = data.draw(st.sampled_from([4.0, 0.1])), data.draw(st.integers(0, 99))
    leaf, target = problem(dtype, (*shape[:-1], shape[-1] + spare), size, scale, seed)
    logits, target = (leaf * 1.0)[..., : shape[-1], :], target[..., spare:]
    options = {name: data.draw(values) for name, values in OPTIONS.items() if data.draw(FIRST_ON)}
    options |= data.draw(st.sampled_from([{"normalizer": 11.0}, {}, {"reduction": "sum"}, {"reduction": "none"}]))
    reduction = options.get("reduction", "mean")
    least = 0.0 if {"reduction", "normalizer"} & options.keys() else 0.1  # a mean over nothing is 0 by convention
    if "class_weights" in options:
        options["class_weights"] = torch.linspace(2, least, options.get("vocab_size", size), dtype=wide)
    if "token_weights" in options:
        options["token_weights"] = torch.linspace(2, least, target.numel(), dtype=wide).reshape(shape).requires_grad_()
    for name in ("label_smoothing", "z_loss"):
        if name in options and data.draw(FIRST_ON):
            options[name] = torch.tensor(options[name], dtype=wide, requires_grad=True)
    upstream = torch.linspace(-1, 2, target.numel(), dtype=wide).reshape(shape)
    # A power of two, by which gradients that are rounded already are multiplied exactly.
    upstream = upstream if options.get("reduction") == "none" else torch.tensor(2.0, dtype=wide)
    inplace, elements = data.draw(FIRST_ON), data.draw(st.sampled_from([37, 2**20]))

    # Losses are of the logits' size and are added up; their derivatives in the options are differences of them.
    largest = (1 + float(logits.detach().abs().max())) * (1 if reduction == "mean" else target.numel())
    want, gradients = exact(logits, target, options, upstream.double())
    kernels = as_on_a_gpu(data.draw(FIRST_ON))
    with mock.patch.dict(chunks.ELEMENTS, cpu=elements), mock.patch.object(chunks, "LEAST_ROWS", 4), kernels:
        found = cross_entropy(logits, target, inplace_backward=inplace, **options)
        asked = [options[k] for k in DIFFERENTIATED if torch.is_tensor(options.get(k))]
        got = torch.autograd.grad((found * upstream).sum(), [logits, *asked])
    assert found.dtype == wide
    unit = torch.finfo(wide).eps
    close(got[0], gradients[0], unit, 1.0)
    for mine, theirs in zip([found.detach(), *got[1:]], [want, *gradients[1:]], strict=True):
        close(mine, theirs, unit, largest)
    assert got[0].dtype == dtype
    if inplace:
        assert torch.equal(logits.detach(), got[0])


@pytest.mark.parametrize("inplace", [True, False])
def test_one_program_for_all_rows_scales_its_gradients_anew_in_every_backward(inplace):
    leaf, target = problem(torch.bfloat16, (4, 32))
    weights = torch.linspace(0.5, 2, 128).reshape(4, 32).requires_grad_()
    exact = torch.autograd.grad(cross_entropy(leaf, target, token_weights=weights), [leaf, weights])
    with as_on_a_gpu():
        logits = leaf * 1
        loss = cross_entropy(logits, target.int(), token_weights=weights, inplace_backward=inplace)
        assert loss.grad_fn.name() == "_LossAndGradientsBackward"
        for upstream, kept in ((2.0, True), (1.0, True), (3.0, False)):
            got = torch.autograd.grad(upstream * loss, [logits, weights], retain_graph=kept)
            # A second rounding where the upstream is no power of two.
            torch.testing.assert_close(got, [upstream * x for x in exact], rtol=2**-7, atol=1e-6)


def test_rows_are_cut_into_few_sizes():
    for count in (1, 127, 128, 5000, 70000):
        logits = torch.zeros(count, 1)
        parts = [part for part, rows in chunks.powers(logits)]
        assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
        assert (parts[0].start, parts[-1].stop) == (0, count)
        sizes = [part.stop - part.start for part in parts]
        assert all(size in (128 << i for i in range(8)) for size in sizes[:-1])
        assert sum(size < 128 for size in sizes) <= 1
    sliced = torch.zeros(3, 200, 4)[:, :-1]
    assert [rows.data_ptr() - sliced.data_ptr() for _, rows in chunks.powers(sliced)][::2] == [0, 3200, 6400]


@pytest.mark.parametrize("function", [cross_entropy, selective_log_softmax])
def test_the_gradient_takes_the_logits_memory_where_that_is_asked_for(function):
    leaf, target = problem(torch.float32)
    target = target.clamp(0)
    logits = leaf * 1.0
    logits.retain_grad()
    function(logits[:, :-1], target[:, 1:], inplace_backward=True).sum().backward()
    (exact,) = torch.autograd.grad(function(leaf[:, :-1], target[:, 1:]).sum(), leaf)
    torch.testing.assert_close(leaf.grad, exact)
    torch.testing.assert_close(logits.detach()[:, :-1], exact[:, :-1])
    with pytest.raises(ValueError, match="inplace_backward=True on logits that are a leaf"):
        function(leaf, target, inplace_backward=True)


def test_rows_that_do_not_count_may_hold_anything():
    logits = torch.tensor([[0.0, 1.0], [torch.nan, torch.inf], [-torch.inf, -torch.inf]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, -100, 5]), z_loss=0.1, label_smoothing=0.1)
    loss.backward()
    assert torch.isfinite(loss)
    assert not logits.grad[1:].any()
    nothing = cross_entropy(logits, torch.full((3,), -100))
    nothing.backward()
    assert nothing == 0


EXACT = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"class_weights": torch.linspace(0.25, 2, 19)},
    "both": {"label_smoothing": 0.3, "class_weights": torch.linspace(0.25, 2, 19)},
}


def of_pytorch(logits, target, options):
    """`F.cross_entropy` in the logits' dtype with those options, row by row, and its gradient."""
    leaf = logits.detach().requires_grad_()
    given = {k: x.to(logits.dtype) if torch.is_tensor(x) else x for k, x in options.items()}
    given |= {"weight": given.pop("class_weights")} if "class_weights" in given else {}
    loss = torch.nn.functional.cross_entropy(leaf, target, reduction="none", **given)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", EXACT)
@hypothesis.given(offset=st.sampled_from([0.0, 1e2, -1e4, 1e5, 1e6]), seed=st.integers(0, 99))
def test_at_any_common_offset_the_error_is_no_larger_than_pytorchs_own_on_the_same_logits(name, kernels, offset, seed):
    logits, target = problem(torch.float32, (40,), scale=2.0, seed=seed)
    logits = (logits.detach() + offset).requires_grad_()
    exact, exact_gradient = of_pytorch(logits.double(), target, EXACT[name])
    plain, plain_gradient = of_pytorch(logits, target, EXACT[name])
    with mock.patch.object(chunks, "LEAST_ROWS", 4), as_on_a_gpu(kernels):
        loss = cross_entropy(logits, target, reduction="none", **EXACT[name])
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert ((loss - exact).abs() <= (plain - exact).abs() + 1e-6).all()
    allowed = (plain_gradient - exact_gradient).abs() + 1e-6
    assert ((gradient - exact_gradient).abs() <= allowed).all()


@pytest.mark.parametrize("name", EXACT)
@hypothesis.given(value=st.sampled_from([torch.nan, torch.inf, -torch.inf]), row=st.integers(0, 6), data=st.data())
def test_what_is_not_finite_shows_in_its_row_as_in_pytorchs_own_loss_and_in_no_other(name, value, row, data):
    logits, target = problem(torch.float32, (7,), scale=2.0)
    column = data.draw(st.integers(0, 18))
    logits = logits.detach()
    logits[row, column] = value
    want, want_gradient = of_pytorch(logits, target, EXACT[name])
    want_gradient[0] = 0.0  # its target is ignored, but PyTorch's own row has NaN
    logits.requires_grad_()
    loss = cross_entropy(logits, target, reduction="none", **EXACT[name])
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(loss, want, equal_nan=True)
    torch.testing.assert_close(gradient, want_gradient, equal_nan=True)
    found = cross_entropy(logits, target, z_loss=0.1, **EXACT[name])
    assert found.isnan() == (row != 0 and value != -torch.inf)
    picked = selective_log_softmax(logits, target.clamp(0))
    (of_picked,) = torch.autograd.grad(picked.sum(), logits)
    plain = logits.log_softmax(-1).gather(-1, target.clamp(0)[:, None])[:, 0]
    torch.testing.assert_close(picked, plain, equal_nan=True)
    torch.testing.assert_close(of_picked, torch.autograd.grad(plain.sum(), logits)[0], equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        {"class_weights": torch.zeros(4)},
        {"token_weights": torch.zeros(2)},
        {"label_smoothing": 1.0, "class_weights": torch.tensor([1.0, 0.0, 1.0, 1.0])},
        {"label_smoothing": torch.tensor(0.0), "z_loss": torch.tensor(0.0)},
    ],
)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_no_factor_of_0_hides_a_nan(options, reduction):
    logits = torch.tensor([[0.0, torch.nan, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 3]), reduction=reduction, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.flatten()[0].isnan()
    assert gradient[0].isnan().all()
    assert loss.flatten()[1:].isfinite().all()
    assert reduction == "mean" or gradient[1].isfinite().all()
