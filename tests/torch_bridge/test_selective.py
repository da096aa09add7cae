"""The PyTorch function that reinforcement learning libraries import: exact, and never a second array of logits."""

from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import torch_bridge
from tests.torch_bridge.problems import as_on_a_gpu
from torch_bridge.autograd import graph
from torch_bridge.materialized import chunks
from torch_bridge.selective import log_probs_from_logits, logprobs_from_logits, selective_log_softmax


def _exact(logits: Any, index: Any) -> Any:
    index = index[..., None] if index.ndim < logits.ndim else index
    return logits.double().log_softmax(-1).gather(-1, index)


# Views `[..., V]` of stored logits, most not contiguous.
VIEWS = {
    "all of it": lambda x: x,
    "all positions but the last": lambda x: x[..., :-1, :],
    "every other column": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, -2),
}


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_values_and_gradients_are_those_of_the_exact_log_softmax(data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    shape = data.draw(st.sampled_from([(3, 7, 38), (6, 3), (2, 2, 2, 5), (2, 1000)]))
    scale, offset = data.draw(st.sampled_from([(3.0, 0.0), (30.0, -1e4), (0.01, 256.0)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    stored = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset).to(dtype)
    stored[0] = -torch.inf if data.draw(st.booleans()) else stored[0]
    stored[..., 2] = -torch.inf if data.draw(st.booleans()) else stored[..., 2]
    logits = VIEWS[data.draw(st.sampled_from(sorted(VIEWS)))](stored.requires_grad_() * 1.0)
    several = data.draw(st.sampled_from([(), (1,), (4,)]))
    index = torch.randint(0, logits.shape[-1], (*logits.shape[:-1], *several), generator=generator)
    index = index.to(data.draw(st.sampled_from([torch.int64, torch.int32])))
    upstream = torch.randn(index.shape, generator=generator, dtype=torch.float64)
    temperature = 1.0 if several else data.draw(st.sampled_from([0.7, 1.0, 3.0]))
    inplace = temperature == 1.0 and data.draw(st.booleans())

    # A row of -inf throughout has no softmax: log-probabilities of -inf without gradient.
    empty = logits.detach().isneginf().all(-1, keepdim=True)
    wide = logits.detach().double().masked_fill(empty, 0.0).requires_grad_()
    shifted = (wide - wide.detach().amax(-1, keepdim=True)) / temperature
    want = _exact(shifted, index.long()).reshape(index.shape)
    (exact,) = torch.autograd.grad(want, wide, upstream)
    exact = exact.masked_fill(empty, 0.0)
    want = want.detach().masked_fill(empty.reshape(*logits.shape[:-1], *[1] * len(several)), -torch.inf)

    kernels, elements = as_on_a_gpu(data.draw(st.booleans())), data.draw(st.sampled_from([37, 2**24]))
    with mock.patch.dict(chunks.ELEMENTS, cpu=elements), mock.patch.object(chunks, "LEAST_ROWS", 2), kernels:
        if temperature == 1.0:
            value = selective_log_softmax(logits, index, inplace_backward=inplace)
        else:
            value = log_probs_from_logits(logits, index, temperature)
        (gradient,) = torch.autograd.grad(value, logits, upstream.to(value.dtype))
    unit = torch.finfo(value.dtype).eps
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    assert torch.equal(value.isneginf(), want.isneginf())
    finite = ~want.isneginf()
    size = want[finite].abs().clamp(min=1.0)
    assert ((value.detach() - want)[finite].abs() <= 16 * unit * size).all()
    rounding = (exact.to(dtype).double() - exact).norm()
    assert (gradient.double() - exact).norm() <= 1.05 * rounding + 64 * unit * exact.norm()
    assert not gradient[empty.expand_as(gradient)].any()
    if inplace:
        assert torch.equal(logits.detach(), gradient)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_tensor_of_the_logits_size_is_made_forward_and_only_the_gradient_backward(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                    self.elements = max(self.elements, x.untyped_storage().nbytes() // 2)
                    self.made += x.untyped_storage().nbytes() // 2 >= logits.numel()
            return out

    monkeypatch.setitem(chunks.ELEMENTS, "cpu", 256)
    logits = torch.randn(2, 8, 256).bfloat16().requires_grad_()
    monkeypatch.setattr(graph, "serves", lambda tensors: True)  # not the operator, as without the mode
    with Largest() as forward:
        value = log_probs_from_logits(logits, torch.zeros(2, 8, dtype=torch.long), temperature).sum()
    assert forward.elements <= 2 * 256
    with Largest() as backward:
        value.backward()
    assert backward.made == 1


def test_the_names_that_are_imported() -> None:
    logits, labels = torch.randn(2, 3, 9, requires_grad=True), torch.randint(0, 9, (2, 3))
    torch.testing.assert_close(logprobs_from_logits(logits, labels), _exact(logits, labels)[..., 0].float())
    assert torch_bridge.selective_log_softmax is selective_log_softmax
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        log_probs_from_logits(logits, labels, temperature=0)


@pytest.mark.parametrize(("shape", "index_shape"), [((0, 4), (0,)), ((3, 4), (3, 0)), ((0, 2, 4), (0, 2))])
def test_nothing_asked_for_gives_nothing(shape: Any, index_shape: Any) -> None:
    logits = torch.zeros(shape, requires_grad=True)
    value = selective_log_softmax(logits, torch.zeros(index_shape, dtype=torch.long))
    assert value.shape == index_shape
    value.sum().backward()
    assert not logits.grad.any()
