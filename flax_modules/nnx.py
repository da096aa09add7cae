"""Loss heads for models written in `flax.nnx`: modules that own, or share, the unembedding and return the loss."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from flax_modules import _nnx_parameters as shared
from flax_modules._head import HeadCalls, described_by
from flax_modules._multi_token import Heads, MultiTokenCalls, read_heads
from pallas_ce import LowRank, linear_cross_entropy

__all__ = ["LossHead", "MultiTokenLossHead"]


class ConstructorSignature:
    """The `__signature__` of a class, from its `__init__`.

    NNX makes modules through a metaclass, and `inspect` would find its `__call__(*args, **kwargs)`. Instances have no
    `__signature__`, so that `inspect` shows their `__call__`.
    """

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@described_by(HeadCalls, linear_cross_entropy)
@dataclasses.dataclass(eq=False, repr=False)
class LossHead(HeadCalls, nnx.Module):
    """The last layer of a language model: hidden states and labels in, loss out, logits never stored.

    {description} A head tied to the input embedding, or of another parameter or layer that the model has, with or
    without an adapter (LoRA), is built by `LossHead.of`.

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

    __signature__ = ConstructorSignature()

    def __post_init__(
        self,
        kernel_metadata: Any,
        bias_metadata: Any,
        lora_a_metadata: Any,
        lora_b_metadata: Any,
        rngs: nnx.Rngs | None,
    ) -> None:
        """Creates the parameters the head owns."""
        # They stay modules, not their arrays: whoever replaces a parameter of theirs keeps the tie.
        embed, linear = (None if x is None else shared.parameters(x) for x in (self.embed, self.linear))
        if embed is not None and linear is not None:
            raise ValueError("embed and linear are both given, but a head has one weight: give one of them")
        columns = self._columns(*(None if x is None else x.weight.shape for x in (embed, linear)))
        found = embed or linear
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
        if not isinstance(rngs, nnx.Rngs):
            raise ValueError(f"{rngs=}, but this head has parameters to initialise: pass rngs=nnx.Rngs(seed)")
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
                another module with one matrix, whose output is taken for the product with it plus its `bias`. A
                layer with another parameter, such as the scale of a quantised matrix, is refused.
            vocab_axis: 0 where the weight is `[V, H]`, 1 where it is `[H, V]`; needed where the layer does not tell.
            vocab_size: number of its entries that are vocabulary, where it is padded (default: all).
            **options: as for `LossHead`. `dtype` and `precision` default to the layer's, and serve the adapter too.
                `lora_scale` is a factor of the layer's adapter; it is needed for one of qwix, `alpha / rank` of its
                rule, whose dropout the head leaves out. With `lora_rank` and `rngs` the head has an adapter of its own.

        Returns:
            The head.

        Raises:
            TypeError: no parameter and no layer with one matrix, a layer that multiplies in a way of its own or has
                another parameter, or, when called, a quantised weight whose package has no `dequantize`.
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

    def _projection(self) -> tuple[jax.Array | LowRank, int, jax.Array | None]:
        source = self.linear if self.embed is None else self.embed
        found = shared.Parameters(self.kernel) if source is None else shared.parameters(source)
        if found.of_qwix and not self._of_qwix:
            raise ValueError("qwix adapted the layer after the head: make it anew by LossHead.of, with a lora_scale")
        own = None if self.lora is None else (self.lora.lora_a, self.lora.lora_b)
        matrix, axis = shared.array(found.weight), 1 if self.embed is None else 0
        bias = self.bias if found.bias is None else found.bias
        weight: jax.Array | LowRank = matrix
        if (lora := found.lora or own) is not None:
            weight = self._adapted(matrix, axis, *map(shared.array, lora))
        return weight, axis, None if bias is None else shared.array(bias)


@described_by(MultiTokenCalls)
class MultiTokenLossHead(MultiTokenCalls, nnx.Module):
    """Predicts the next k tokens of every position, after Gloeckle et al. 2024 (arXiv:2404.19737).

    {description}

    Args:
        {options}
        projection_metadata: metadata of their `nnx.Param`.
        rngs: random number generator of the initializers; only needed for the `P_i`.

    Raises:
        ValueError: `num_tokens` missing or in contradiction with `head`, or no `rngs` where they are needed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_modules.nnx import LossHead, MultiTokenLossHead
        >>> rngs = nnx.Rngs(0)
        >>> mtp = MultiTokenLossHead(LossHead(16, 100, rngs=rngs), num_tokens=3, rngs=rngs)
        >>> tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 100)
        >>> hidden = jax.random.normal(jax.random.key(1), (2, 8, 16))  # of tokens[:, :-1]
        >>> loss, metrics = mtp(hidden, tokens[:, 1:], return_metrics=True)
        >>> loss.shape, len(metrics)
        ((), 3)
        >>> mtp.logits(hidden[:, -1], head=2).shape  # three tokens ahead
        (2, 100)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        head: LossHead | Sequence[LossHead],
        num_tokens: int | None = None,
        *,
        project_hidden: bool | None = None,
        param_dtype: Dtype = jnp.float32,
        projection_init: Initializer = jax.nn.initializers.zeros,
        projection_metadata: Mapping[str, Any] = MappingProxyType({}),
        head_weights: float | Sequence[float] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        heads = read_heads(head, num_tokens, project_hidden)
        self.num_tokens, self.project_hidden = len(heads.each), heads.projects
        self.head_weights = tuple(head_weights) if isinstance(head_weights, Sequence) else head_weights
        self.heads = nnx.List(heads.each[:1] if heads.shared else heads.each)
        self.projections: nnx.List[nnx.Linear] = nnx.List([])
        if self.project_hidden and self.num_tokens > 1:
            if not isinstance(rngs, nnx.Rngs):
                raise ValueError(f"{rngs=}, but there are hidden projections to initialise: pass rngs=nnx.Rngs(seed)")
            options = {**heads.of_projections(param_dtype, projection_init), "kernel_metadata": projection_metadata}
            for each in heads.each[1:]:
                self.projections.append(nnx.Linear(each.features, each.features, rngs=rngs, **options))

    def _heads(self) -> Heads:
        shared = len(self.heads) == 1
        return Heads([*self.heads] * (self.num_tokens if shared else 1), shared, self.project_hidden)
