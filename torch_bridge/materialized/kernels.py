"""Rows of stored logits by `pallas_ce`'s kernels: their statistics in one read, their gradient in place in another."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from torch import Tensor

from pallas_ce.api import integration
from pallas_ce.api.integration import HeadSpec, How, Operands
from torch_bridge.dlpack import exchange
from torch_bridge.materialized import chunks

Arrays = dict[str, jax.Array]

# The gradient's inputs beside the rows: a row's largest logit, and how far its log-sum-exp lies above it.
KEPT = ("max_logit", "log_sum")


class Kernels(NamedTuple):
    """The logits' static facts, and the implementation in `pallas_ce` that serves them."""

    spec: HeadSpec
    implementation: str

    def serve(self, rows: Tensor) -> bool:
        """Whether there are enough of them; see `chunks.powers`."""
        return rows.shape[0] >= chunks.LEAST_ROWS

    def serve_at_once(self, logits: Tensor) -> bool:
        """Whether all rows are one of `chunks.powers`."""
        parts = list(chunks.powers(logits))
        return len(parts) == 1 and self.serve(parts[0][1])

    def run(
        self, function: Callable[..., Any], what: Hashable, given: Mapping[str, Tensor | None], replaces: bool
    ) -> list[Tensor]:
        """What the function `(kernels, what, arrays)` returns for "rows" `[n, V']`, contiguous, and other tensors.

        Where the first result `replaces` the rows, as their gradient does, it overwrites them, and is not returned.
        """
        tensors = {name: x for name, x in given.items() if x is not None}
        program = _program(function, self, what, tuple(tensors), replaces)
        rows = tensors["rows"]
        found = exchange.run(program, tuple(tensors), tuple(tensors.values()), rows.device)
        if replaces:
            exchange.written(rows, found.pop(0))
        return found


def serving(logits: Tensor, spec: HeadSpec) -> Kernels | None:
    """The kernels for rows of these logits, on a GPU that JAX has too; None where there are none."""
    if not logits.is_cuda or integration.local_cuda() is None or integration.refusal_of_logits("mosaic_gpu", spec):
        return None
    by_row = logits.stride(-1) == 1 and logits.ndim > 1 and logits.stride(-2) == spec.weight_rows
    return Kernels(spec, "mosaic_gpu") if by_row and logits.data_ptr() % exchange.CUDA_ALIGNMENT == 0 else None


@functools.lru_cache(maxsize=256)
def _program(function: Any, kernels: Kernels, what: Any, inputs: tuple[str, ...], replaces: bool) -> Any:
    """`(*inputs) -> arrays`; the rows are the first input, whose memory the first result has where it replaces them."""

    def named(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return function(kernels, what, dict(zip(inputs, arrays, strict=True)))

    return jax.jit(named, donate_argnums=0 if replaces else (), keep_unused=True)


def statistics(kernels: Kernels, names: tuple[str, ...], arrays: Arrays) -> tuple[jax.Array, ...]:
    """The statistics of each row: of "lse", "log_prob", "mean_log_prob", which is `Σ_v u_v·log p_v`, and `KEPT`.

    `arrays` are "rows", "ids" `[n]` int32, the targets, and for the mean "u" `[V']`, which is 0 for padding.
    """
    how, operands = _call(kernels, arrays)
    find = integration.forward_statistics(how, frozenset(names), operands.head)
    found = find(operands.rows, operands.head, integration.NO_ARRAYS)[0]
    return tuple(found[name] for name in names)


def gradient(kernels: Kernels, names: tuple[str, ...], arrays: Arrays) -> tuple[jax.Array]:
    """The rows' gradient, 0 where they are not "valid" `[n]`, from the statistics of `KEPT` and named cotangents."""
    kept, cotangents = ({name: arrays[name] for name in some} for some in (KEPT, names))
    if "u" in arrays:
        kept["sum_weights"] = jnp.full_like(kept["log_sum"], arrays["u"].sum())
    return (integration.materialized_row_gradient(*_call(kernels, arrays), kept, cotangents),)


def _call(kernels: Kernels, arrays: Arrays) -> tuple[How, Operands]:
    u = arrays["u"][: kernels.spec.vocab_size] if "u" in arrays else None
    head = integration.Head(integration.NO_WEIGHT, None, None, u, kernels.spec)
    operands = Operands(integration.Batch(arrays["rows"], arrays.get("ids")), head, arrays.get("valid"))
    return How(kernels.implementation, "recompute", None), operands
