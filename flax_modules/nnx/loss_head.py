"""A language model's head as an `nnx.Module`: it owns (or shares) the unembedding and returns the loss."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from flax import nnx

from flax_modules._head import HeadCalls, Projection, with_options_documented
from flax_modules.nnx import shared
from flax_modules.nnx.signature import ConstructorSignature


@with_options_documented
@dataclasses.dataclass(eq=False, repr=False)
class LossHead(HeadCalls, nnx.Module):
    """The last layer of a language model: hidden states and labels in, loss out, logits never stored.

    With a kernel of its own the head replaces `nnx.Linear(features, vocab_size)` and the cross entropy after it:

        logits = softcap(logit_scale * (hidden @ kernel + bias)),    softcap(x) = c * tanh(x / c)
        loss   = mean over counted tokens of  lse - (1 - a) * logits[label] - a * mean(logits) + z_loss * lse**2

    with `lse = log(sum(exp(logits)))` and `a = label_smoothing`; `pallas_ce.linear_cross_entropy` states every option
    in full. A head tied to the input embedding is built by `LossHead.tied`, and one of a layer that the model has, with
    or without an adapter (LoRA), by `LossHead.of_linear`.

    Attributes hold the loss options under the names of the constructor, so `head.label_smoothing = 0.0` for evaluation
    works as for any NNX module. Parameters are `kernel [features, V]` (or a shared `embed` or `linear`),
    `bias [V]` and `lora`, an `nnx.LoRA` whose `lora_a [features, r]` and `lora_b [r, V]` are `nnx.LoRAParam`; where
    there is none the attribute is None. V is `vocab_size`, or `padded_vocab_size` where given.

    Args:
        {options}
        linear: the layer to share instead of owning a kernel; see `of_linear`.
        kernel_metadata: metadata of the kernel's `nnx.Param`, for instance `{"out_sharding": (None, "model")}`.
        bias_metadata: metadata of the bias's `nnx.Param`.
        lora_a_metadata: metadata of the adapter's `lora_a`.
        lora_b_metadata: metadata of its `lora_b`, whose columns are the kernel's.
        rngs: random number generator of the initializers; only a head without parameters of its own needs none.

    Raises:
        TypeError: an `embed` or a `linear` that is something else.
        ValueError: `padded_vocab_size` below `vocab_size`, no `rngs` where parameters must be initialised, an `embed`
            or a `linear` of another shape, both, a bias or an adapter beside one that `linear` has, or a `lora_rank`
            that is not between 1 and the smaller of features and V.

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

    embed: nnx.Module | nnx.Param[Any] | None = None
    _: dataclasses.KW_ONLY
    linear: nnx.Module | None = None
    kernel_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    bias_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    lora_a_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    lora_b_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    rngs: dataclasses.InitVar[nnx.Rngs | None] = None

    __signature__ = ConstructorSignature()

    def __post_init__(
        self,
        kernel_metadata: Mapping[str, Any],
        bias_metadata: Mapping[str, Any],
        lora_a_metadata: Mapping[str, Any],
        lora_b_metadata: Mapping[str, Any],
        rngs: nnx.Rngs | None,
    ) -> None:
        """Creates the parameters the head owns."""
        embed, linear, rank = self.embed, self.linear, self.lora_rank
        given = None if linear is None else self._given(linear)
        columns = self._columns(
            None if embed is None else shared.embedding(embed).shape, None if given is None else given.weight.shape
        )
        # The modules and not their arrays: whoever replaces a parameter of theirs keeps the tie.
        self.embed, self.linear = nnx.data(embed), nnx.data(linear)
        self.kernel: nnx.Param[Any] | None = nnx.data(None)
        self.bias: nnx.Param[Any] | None = nnx.data(None)
        self.lora: nnx.LoRA | None = nnx.data(None)
        owns_kernel = embed is None and linear is None
        if not owns_kernel and not self.use_bias and rank is None:
            return
        if rngs is None:
            raise ValueError("rngs=None, but this head has parameters to initialise: pass rngs=nnx.Rngs(seed)")
        if owns_kernel:
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

    def _given(self, linear: nnx.Module) -> shared.Parameters:
        """The parameters of the layer; checks what the head was asked to have beside it."""
        if self.embed is not None:
            raise ValueError("embed and linear are both given, but a head has one weight: give one of them")
        given = shared.parameters(linear)
        if self.use_bias:
            raise ValueError("use_bias=True, but the bias of a head with linear= is the layer's: leave use_bias out")
        if self.lora_rank is not None and given.lora is not None:
            raise ValueError(
                f"lora_rank={self.lora_rank}, but linear is an {type(linear).__name__}, which has an adapter: a head "
                "takes one, so leave lora_rank out, or merge the other"
            )
        return given

    @classmethod
    def tied(cls, embed: nnx.Module | nnx.Param[Any], *, vocab_size: int | None = None, **options: Any) -> Self:
        """A head whose weight *is* an embedding `[V, H]`: `logits = hidden @ embedding.T`, as `nnx.Embed.attend`.

        The embedding is shared, not copied: it is one parameter of the model, counted once by `nnx.state`, and its
        gradient is the sum over both uses. Sharing is a reference between modules, so it needs NNX's graph mode (the
        default); the embedding and the head must be parts of one module for `nnx.split` and the optimizer to see both.

        Args:
            embed: an `nnx.Embed`, any other module with an `embedding` parameter `[V, H]`, or such a parameter.
            vocab_size: number of its rows that are vocabulary, where it is padded (default: all).
            **options: as for `LossHead`. `dtype` defaults to the embedding module's, as in `attend`.

        Returns:
            The head.

        Raises:
            TypeError: `embed` is neither a module with an `embedding` nor a parameter.
            ValueError: the embedding is not a matrix, or `vocab_size` exceeds its rows.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from flax import nnx
            >>> from flax_modules.nnx import LossHead
            >>> class Model(nnx.Module):
            ...     def __init__(self, rngs):
            ...         self.embed = nnx.Embed(100, 16, rngs=rngs)
            ...         self.head = LossHead.tied(self.embed)
            ...     def __call__(self, tokens, labels):
            ...         return self.head(self.embed(tokens), labels)
            >>> jax.tree.map(jnp.shape, nnx.state(Model(nnx.Rngs(0))))
            State({
              'embed': {
                'embedding': Param(
                  value=(100, 16)
                )
              }
            })
        """
        shape = shared.embedding(embed).shape
        if len(shape) != 2:
            raise ValueError(f"embed has shape {shape}: a head needs an embedding of shape (V, features)")
        options.setdefault("dtype", None if isinstance(embed, nnx.Variable) else getattr(embed, "dtype", None))
        return cls._tied(embed, shape, vocab_size, options)

    @classmethod
    def of_linear(cls, linear: nnx.Module, *, vocab_size: int | None = None, **options: Any) -> Self:
        """A head with the parameters of a layer that the model has: its kernel, bias and adapter (LoRA).

        The layer is shared, not copied, as by `tied`. An adapter of it is never added to the kernel, so that training
        it alone, as below, makes no array of the kernel's size.

        Args:
            linear: an `nnx.Linear`, an `nnx.LoRALinear`, or an `nnx.LoRA` whose `base_module` is an `nnx.Linear`.
            vocab_size: number of its columns that are vocabulary, where it is padded (default: all).
            **options: as for `LossHead`. `dtype` and `precision` default to the kernel layer's, and
                serve the adapter too; `lora_scale`, 1 by default as in Flax, is a factor of its adapter. With
                `lora_rank` and `rngs` the head has an adapter of its own beside a layer without one.

        Returns:
            The head.

        Raises:
            TypeError: another kind of layer, or one with a `dot_general` of its own.
            ValueError: several adapters, or `vocab_size` exceeds its columns.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from flax import nnx
            >>> from flax_modules.nnx import LossHead
            >>> class Model(nnx.Module):
            ...     def __init__(self, rngs):
            ...         self.embed = nnx.Embed(100, 16, rngs=rngs)
            ...         self.lm_head = nnx.LoRALinear(16, 100, lora_rank=4, use_bias=False, rngs=rngs)
            ...         self.loss_head = LossHead.of_linear(self.lm_head)
            ...     def __call__(self, tokens):
            ...         return self.loss_head(self.embed(tokens), tokens, shift=1)
            >>> tokens = jnp.arange(10)
            >>> of_adapter = nnx.grad(lambda model: model(tokens), argnums=nnx.DiffState(0, nnx.LoRAParam))
            >>> sorted(jnp.shape(x) for x in jax.tree.leaves(of_adapter(Model(nnx.Rngs(0)))))
            [(4, 100), (16, 4)]
        """
        layer = shared.layer(linear)
        features, columns = layer.kernel.shape
        if vocab_size is not None and vocab_size > columns:
            raise ValueError(f"{vocab_size=} is larger than linear, which has {columns} columns")
        options.setdefault("dtype", layer.dtype)
        options.setdefault("precision", layer.precision)
        size = columns if vocab_size is None else vocab_size
        return cls(features, size, padded_vocab_size=columns, linear=linear, **options)

    def _projection(self) -> Projection:
        if self.linear is not None:
            found = shared.parameters(self.linear)
        elif self.embed is not None:
            found = shared.Parameters(shared.embedding(self.embed), 0, self.bias)
        else:
            assert self.kernel is not None
            found = shared.Parameters(self.kernel, 1, self.bias)
        weight, axis, bias = found.weight[...], found.vocab_axis, None if found.bias is None else found.bias[...]
        if (lora := found.lora if self.lora is None else self.lora) is None:
            return Projection(weight, axis, bias)
        return Projection(self._adapted(weight, axis, lora.lora_a[...], lora.lora_b[...]), axis, bias)
