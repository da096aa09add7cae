"""The Hopper kernels launched on PyTorch's tensors without XLA's runtime, with PyTorch's own products around them.

What `torch_bridge` could be instead of a program of XLA's that DLPack feeds: the plain mean cross entropy of a head
without options, in one block of rows. It does less than the bridge, so that its time is a lower bound: every row
counts, and nothing is computed again where an exponential does not fit its reference.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import torch

from pallas_ce.backends.mosaic_gpu.gemm import launch
from pallas_ce.backends.mosaic_gpu.gemm.pipeline import Epilogue, multiply
from pallas_ce.backends.mosaic_gpu.kernels import operands, partials
from pallas_ce.backends.mosaic_gpu.kernels.forward_kernel import StatisticsEpilogue
from pallas_ce.backends.mosaic_gpu.kernels.stash_kernel import StashEpilogue
from pallas_ce.backends.mosaic_gpu.tuning import tuning
from pallas_ce.head import Head, HeadSpec
from pallas_ce.statistics.row import fields_for

_NAMES = frozenset({"lse"})
_SAMPLE = 64


def loss(hidden: Any, weight: Any, labels: Any) -> Any:
    """The loss of CUDA tensors in bfloat16; differentiable where PyTorch records."""
    if torch.is_grad_enabled():
        return _InForward.apply(hidden, weight, labels)  # type: ignore[no-untyped-call]
    tops, sums = _launched(forward_kernel)(hidden, weight)
    top = tops.amax(0)
    lse = top + (sums * (tops - top).exp()).sum(0).log()
    return (lse[: len(hidden)] - _target_logits(hidden, weight, labels)).mean()


def forward_kernel(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
    """Each window's maximum and sum of exponentials `[windows, padded rows]`; one kernel and nothing else."""
    fields = fields_for(_NAMES)
    given = _operands("forward", hidden, weight, fields)
    epilogue = StatisticsEpilogue(given.logits, fields, given.product.config.width)
    return _kernel("pallas_ce_forward", given, epilogue, (), partials.outputs(fields, given.slots, given.padded_rows))()


def stash_kernel(hidden: jax.Array, weight: jax.Array, reference: jax.Array) -> tuple[jax.Array, ...]:
    """Each window's sum of exponentials from `reference [N]`, and the exponentials; one kernel and nothing else."""
    fields = ("sum_exp",)
    given = _operands("stash", hidden, weight, fields)
    shape = operands.stored_shape(hidden.shape[0], weight.shape[0])
    epilogue = StashEpilogue(given.logits, fields, shape[1], given.hidden.dtype, given.product.config.width)
    outputs = partials.outputs(fields, given.slots, given.padded_rows)
    outputs["stash"] = jax.ShapeDtypeStruct(shape, given.hidden.dtype)
    return _kernel("pallas_ce_stash", given, epilogue, ("reference",), outputs)(reference)


class _InForward(torch.autograd.Function):
    """Both gradients in the forward, from one stash of exponentials; see `pallas_ce.backends.mosaic_gpu.in_forward`."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, labels: Any) -> Any:
        rows = torch.arange(len(hidden), device=hidden.device)
        sample = (hidden @ weight[:: max(1, len(weight) // _SAMPLE)][:_SAMPLE].T).float()
        reference = sample.logsumexp(1) + np.log(len(weight) / sample.shape[1])
        sums, stored = _launched(stash_kernel)(hidden, weight, reference)
        lse = reference + sums.sum(0)[: len(hidden)].log()
        target = _target_logits(hidden, weight, labels)
        scale = (reference - lse).exp() / len(hidden)
        stored = stored[: len(hidden), : len(weight)]
        stored[rows, labels] = (((target - lse).exp() - 1) / len(hidden) / scale).to(stored.dtype)
        for_hidden = (scale[:, None] * torch.mm(stored, weight, out_dtype=torch.float32)).to(hidden.dtype)
        for_weight = stored.T @ (scale[:, None] * hidden).to(hidden.dtype)
        ctx.save_for_backward(for_hidden, for_weight)
        return (lse - target).mean()

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        for_hidden, for_weight = ctx.saved_tensors
        return upstream * for_hidden, upstream * for_weight, None


def _target_logits(hidden: Any, weight: Any, labels: Any) -> Any:
    return (hidden.float() * weight[labels].float()).sum(1)


def _operands(name: Any, hidden: jax.Array, weight: jax.Array, fields: tuple[str, ...]) -> operands.Operands:
    """Of sizes that need no padding: the arrays themselves, not behind a barrier, which `as_torch_kernel` refuses."""
    v, h = weight.shape
    spec = HeadSpec(h, v, v, 0, np.dtype(weight.dtype), None)
    config = tuning.tiles_for(name, spec, hidden.shape[0], v, len(_NAMES), 0).config
    head = Head(weight, None, None, None, spec)
    given = operands.operands(head, hidden, config, weighted_mean=False, bytes_per_row=4 * len(fields))
    return dataclasses.replace(given, hidden=hidden, weight=weight)


def _kernel(
    name: str, given: operands.Operands, epilogue: Epilogue, inputs: tuple[str, ...], outputs: dict[str, Any]
) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel on the operands and the arrays of those inputs, vectors by row."""
    shapes = tuple((key, value.shape, jnp.dtype(value.dtype)) for key, value in outputs.items())
    function = launch.kernel_function(multiply, name, given.product, 2, epilogue, inputs, (), shapes)
    return lambda *arrays: function(given.hidden, given.weight, *arrays)


@functools.cache
def _launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel on tensors, on PyTorch's default stream, compiled for their shapes."""
    return plgpu.as_torch_kernel(function)
