"""A language model's head as an `nnx.Module`: it owns (or shares) the unembedding and returns the loss."""

import dataclasses
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import jax
from flax import nnx

from flax_modules._head import HeadCalls, with_options_documented
from flax_modules.nnx import shared
from pallas_ce import LowRank


@with_options_documented
@dataclasses.dataclass(eq=False, repr=False)
class LossHead(HeadCalls, nnx.Module):
    """The last layer of a language model: hidden states and labels in, loss out, logits never stored.

    With a kernel of its own the head replaces `nnx.Linear(features, vocab_size)` and the cross entropy after it:

        logits = softcap(logit_scale * (hidden @ kernel + bias)),    softcap(x) = c * tanh(x / c)
        loss   = mean over counted tokens of  lse - (1 - a) * logits[label] - a * mean(logits) + z_loss * lse**2

    with `lse = log(sum(exp(logits)))` and `a = label_smoothing`; `pallas_ce.linear_cross_entropy` states every option
    in full. A head tied to the input embedding, or of another parameter or layer that the model has, with or without an
    adapter (LoRA), is built by `LossHead.of`.

    Attributes hold the loss options under the names of the constructor, so `head.label_smoothing = 0.0` for evaluation
    works as for any NNX module. Parameters are `kernel [features, V]` (or a shared `embed` or `linear`),
    `bias [V]` and `lora`, an `nnx.LoRA` whose `lora_a [features, r]` and `lora_b [r, V]` are `nnx.LoRAParam`; where
    there is none the attribute is None. V is `vocab_size`, or `padded_vocab_size` where given.

    Args:
        {options}
        linear: the layer or parameter of shape (features, V) to share instead of owning a kernel; see `of`.
        kernel_metadata: metadata of the kernel's `nnx.Param`, for instance `{"out_sharding": (None, "model")}`.
        bias_metadata: metadata of the bias's `nnx.Param`.
        lora_a_metadata: metadata of the adapter's `lora_a`.
        lora_b_metadata: metadata of its `lora_b`, whose columns are the kernel's.
        rngs: random number generator of the initializers; only a head without parameters of its own needs none.

    Raises:
        TypeError: an `embed` or a `linear` that is something else.
        ValueError: `padded_vocab_size` below `vocab_size`, no `rngs` where parameters must be initialised, an `embed`
            or a `linear` of another shape, both, a bias or an adapter beside a shared one, or a `lora_rank` that is not
            between 1 and the smaller of features and V.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_modules.nnx import LossHead
        >>> head = LossHead(16, 100, z_loss=1e-4, rngs=nnx.Rngs(0))
        >>> hidden = jax.random.normal(jax.random.key(1), (2, 5, 16))
        >>> labels = jnp.array([[1, 2, 3, 4, -100], [7, 8, 9, -100, -100]])  # -100: no label here
        >>> loss, grads = nnx.value_and_grad(lambda head: head(hidden, labels))(head)
        >>> loss.shape, grads["kernel"].shape
        ((), (16, 100))
        >>> head.logits(hidden[:, -1]).shape  # to sample the next token
        (2, 100)

        With the kernel frozen, an adapter is trained (LoRA):

        >>> head = LossHead(16, 100, lora_rank=4, lora_scale=2.0, rngs=nnx.Rngs(0))
        >>> of_adapter = nnx.grad(lambda head: head(hidden, labels), argnums=nnx.DiffState(0, nnx.LoRAParam))
        >>> sorted(jnp.shape(x) for x in jax.tree.leaves(of_adapter(head)))
        [(4, 100), (16, 4)]
    """

    _: dataclasses.KW_ONLY
    linear: Any = None
    kernel_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    bias_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    lora_a_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    lora_b_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    rngs: dataclasses.InitVar[nnx.Rngs | None] = None

    __signature__ = shared.ConstructorSignature()

    def __post_init__(
        self,
        kernel_metadata: Any,
        bias_metadata: Any,
        lora_a_metadata: Any,
        lora_b_metadata: Any,
        rngs: nnx.Rngs | None,
    ) -> None:
        """Creates the parameters the head owns."""
        given = [None if x is None else shared.parameters(x) for x in (self.embed, self.linear)]
        if None not in given:
            raise ValueError("embed and linear are both given, but a head has one weight: give one of them")
        columns = self._columns(*(None if x is None else x.weight.shape for x in given))
        # They stay modules, not their arrays: whoever replaces a parameter of theirs keeps the tie.
        found = self._shared()
        self._of_qwix = found is not None and found.of_qwix
        if self.use_bias and found is not None and found.bias is not None:
            raise ValueError("use_bias=True, but the head shares a layer's bias: leave use_bias out")
        if (rank := self.lora_rank) is not None and found is not None and found.lora is not None:
            raise ValueError(
                f"lora_rank={rank}, but the head shares a layer that has an adapter, and takes one: leave lora_rank "
                "out, or merge the other"
            )
        self.kernel: nnx.Param[Any] | None = nnx.data(None)
        self.bias: nnx.Param[Any] | None = nnx.data(None)
        self.lora: nnx.LoRA | None = nnx.data(None)
        if found is not None and not self.use_bias and rank is None:
            return
        if rngs is None:
            raise ValueError("rngs=None, but this head has parameters to initialise: pass rngs=nnx.Rngs(seed)")
        if found is None:
            shape = (self.features, columns)
            self.kernel = nnx.Param(self.kernel_init(rngs.params(), shape, self.param_dtype), **kernel_metadata)
        if self.use_bias:
            self.bias = nnx.Param(self.bias_init(rngs.params(), (columns,), self.param_dtype), **bias_metadata)
        if rank is not None:
            self.lora = nnx.LoRA(
                self.features,
                rank,
                columns,
                param_dtype=self.param_dtype,
                a_initializer=self.lora_a_init,
                b_initializer=self.lora_b_init,
                a_metadata=lora_a_metadata,
                b_metadata=lora_b_metadata,
                rngs=rngs,
            )

    def _shared(self) -> shared.Parameters | None:
        """The parameters that another layer has; None where the head owns its kernel."""
        source = self.linear if self.embed is None else self.embed
        return None if source is None else shared.parameters(source)

    @classmethod
    def of(cls, source: Any, *, vocab_axis: int | None = None, vocab_size: int | None = None, **options: Any) -> Self:
        """A head with a parameter or a layer that the model has: its weight, and a layer's bias and adapter (LoRA).

        They are shared, not copied. A parameter of the model is counted once by `nnx.state`, and its gradient is the
        sum over all its uses. Sharing is a reference between modules, so it needs NNX's graph mode (the default); the
        layer and the head must be parts of one module for `nnx.split` and the optimizer to see both. An adapter is
        never added to the weight, so that training it alone, as below, makes no array of the weight's size. A quantised
        weight is dequantised in every call by the function `dequantize` of the package that it is of.

        Args:
            source: a layer, or a parameter alone: an `nnx.Param`, an array, or a variable with a `.value`, as of Keras.
                A layer is an `nnx.Embed`, `nnx.Linear`, `nnx.Einsum`, `nnx.LoRALinear`, an `nnx.LoRA` around one, or
                another module with one matrix, whose output is taken for the product with it plus its `bias`.
            vocab_axis: 0 where the weight is `[V, H]`, 1 where it is `[H, V]`; needed where the layer does not tell.
            vocab_size: number of its entries that are vocabulary, where it is padded (default: all).
            **options: as for `LossHead`. `dtype` and `precision` default to the layer's, and serve the adapter too.
                `lora_scale` is a factor of the layer's adapter; it is needed for one of qwix, `alpha / rank` of its
                rule, whose dropout the head leaves out. With `lora_rank` and `rngs` the head has an adapter of its own.

        Returns:
            The head.

        Raises:
            TypeError: no parameter and no layer with one matrix, a layer that multiplies in a way of its own, or, when
                called, a quantised weight whose package has no `dequantize`.
            ValueError: no matrix, several adapters, `vocab_axis` missing or wrong, `vocab_size` above its entries, or
                an adapter of qwix without `lora_scale`.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from flax import nnx
            >>> from flax_modules.nnx import LossHead
            >>> class Model(nnx.Module):
            ...     def __init__(self, rngs):
            ...         self.embed = nnx.Embed(100, 16, rngs=rngs)
            ...         self.head = LossHead.of(self.embed)
            ...     def __call__(self, tokens):
            ...         return self.head(self.embed(tokens), tokens, shift=1)
            >>> jax.tree.map(jnp.shape, nnx.state(Model(nnx.Rngs(0))))
            State({
              'embed': {
                'embedding': Param(
                  value=(100, 16)
                )
              }
            })

            The adapter of a layer is trained alone:

            >>> head = LossHead.of(nnx.LoRALinear(16, 100, lora_rank=4, use_bias=False, rngs=nnx.Rngs(0)))
            >>> hidden, labels = jnp.ones((10, 16)), jnp.arange(10)
            >>> of_adapter = nnx.grad(lambda head: head(hidden, labels), argnums=nnx.DiffState(0, nnx.LoRAParam))
            >>> sorted(jnp.shape(x) for x in jax.tree.leaves(of_adapter(head)))
            [(4, 100), (16, 4)]
        """
        layer, found = shared.layer(source), shared.parameters(source)
        if found.of_qwix and "lora_scale" not in options:
            raise ValueError(
                f"lora_scale is missing: the adapter of this {type(layer).__name__} is of qwix, whose rule alone has "
                "the scale: pass lora_scale=alpha / rank"
            )
        if isinstance(layer, nnx.Module):
            for option in ("dtype", "precision"):
                options.setdefault(option, getattr(layer, option, None))
        axis, shape = shared.vocab_axis(layer, vocab_axis), found.weight.shape
        return cls._sharing(("embed", "linear")[axis], source, (shape[axis], shape[1 - axis]), vocab_size, options)

    @classmethod
    def tied(cls, embed: Any, *, vocab_size: int | None = None, **options: Any) -> Self:
        """`of` a parameter or a layer whose weight is `[V, H]`, under its former name."""
        warnings.warn(cls._RENAMED.format("tied"), DeprecationWarning, stacklevel=2)
        return cls.of(embed, vocab_axis=0, vocab_size=vocab_size, **options)

    @classmethod
    def of_linear(cls, linear: nnx.Module, *, vocab_size: int | None = None, **options: Any) -> Self:
        """`of` a layer, under its former name."""
        warnings.warn(cls._RENAMED.format("of_linear"), DeprecationWarning, stacklevel=2)
        return cls.of(linear, vocab_size=vocab_size, **options)

    def _projection(self) -> tuple[jax.Array | LowRank, int, jax.Array | None]:
        found = self._shared() or shared.Parameters(self.kernel)
        if found.of_qwix and not self._of_qwix:
            raise ValueError("qwix adapted the layer after the head: make it anew by LossHead.of, with a lora_scale")
        own = None if self.lora is None else (self.lora.lora_a, self.lora.lora_b)
        matrix, axis = shared.array(found.weight), 1 if self.embed is None else 0
        bias = self.bias if found.bias is None else found.bias
        weight: jax.Array | LowRank = matrix
        if (lora := found.lora or own) is not None:
            weight = self._adapted(matrix, axis, *map(shared.array, lora))
        return weight, axis, None if bias is None else shared.array(bias)
