"""`torch_bridge.cross_entropy` on stored logits, against PyTorch's own and against `pallas_ce.cross_entropy`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import pallas_ce
from torch_bridge import chunks, cross_entropy


@pytest.fixture(params=[2**20, 37], ids=["one chunk", "many chunks"])
def _chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks.ELEMENTS, "cpu", request.param)


def problem(dtype=torch.float64, shape=(3, 7), size=19):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(*shape, size, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    target = torch.randint(0, size, shape, generator=generator)
    target[0, 0] = -100
    return logits, target


@pytest.mark.usefixtures("_chunked")
@pytest.mark.parametrize(
    ("reduction", "smoothing", "weighted"), list(itertools.product(["mean", "sum", "none"], [0.0, 0.2], [False, True]))
)
def test_what_pytorch_has_is_as_pytorch_has_it(reduction, smoothing, weighted):
    logits, target = problem()
    weight = torch.linspace(0, 2, logits.shape[-1], dtype=torch.float64) if weighted else None
    found = cross_entropy(logits, target, label_smoothing=smoothing, class_weights=weight, reduction=reduction)
    want = functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), weight, label_smoothing=smoothing, reduction=reduction
    )
    torch.testing.assert_close(found, want.reshape(found.shape), rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).reshape(found.shape)
    gradients = [torch.autograd.grad((x.reshape(found.shape) * upstream).sum(), logits)[0] for x in (found, want)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13)


OPTIONS = [
    {"z_loss": 1e-2},
    {"z_loss": 1e-2, "label_smoothing": 0.1, "logit_softcap": 3.0},
    {"z_loss": 1e-2, "class_weights": True, "token_weights": True},
    {"token_weights": True, "normalizer": 11.0, "vocab_size": 16, "label_smoothing": 0.3},
    {"reduction": "none", "z_loss": 1e-2, "token_weights": True},
    {"reduction": "sum", "ignore_index": 3},
    {"ignore_index": None},
]


@pytest.mark.usefixtures("_chunked")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_option_is_as_in_jax(options, dtype):
    logits, target = problem(dtype)
    options = dict(options)
    if options.pop("class_weights", False):
        options["class_weights"] = torch.linspace(0.0, 2, options.get("vocab_size", 19))
    if options.pop("token_weights", False):
        options["token_weights"] = torch.linspace(0.5, 2, target.numel()).reshape(target.shape).requires_grad_()
    found = cross_entropy(logits, target, **options)
    wanted = [logits, *[x for x in (options.get("token_weights"),) if x is not None]]
    gradients = torch.autograd.grad(found.sum(), wanted)

    arrays = {k: jnp.asarray(v.detach().numpy()) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    stored = jnp.asarray(logits.detach().float().numpy(), str(dtype).removeprefix("torch."))
    names = ["token_weights"] if "token_weights" in arrays else []

    def loss(stored, *varied):
        given = arrays | dict(zip(names, varied, strict=True))
        return jnp.sum(pallas_ce.cross_entropy(stored, jnp.asarray(target.numpy()), **given))

    want, exact = jax.value_and_grad(loss, tuple(range(1 + len(names))))(stored, *[arrays[n] for n in names])
    np.testing.assert_allclose(found.sum().item(), want, rtol=1e-5)
    assert gradients[0].dtype == dtype
    for got, expected in zip(gradients, exact, strict=True):
        tolerance = 1e-2 if got.dtype == torch.bfloat16 else 2e-5
        np.testing.assert_allclose(got.float(), np.asarray(expected, np.float32), rtol=tolerance, atol=1e-6)


def test_the_gradient_takes_the_logits_memory_where_that_is_asked_for():
    leaf, target = problem(torch.float32)
    logits = leaf * 1.0
    logits.retain_grad()
    cross_entropy(logits[:, :-1], target[:, 1:], inplace_backward=True).backward()
    (exact,) = torch.autograd.grad(cross_entropy(leaf[:, :-1], target[:, 1:]), leaf)
    torch.testing.assert_close(leaf.grad, exact)
    torch.testing.assert_close(logits.detach()[:, :-1], exact[:, :-1])
    with pytest.raises(ValueError, match="inplace_backward=True on logits that are a leaf"):
        cross_entropy(leaf, target, inplace_backward=True)


def test_rows_that_do_not_count_may_hold_anything():
    logits = torch.tensor([[0.0, 1.0], [torch.nan, torch.inf], [-torch.inf, -torch.inf]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, -100, 5]), z_loss=0.1, label_smoothing=0.1)
    loss.backward()
    assert torch.isfinite(loss)
    assert not logits.grad[1:].any()
    nothing = cross_entropy(logits, torch.full((3,), -100))
    nothing.backward()
    assert nothing == 0


def test_no_tokens_have_loss_0():
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss == 0
    assert logits.grad.shape == (0, 5)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(3, dtype=torch.long)), {}, ValueError, r"target has shape \(3,\); it must be"),
        ((torch.zeros(2, 3), torch.zeros(2)), {}, TypeError, "target has dtype torch.float32"),
        ((torch.zeros(2, 3).long(), torch.zeros(2).long()), {}, TypeError, "logits has dtype torch.int64"),
        ((torch.zeros(2, 3), torch.zeros(2).long()), {"label_smoothing": 2}, ValueError, "label_smoothing=2"),
        ((torch.zeros(2, 3), torch.zeros(2).long()), {"reduction": "max"}, ValueError, "reduction='max'"),
        ((torch.zeros(2, 3), torch.zeros(2).long()), {"vocab_size": 4}, ValueError, "vocab_size=4"),
        ((torch.zeros(2, 3), torch.zeros(2).long()), {"class_weights": torch.ones(2)}, ValueError, "class_weights has"),
    ],
)
def test_impossible_arguments_are_named(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        cross_entropy(*arguments, **options)
