"""`linear_cross_entropy`: the loss of a language model's head."""

import dataclasses
from typing import Any

import jax

from pallas_ce.api.checks import ArrayLike, DTypeLike
from pallas_ce.api.inputs import CheckedCall, read_head
from pallas_ce.api.low_rank import WeightLike
from pallas_ce.api.options import Options, call_metrics, read_options, split
from pallas_ce.api.precision import PrecisionLike
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.dispatch.settings import Settings
from pallas_ce.gradient_products import Arrays, PerInput
from pallas_ce.modes import evaluate, running
from pallas_ce.modes.call import Call, Known, Operands
from pallas_ce.parallel.entry import program
from pallas_ce.parallel.mesh_axes import MeshAxes
from pallas_ce.statistics.cross_entropy import CrossEntropy, Metrics, Reduction
from pallas_ce.statistics.logits import present


def linear_cross_entropy(
    hidden: ArrayLike,
    weight: WeightLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    vocab_axis: int = 0,
    vocab_size: int | None = None,
    ignore_index: int | None = -100,
    token_weights: ArrayLike | None = None,
    class_weights: ArrayLike | None = None,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    logit_softcap: float | None = None,
    logit_scale: ArrayLike = 1.0,
    shift: int = 0,
    reduction: Reduction = "mean",
    normalizer: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike | None = None,
    backward: Backward = "auto",
    implementation: Implementation | None = None,
    scratch_bytes: int | None = None,
    mesh_axes: MeshAxes | None = None,
    validate_labels: bool = False,
    return_metrics: bool = False,
) -> Any:
    r"""Cross entropy of `logits = softcap(logit_scale · (hidden·weight + bias))` with `labels`, without storing logits.

    For a row z with label t, token weight w, class weights c (1 each by default), smoothing α and z-loss factor β:

        loss = w·[ (1-α)·c_t·(lse - z_t) + α/V·Σ_v c_v·(lse - z_v) ]  +  w·β·lse²,     lse = log Σ_v exp z_v

    which is PyTorch's `cross_entropy` where the options are its. The mean divides the first part by `Σ w·c_t` and the
    z part by `Σ w`, over the tokens that count; a given `normalizer` replaces both.

    Args:
        hidden: `[..., H]` bfloat16, float16, float32 or float64; any leading shape, zero tokens included.
        weight: `[V', H]` (`vocab_axis=0`: tied embeddings, PyTorch) or `[H, V']` (`vocab_axis=1`: Flax Dense kernels).
            Float32 master weights with `dtype=bfloat16` are cast inside; their gradient is the float32 accumulator.
            "mosaic_gpu" copies a slice of a larger array that is made inside the same `jit`.
        labels: `[...]`, any integer dtype. Labels outside `[0, vocab_size)` count as ignored.
        bias: `[V']`.
        vocab_axis: the weight's vocabulary axis.
        vocab_size: V; entries of the weight from there on are padding: no probability, zero gradient. Default V'.
        ignore_index: tokens with this label have loss 0 and gradient 0, and their work is skipped; it may lie inside
            the vocabulary.
        token_weights: w `[...]`, differentiable: under the mean, `(loss_i - loss)/Σ w`.
        class_weights: c `[V]`, may be negative; a constant, it gets no gradient.
        label_smoothing: α in [0, 1]; may be traced or an array, whose range is not checked. The number 0 leaves the
            term out.
        z_loss: β; may be traced. The number 0 leaves the term out.
        logit_softcap: c > 0 for `c·tanh(x/c)`, or None. A Python number.
        logit_scale: scalar, may be traced and differentiated.
        shift: 1 where the hidden state of a position predicts the next one's label, along the last of the leading axes:
            the loss of `hidden[..., :-1, :]` with `labels[..., 1:]` and `token_weights[..., 1:]`, without the copy of
            hidden. Positions whose label would lie behind the last one do not count. Any number from 0 on.
        reduction: "mean", "sum", or "none" for `[...]`.
        normalizer: scalar for the mean, may be traced: the token count of the global batch, say.
        dtype: compute dtype of the products' operands; by default hidden's and weight's common one.
        precision: how float32 operands are multiplied, as in `jax.lax.dot_general`: a name ("tensorfloat32",
            "BF16_BF16_F32_X3", ...), a `jax.lax.Precision` or a `jax.lax.DotAlgorithmPreset`, for the products of
            forward and backward alike. None: what `jax.default_matmul_precision` says where that is set, else full
            float32 (a GPU's own default is TF32). 16-bit operands need none, as their products are exact. JAX raises
            an error where the platform does not have the algorithm.
        backward: "in_forward" computes the gradients in the forward: three matrix products, for scalar reductions.
            "recompute" keeps O(N) numbers and recomputes tiles of logits: four. "auto" chooses; see `explain`.
        implementation: "xla" (any platform), "reference" (materialised logits), "mosaic_gpu" (kernels for Hopper GPUs,
            bfloat16 and float16), "triton" (a kernel for NVIDIA GPUs from Ampere on; float32 too), or None: in programs
            for a GPU the kernels that are for it, where they can serve the call, else "xla"; `explain` tells which and
            why, and whether they have run on such a GPU.
        scratch_bytes: bound on scratch memory; by default 4 KiB for each vocabulary entry but at least 512 MiB and at
            most 1 GiB (on an accelerator twice that for float32 operands, and for in_forward by XLA), and never more
            than float32 logits would take (but at least 1 MiB). What lies where the weight's gradient will, once it is
            made, does not count.
        mesh_axes: inside a `shard_map`, how the arrays are split over its axes; see `MeshAxes`. Outside it is not
            needed: under `jit` the arrays' own shardings are read.
        validate_labels: raise a ValueError naming the first label that is neither in the vocabulary nor
            `ignore_index`. Reads the labels' values, so only outside jit.
        return_metrics: return `(loss, Metrics)`.

    Returns:
        The loss, float32 (float64 for float64): `[]`, or `[...]` for "none"; 0.0 when no token counts. With
        `return_metrics`, the pair `(loss, Metrics)`.

    Raises:
        ValueError: shapes or values that do not fit, "in_forward" with `reduction="none"`, a named implementation that
            cannot serve, a budget too small for one row.
        TypeError: dtypes that do not fit; `validate_labels` on traced labels.
        NotImplementedError: when differentiated twice; see `implementation="reference"`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from pallas_ce import linear_cross_entropy
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 5, 8))      # [batch, time, H]
        >>> weight = jax.random.normal(jax.random.key(1), (100, 8))       # [V, H]
        >>> labels = jnp.array([[1, 2, 3, 4, -100], [5, 6, -100, -100, -100]])
        >>> loss_and_gradients = jax.value_and_grad(linear_cross_entropy, argnums=(0, 1))
        >>> loss, (d_hidden, d_weight) = loss_and_gradients(hidden, weight, labels)
        >>> d_hidden.shape, d_weight.shape
        ((2, 5, 8), (100, 8))
        >>> loss, metrics = linear_cross_entropy(hidden, weight, labels, z_loss=1e-4, return_metrics=True)
        >>> int(metrics.num_tokens)
        6

    References:
        "From Projection to Prediction: Beyond Logits for Scalable Language Models": Algorithm 1 (forward), 2
        (recompute), 3 and 4 (in_forward). z-loss: "PaLM: Scaling Language Modeling with Pathways", section 5.
    """
    loss, metrics = compute(*read(**locals()))
    return (loss, metrics) if return_metrics else loss


# What `compute` and `keep` take.
Checked = tuple[Settings, CheckedCall, Options]


def read(**arguments: Any) -> Checked:
    """Checks the arguments of `linear_cross_entropy`."""
    of_loss, of_head = split(arguments)
    call = read_head(**of_head, needs_labels=True)
    options = read_options(call.leading, call.spec.vocab_size, **of_loss)
    return call.settings(options, scalar_loss=not options.by_row, backward=options.backward), call, options


@program(static=1, by_row=lambda settings, call, options, *_: (options.by_row, False))
def compute(
    settings: Settings, call: CheckedCall, options: Options, known: Known | None = None
) -> tuple[jax.Array, Metrics | None]:
    """The loss and, where asked for, its metrics. `known`: what `keep` has found for the same call."""
    static, operands = operands_of(settings, call, options)
    value, found = evaluate.loss(static, operands._replace(known=known), options.by_row)
    if not options.return_metrics:
        return value, None
    assert isinstance(static.row_total, CrossEntropy)
    ids, mask = present(operands.batch.labels), present(operands.mask)
    return value, call_metrics(static.row_total, found, ids, mask, operands.inputs, settings.total)


def keep(settings: Settings, call: CheckedCall, options: Options, needs_grad: PerInput[bool]) -> Known | None:
    """What `compute` takes as `known`, for gradients of `needs_grad` or fewer."""
    return evaluate.keep(*operands_of(settings, call, options), needs_grad)


def add_gradients(
    settings: Settings,
    call: CheckedCall,
    options: Options,
    known: Known,
    needs_grad: PerInput[bool],
    cotangent: jax.Array,
    weight_sum: jax.Array,
) -> Arrays:
    """The gradients of `compute`'s loss, a scalar; in place of the weight's there is `weight_sum` with it added.

    For mode recompute, from what `keep` has found. `cotangent []` and `weight_sum` are in the accumulator dtype.
    """
    static, operands = operands_of(settings, call, options)
    operands = operands._replace(known=known, cotangent=cotangent, weight_sum=weight_sum)
    return running.loss_and_gradients(static, operands, needs_grad)[1]


def operands_of(settings: Settings, call: CheckedCall, options: Options) -> tuple[Call[Settings], Operands]:
    """The call as rows, a head, and a row loss with its inputs."""
    batch, head, mask = call.rows_that_count()
    options = options.of_rows(call.shifted)
    wide = call.spec.accumulator
    head = dataclasses.replace(head, logit_weights=options.logit_weights(call.spec.vocab_size, wide))
    loss, inputs = options.row_loss(wide, present(batch.labels), present(mask), settings.total)
    return Call(settings, loss.names | options.extra_names, loss), Operands(batch, head, mask, inputs)
