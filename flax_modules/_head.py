"""What the Linen and the NNX `LossHead` share: the options with their checks, and the loss from them and parameters.

The modules own parameters, nothing else. Parameters are handed to `pallas_ce` in the dtype they are stored in: it casts
them itself and so returns a float32 gradient for float32 parameters, where a cast in the module would have rounded it.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer
from jax.typing import ArrayLike

from pallas_ce import LowRank, MeshAxes, Metrics, RowStatistics, linear_cross_entropy, linear_row_statistics
from pallas_ce.api.integration import Backward, Implementation, PrecisionLike, Problem, Reduction, checks

default_kernel_init = jax.nn.initializers.lecun_normal()
default_lora_a_init = jax.nn.initializers.he_uniform()


# An argument's entry in a docstring.
_ENTRY = re.compile(r"^    (\w+): .*(?:\n        .*)*", re.MULTILINE)


def described_by[T: Callable[..., Any]](*sources: Any) -> Callable[[T], T]:
    """Fills a docstring where it says `{description}`, with the first source's, and where it says `{options}`.

    These are the texts of the parameters that it does not describe itself, of the first source that has one.
    """
    texts = [inspect.getdoc(source) or "" for source in sources]
    known = {entry[1]: entry[0].strip() for text in reversed(texts) for entry in _ENTRY.finditer(text)}
    description = texts[0].partition("\n\n")[2].partition("\n\nAttributes:\n")[0]

    def filled(target: T) -> T:
        text = inspect.cleandoc(target.__doc__ or "").replace("{description}", description)
        own = {entry[1] for entry in _ENTRY.finditer(text)}
        options = [known[name] for name in inspect.signature(target).parameters if name in known.keys() - own]
        target.__doc__ = text.replace("{options}", "\n    ".join(options))
        return target

    return filled


# Not frozen: a Linen module inherits these fields and freezes itself; an NNX module lets them be changed.
@dataclasses.dataclass(eq=False, repr=False)
class HeadCalls:
    """The options of a loss head, which are its attributes, and what it computes from them and its parameters.

    With a kernel of its own the head replaces the last dense layer, `nn.Dense(vocab_size)` in Linen and
    `nnx.Linear(features, vocab_size)` in NNX, and the cross entropy after it:

        logits = softcap(logit_scale * (hidden @ kernel + bias)),    softcap(x) = c * tanh(x / c)
        loss   = mean over counted tokens of  lse - (1 - α) * logits[label] - α * mean(logits) + β * lse**2

    with `lse = log(sum(exp(logits)))`, `α = label_smoothing` and `β = z_loss`; `pallas_ce.linear_cross_entropy` states
    the loss in full. A head takes no `vocab_scale`, which would be a parameter of its own that no kernels serve: the
    functions of `pallas_ce` take it, with the head's parameters.

    Attributes:
        features: width H of the hidden states.
        vocab_size: number of entries of the vocabulary.
        padded_vocab_size: number of columns of the kernel where it is padded, say to a multiple of 128. The padding
            takes no part in the loss, gets zero gradient, and does not appear in the logits.
        embed: the embedding of shape (V, features) to share instead of owning a kernel; see `of`.
        use_bias: whether to add a bias to the logits.
        dtype: dtype of the products' operands (default: what hidden states and parameters promote to, the Flax rule;
            so with float32 parameters pass `jnp.bfloat16` for mixed precision). Sums, logits and the loss are float32,
            and every gradient has the dtype of its parameter.
        param_dtype: dtype of the parameters.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        lora_rank: rank r of a low-rank adapter of the weight (LoRA), or None for none. The weight then is
            `kernel + lora_scale * lora_a @ lora_b`, which is never stored. Differentiating `lora_a [features, r]` and
            `lora_b [r, V]` only costs no gradient of the kernel.
        lora_scale: factor of the adapter, a Python number: LoRA's α/r.
        lora_a_init: initializer of `lora_a`.
        lora_b_init: initializer of `lora_b`; zeros, so that training starts from the head without adapter.
    """

    features: int
    vocab_size: int
    padded_vocab_size: int | None = None
    embed: Any = None
    use_bias: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = jax.nn.initializers.zeros
    ignore_index: int | None = -100
    label_smoothing: ArrayLike = 0.0
    z_loss: ArrayLike = 0.0
    logit_softcap: float | None = None
    logit_scale: ArrayLike = 1.0
    reduction: Reduction = "mean"
    backward: Backward = "auto"
    implementation: Implementation | None = None
    scratch_bytes: int | None = None
    precision: PrecisionLike | None = None
    mesh_axes: MeshAxes | None = None
    lora_rank: int | None = None
    lora_scale: float = 1.0
    lora_a_init: Initializer = default_lora_a_init
    lora_b_init: Initializer = jax.nn.initializers.zeros

    def _columns(self, embed_shape: tuple[int, ...] | None, linear_shape: tuple[int, ...] | None = None) -> int:
        """The number of vocabulary entries the weight holds, padding included; checks sizes and names of options."""
        checks.check_reduction(self.reduction, None, self.backward)
        vocab_size, padded_vocab_size = self.vocab_size, self.padded_vocab_size
        for name, size in (("features", self.features), ("vocab_size", vocab_size)):
            checks.integer(name, size, "an int, at least 1", 1)
        columns = vocab_size if padded_vocab_size is None else padded_vocab_size
        if columns < vocab_size:
            raise ValueError(
                f"{padded_vocab_size=} is smaller than {vocab_size=}: it is the size with padding, at least vocab_size"
            )
        needed = (columns, self.features)
        if embed_shape not in (None, needed):
            raise ValueError(f"embed has shape {embed_shape}, but this head needs {needed}: (V, features)")
        if linear_shape not in (None, needed[::-1]):
            raise ValueError(f"linear has shape {linear_shape}, but this head needs {needed[::-1]}: (features, V)")
        rank, most = self.lora_rank, min(needed)
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= most):
            raise ValueError(
                f"lora_rank={rank!r} must be None or an integer from 1 to {most}, the smaller of features and V"
            )
        return columns

    @classmethod
    def _sharing(
        cls, field: str, source: Any, shape: tuple[int, int], vocab_size: int | None, options: dict[str, Any]
    ) -> Self:
        """A head with a weight of `shape` (V, H), given to `field`; all is vocabulary unless `vocab_size` says less."""
        columns, features = shape
        size = columns if vocab_size is None else vocab_size
        if size > columns:
            raise ValueError(f"{vocab_size=} is larger than the vocabulary of the shared weight, {columns}")
        return cls(features, size, padded_vocab_size=columns, **{field: source}, **options)

    def _projection(self) -> tuple[jax.Array | LowRank, int, jax.Array | None]:
        """The parameters: the weight, `[V, H]` (`vocab_axis` 0) or `[H, V]` (1), that axis, and the bias `[V]`."""
        raise NotImplementedError

    def _adapted(self, weight: jax.Array, vocab_axis: int, lora_a: jax.Array, lora_b: jax.Array) -> LowRank:
        """The weight with the adapter `lora_a [H, r]` and `lora_b [r, V]`, whichever way it lies itself."""
        if not isinstance(self.lora_scale, int | float):
            raise TypeError(
                f"lora_scale is a {type(self.lora_scale).__name__}; it must be a Python number: multiply lora_b by "
                "a traced or trained factor"
            )
        up, down = (lora_b, lora_a) if vocab_axis == 1 else (lora_b.T, lora_a.T)
        return LowRank(weight, up, down, self.lora_scale)

    def _check_width(self, hidden: ArrayLike) -> None:
        if (shape := jnp.shape(hidden))[-1:] != (self.features,):
            raise ValueError(f"hidden has shape {shape}; its last axis must be {self.features}, the head's features")

    def _options(self, logit_scale: ArrayLike | None, *more: str) -> dict[str, Any]:
        """The arguments that every function of `pallas_ce` takes from a head, and `more`; None: its own scale."""
        weight, vocab_axis, bias = self._projection()
        scale = self.logit_scale if logit_scale is None else logit_scale
        of_head = {name: getattr(self, name) for name in ("vocab_size", "logit_softcap", "dtype", "precision", *more)}
        return {"weight": weight, "vocab_axis": vocab_axis, "bias": bias, "logit_scale": scale, **of_head}

    @described_by(linear_cross_entropy)
    def __call__(  # noqa: D417
        self,
        hidden: jax.Array,
        labels: jax.Array,
        *,
        shift: int = 0,
        token_weights: jax.Array | None = None,
        class_weights: jax.Array | None = None,
        normalizer: ArrayLike | None = None,
        label_smoothing: ArrayLike | None = None,
        z_loss: ArrayLike | None = None,
        logit_scale: ArrayLike | None = None,
        reduction: Reduction | None = None,
        validate_labels: bool = False,
        return_metrics: bool = False,
    ) -> jax.Array | tuple[jax.Array, Metrics]:
        """The loss of the labels, as `pallas_ce.linear_cross_entropy` has it.

        Args:
            hidden: hidden states `[..., H]`, any floating dtype.
            labels: labels `[...]`, integers; those that are `ignore_index` or outside the vocabulary do not count.
            {options}
            label_smoothing: instead of the head's; may be traced, so that a schedule does not recompile.
            z_loss: instead of the head's; may be traced.
            logit_scale: instead of the head's; may be traced, and is differentiable.
            reduction: instead of the head's.

        Returns:
            The loss, float32 (a scalar; `[...]` with reduction "none"), or the loss and its metrics.

        Raises:
            ValueError: shapes that do not fit, or an option that cannot be served; see `linear_cross_entropy`.
        """
        self._check_width(hidden)
        return linear_cross_entropy(
            hidden,
            labels=labels,
            **self._options(logit_scale, "ignore_index", "backward", "implementation", "scratch_bytes", "mesh_axes"),
            shift=shift,
            token_weights=token_weights,
            class_weights=class_weights,
            label_smoothing=self.label_smoothing if label_smoothing is None else label_smoothing,
            z_loss=self.z_loss if z_loss is None else z_loss,
            reduction=self.reduction if reduction is None else reduction,
            normalizer=normalizer,
            validate_labels=validate_labels,
            return_metrics=return_metrics,
        )

    def logits(self, hidden: jax.Array, *, logit_scale: ArrayLike | None = None) -> jax.Array:
        """The logits `[..., vocab_size]`, float32, for generation: scaled and capped as in the loss, padding left out.

        They are computed in `dtype` with sums in float32, by an ordinary matrix product: all of them are stored.

        Args:
            hidden: hidden states `[..., H]`; to sample, usually of the last position only.
            logit_scale: instead of the head's.

        Raises:
            ValueError: the last axis of `hidden` is not `features`.
        """
        self._check_width(hidden)
        problem = Problem.read(hidden, **self._options(logit_scale))
        batch, head, _ = problem.flat_rows_that_count()
        # Padding is cut from the result and not from the weight, which would be copied for it.
        values = head.logits(head.with_low(batch))[:, : head.spec.vocab_size]
        return values.reshape(*problem.leading, head.spec.vocab_size)

    def row_statistics(
        self,
        hidden: jax.Array,
        labels: jax.Array | None = None,
        *,
        statistics: tuple[str, ...] = ("lse", "target_logit"),
        temperature: ArrayLike = 1.0,
        row_mask: jax.Array | None = None,
        logit_weights: jax.Array | None = None,
        logit_scale: ArrayLike | None = None,
    ) -> RowStatistics:
        """Statistics of the logits (log-probabilities, entropy, argmax, ...) without storing them; differentiable.

        Takes `statistics`, `temperature`, `row_mask` and `logit_weights` as `pallas_ce.linear_row_statistics` does.
        `logit_scale` replaces the head's.

        Example:
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> from flax_modules.nnx import LossHead
            >>> head = LossHead(16, 100, rngs=nnx.Rngs(0))
            >>> stats = head.row_statistics(jnp.ones((3, 16)), jnp.array([1, 2, 3]), statistics=("log_prob", "argmax"))
            >>> stats.log_prob.shape, stats.argmax.shape
            ((3,), (3,))
        """
        self._check_width(hidden)
        return linear_row_statistics(
            hidden,
            labels=labels,
            **self._options(logit_scale, "implementation", "scratch_bytes", "mesh_axes"),
            statistics=statistics,
            temperature=temperature,
            row_mask=row_mask,
            logit_weights=logit_weights,
        )
