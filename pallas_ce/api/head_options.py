"""The keyword arguments that functions of a head share: their types and texts, once, and how each function shows them.

`help`, an editor and the API's pages show them all.
"""

import difflib
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection
from typing import Any, TypedDict, get_args

from pallas_ce.api.checks import ArrayLike, DTypeLike
from pallas_ce.api.problem import Options, Problem
from pallas_ce.api.specs import PrecisionLike
from pallas_ce.backends.protocol import Backward, Implementation
from pallas_ce.parallel.mesh_axes import MeshAxes
from pallas_ce.statistics.cross_entropy import Reduction


class WeightOptions(TypedDict, total=False):
    """How a weight is read and multiplied.

    Attributes:
        vocab_axis: the weight's vocabulary axis: 0 for `[V', H]` (tied embeddings, PyTorch), 1 for `[H, V']` (Flax
            Dense kernels).
        vocab_size: V; entries of the weight from there on are padding: no probability, zero gradient. Default V'.
        logit_scale: scalar, may be traced and differentiated.
        dtype: compute dtype of the products' operands; by default hidden's and weight's common one. Products and sums
            accumulate in float32 (float64 for float64).
        precision: how float32 operands are multiplied, as in `jax.lax.dot_general`: a name ("tensorfloat32",
            "BF16_BF16_F32_X3", ...), a `jax.lax.Precision` or a `jax.lax.DotAlgorithmPreset`, for the products of
            forward and backward alike. None: what `jax.default_matmul_precision` says where that is set, else full
            float32 (a GPU's own default is TF32). 16-bit operands need none, as their products are exact. JAX raises
            an error where the platform does not have the algorithm.
        scratch_bytes: bound on scratch memory; by default 4 KiB for each vocabulary entry but at least 512 MiB and at
            most 1 GiB (on an accelerator twice that for float32 operands, and for in_forward by XLA; for in_forward
            on Hopper a quarter of the weight's accumulator more, or what fills 1 GiB together with it), and never more
            than float32 logits would take (but at least 1 MiB). What lies where the weight's gradient will, once it is
            made, does not count.
    """

    vocab_axis: int
    vocab_size: int | None
    logit_scale: ArrayLike
    dtype: DTypeLike | None
    precision: PrecisionLike | None
    scratch_bytes: int | None


class HeadOptions(WeightOptions, total=False):
    """The whole head: `softcap(logit_scale · (vocab_scale·(hidden·weight) + bias))`.

    Attributes:
        bias: `[V']`.
        vocab_scale: `[V']`, a factor for each vocabulary entry: nGPT's s_z (arXiv:2410.01131, section 2.1), or the
            scales of a weight that is quantised entry by entry. Differentiable; a constant where a function returns
            gradients. Its gradient is a by-product of the weight's, and takes as long where the weight is frozen. The
            products with the weight have to fit the compute dtype. By "xla" and "reference".
        logit_softcap: c > 0 for `c·tanh(x/c)`, or None. A Python number.
    """

    bias: ArrayLike | None
    vocab_scale: ArrayLike | None
    logit_softcap: float | None


class StreamedOptions(HeadOptions, total=False):
    """A head whose statistics are streamed, by any implementation and on any mesh.

    Attributes:
        implementation: "xla" (any platform), "reference" (materialised logits), "mosaic_gpu" (kernels for Hopper GPUs,
            bfloat16 and float16; one temperature for all rows), "triton" (a kernel for NVIDIA GPUs from Ampere on;
            float32 too), or None: in programs for a GPU the kernels that are for it, where they serve the call and
            "xla" is not faster, else "xla"; `explain` tells which and why, and whether they have run on such a GPU.
        mesh_axes: inside a `shard_map`, how the arrays are split over its axes; see `MeshAxes`. Outside it is not
            needed: under `jit` the arrays' own shardings are read.
    """

    implementation: Implementation | None
    mesh_axes: MeshAxes | None


class RowOptions(TypedDict, total=False):
    """What differs from row to row.

    Attributes:
        row_mask: `[...]` bool; rows where it is False do not count: they hold 0, have gradients of exactly 0, and their
            work is skipped.
        temperature: T > 0, which the capped logits are divided by: a number, `[]` or one `[...]` for each row. A
            constant: it gets no gradient. A number is folded into cap and scale and costs nothing.
    """

    row_mask: ArrayLike | None
    temperature: ArrayLike


class LabelOptions(TypedDict, total=False):
    """Labels that may have to be ignored.

    Attributes:
        ignore_index: tokens with this label have loss 0 and gradient 0, and their work is skipped; it may lie inside
            the vocabulary. None: no label is special.
        validate_labels: raise a ValueError naming the first label that is neither in the vocabulary nor
            `ignore_index`. Reads the labels' values, so only outside jit.
    """

    ignore_index: int | None
    validate_labels: bool


class ReductionOptions(TypedDict, total=False):
    """How losses by row are reduced.

    Attributes:
        token_weights: w `[...]`, differentiable: under the mean, `(loss_i - loss)/Σ w`.
        reduction: "mean", "sum", or "none" for `[...]`.
        normalizer: scalar for the mean, may be traced: the token count of the global batch, say.
    """

    token_weights: ArrayLike | None
    reduction: Reduction
    normalizer: ArrayLike | None


class CrossEntropyTerms(TypedDict, total=False):
    """The terms of a cross entropy.

    Attributes:
        class_weights: c `[V]`, may be negative; a constant, it gets no gradient.
        label_smoothing: α in [0, 1]; may be traced or an array, whose range is not checked. The number 0 leaves the
            term out.
        z_loss: β; may be traced. The number 0 leaves the term out.
    """

    class_weights: ArrayLike | None
    label_smoothing: ArrayLike
    z_loss: ArrayLike


class LabelledOptions(StreamedOptions, LabelOptions, total=False):
    """A streamed head with labels."""


class StatisticsOptions(StreamedOptions, RowOptions, total=False):
    """The statistics of a streamed head.

    Attributes:
        logit_weights: `[V]`, the u of `mean_logit = Σ_v u_v·z_v`; 1/V each by default. A constant: it gets no gradient.
    """

    logit_weights: ArrayLike | None


class LossOptions(LabelledOptions, ReductionOptions, total=False):
    """A loss by row of a streamed head, reduced.

    Attributes:
        backward: "in_forward" computes the gradients in the forward: three matrix products, for scalar reductions.
            "recompute" keeps O(N) numbers and recomputes tiles of logits: four. "auto" chooses; see `explain`.
    """

    backward: Backward


class RowLossOptions(LossOptions, StatisticsOptions, total=False):
    """A user's loss by row."""


class CrossEntropyOptions(LossOptions, CrossEntropyTerms, total=False):
    """The cross entropy of a streamed head."""


class DistillationOptions(HeadOptions, RowOptions, ReductionOptions, total=False):
    """A divergence of a head from a teacher's, reduced.

    Attributes:
        teacher_bias: the teacher's `[V'']`.
        teacher_logit_softcap: the cap of the teacher's logits.
        teacher_logit_scale: their scale.
        teacher_dtype: compute dtype of the teacher's products; by default its inputs' common one.
        teacher_precision: how float32 operands of the teacher's products are multiplied.
        mesh_axes: inside a `shard_map`, how both heads and their rows are split over its axes; see `MeshAxes`.
    """

    teacher_bias: ArrayLike | None
    teacher_logit_softcap: float | None
    teacher_logit_scale: ArrayLike
    teacher_dtype: DTypeLike | None
    teacher_precision: PrecisionLike | None
    mesh_axes: MeshAxes | None


class SampledOptions(WeightOptions, ReductionOptions, total=False):
    """A loss over sampled columns of a head, reduced.

    Attributes:
        ignore_index: tokens with this label do not count.
        bias: `[V']`.
        implementation: "xla", "mosaic_gpu", "triton", "reference" or None.
    """

    ignore_index: int | None
    bias: ArrayLike | None
    implementation: Implementation | None


class StoredOptions(LabelOptions, ReductionOptions, CrossEntropyTerms, total=False):
    """The cross entropy of logits that the caller holds.

    Attributes:
        logit_softcap: c > 0 for `c·tanh(x/c)`, or None. A Python number.
        vocab_size: V; columns from there on are padding: no probability, zero gradient. Default V'.
        implementation: "xla" (any platform), "mosaic_gpu" (Hopper GPUs, bfloat16, float16 or float32, where the
            number of rows is a multiple of 8 and V' one of 16: a kernel takes all rows at once, so that a chunk size
            does not matter), or None: that one in programs for a Hopper GPU where it can, else "xla". Logits that are
            not donated are copied once, which takes about as long as the loss and its gradient.
        return_metrics: return `(loss, Metrics)`.
    """

    logit_softcap: float | None
    vocab_size: int | None
    implementation: Implementation | None
    return_metrics: bool


_DEFAULTS: dict[str, Any] = vars(Options()) | (Problem.read.__kwdefaults__ or {})

# What may stand before the name of a head's option: PyTorch's names of its arrays begin so, and a teacher's options.
_PREFIX = re.compile("linear_|teacher_")

# One argument's names here and in the bridge, and those that other libraries have for it.
_NAMES = (
    (("hidden", "input"), ("_input", "x", "e", "hidden_states", "embeddings", "student_input", "student_hidden")),
    (("weight", "linear_weight"), ("lin_weight", "c", "classifier", "student_weight", "weights")),
    (("labels", "target"), ("targets", "label", "shift_labels")),
    (("bias", "linear_bias"), ("student_bias",)),
    (("class_weights",), ("ce_weight", "weight")),
    (("token_weights",), ("weights", "loss_mask", "mask", "row_mask")),
    (("row_mask",), ("mask",)),
    (("logit_softcap",), ("softcap", "logits_soft_cap", "final_logit_softcapping")),
    (("label_smoothing",), ("label_smoothing_factor",)),
    (("z_loss",), ("lse_square_scale", "z_loss_multiplier", "z_loss_weight")),
    (("normalizer",), ("num_items_in_batch",)),
    (("beta",), ("jsd_beta",)),
    (("return_metrics",), ("return_z_loss",)),
    (("implementation",), ("impl",)),
)


def called_here(unknown: str, known: Collection[str]) -> str:
    """The end of an error about an unknown argument: its name among the known ones, where it has one."""
    if unknown == "vocab_axis" and "linear_weight" in known:
        return "; linear_weight is [V, H] here: pass linear_weight.T for one that is [H, V]"
    names = [x for ours, others in _NAMES if unknown in (*ours, *others) for x in ours if x in known]
    names = names or difflib.get_close_matches(unknown, known, 1, 0.8)
    return f"; it is called {' or '.join(map(repr, names))} here" if names else ""


def computed_by[**P, Out](compute: Callable[..., Out]) -> Callable[[Callable[P, Any]], Callable[P, Out]]:
    """Makes a public function, `documented`, of one that checks the arguments and returns what `compute` takes."""
    return lambda read: documented(read, compute)


def documented[**P, Out](function: Callable[P, Out], compute: Callable[..., Any] | None = None) -> Callable[P, Out]:
    """`function`, whose last parameter is `**options: Unpack[...]`, with a signature and texts of these options.

    A text of the function's own goes before the shared one. `compute` makes the result of what the function returns.
    """
    *own, last = inspect.signature(function).parameters.values()
    (options,) = get_args(last.annotation)
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[_PREFIX.sub("", name)], annotation=annotation
        )
        for name, annotation in options.__annotations__.items()
    ]
    known = frozenset(x.name for x in (*own, *shared) if x.kind is not x.VAR_POSITIONAL)

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        if not known.issuperset(kwargs):
            unknown = next(name for name in kwargs if name not in known)
            hint = called_here(unknown, known)
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown!r}{hint}")
        found: Any = function(*args, **kwargs)
        return found if compute is None else compute(*found)

    returned = inspect.signature(compute or function).return_annotation
    signature = inspect.Signature([*own, *shared], return_annotation=returned)
    public.__signature__ = signature  # type: ignore[attr-defined]
    public.__annotations__ = function.__annotations__ | {"return": returned}
    before, returns, after = inspect.cleandoc(function.__doc__ or "").partition("\n\nReturns:\n")
    texts = [text for name, text in _texts(options).items() if f"\n    {name}: " not in before]
    public.__doc__ = "\n".join([before, *texts]) + returns + after
    return public


def _texts(options: type) -> dict[str, str]:
    """By name, the entries of all options, in the order of the fields."""
    texts: dict[str, str] = {}
    for base in types.get_original_bases(options):
        if isinstance(base, type):  # `TypedDict` itself is none
            texts |= _texts(base)
    section = inspect.cleandoc(options.__doc__ or "").partition("Attributes:\n")[2]
    return texts | {entry.split(":")[0].strip(): entry for entry in re.split(r"\n(?=    \S)", section) if entry}
