"""A language model's head as an `nnx.Module`: it owns (or shares) the unembedding and returns the loss."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from flax import nnx

from flax_modules._head import HeadCalls, Projection, with_options_documented
from flax_modules.nnx.signature import ConstructorSignature


@with_options_documented
@dataclasses.dataclass(eq=False, repr=False)
class LossHead(HeadCalls, nnx.Module):
    """The last layer of a language model: hidden states and labels in, loss out, logits never stored.

    With a kernel of its own the head replaces `nnx.Linear(features, vocab_size)` and the cross entropy after it:

        logits = softcap(logit_scale * (hidden @ kernel + bias)),    softcap(x) = c * tanh(x / c)
        loss   = mean over counted tokens of  lse - (1 - a) * logits[label] - a * mean(logits) + z_loss * lse**2

    with `lse = log(sum(exp(logits)))` and `a = label_smoothing`; `pallas_ce.linear_cross_entropy` states every option
    in full. A head tied to the input embedding is built by `LossHead.tied`.

    Attributes hold the loss options under the names of the constructor, so `head.label_smoothing = 0.0` for evaluation
    works as for any NNX module. Parameters are `kernel [features, V]` (or `embed`, the shared embedding) and
    `bias [V]`; where there is none the attribute is None. V is `vocab_size`, or `padded_vocab_size` where given.

    Args:
        {options}
        kernel_metadata: metadata of the kernel's `nnx.Param`, for instance `{"out_sharding": (None, "model")}`.
        bias_metadata: metadata of the bias's `nnx.Param`.
        rngs: random number generator of the initializers; only a tied head without bias needs none.

    Raises:
        ValueError: `padded_vocab_size` below `vocab_size`, no `rngs` where parameters must be initialised, or an
            `embed` of another shape.

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
    """

    embed: nnx.Module | nnx.Param[Any] | None = None
    _: dataclasses.KW_ONLY
    kernel_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    bias_metadata: dataclasses.InitVar[Mapping[str, Any]] = MappingProxyType({})
    rngs: dataclasses.InitVar[nnx.Rngs | None] = None

    __signature__ = ConstructorSignature()

    def __post_init__(
        self, kernel_metadata: Mapping[str, Any], bias_metadata: Mapping[str, Any], rngs: nnx.Rngs | None
    ) -> None:
        """Creates the parameters the head owns."""
        embed = self.embed
        columns = self._columns(None if embed is None else _embedding(embed).shape)
        # The module and not its array: whoever replaces the embedding's parameter keeps the tie.
        self.embed = nnx.data(embed)
        self.kernel: nnx.Param[Any] | None = nnx.data(None)
        self.bias: nnx.Param[Any] | None = nnx.data(None)
        if embed is not None and not self.use_bias:
            return
        if rngs is None:
            raise ValueError("rngs=None, but this head has parameters to initialise: pass rngs=nnx.Rngs(seed)")
        if embed is None:
            shape = (self.features, columns)
            self.kernel = nnx.Param(self.kernel_init(rngs.params(), shape, self.param_dtype), **kernel_metadata)
        if self.use_bias:
            self.bias = nnx.Param(self.bias_init(rngs.params(), (columns,), self.param_dtype), **bias_metadata)

    @classmethod
    def tied(cls, embed: nnx.Module | nnx.Param[Any], *, vocab_size: int | None = None, **options: Any) -> Self:
        """A head whose weight *is* an embedding `[V, H]`: `logits = hidden @ embedding.T`, as `nnx.Embed.attend`.

        The embedding is shared, not copied: it is one parameter of the model, counted once by `nnx.state`, and its
        gradient is the sum over both uses. Sharing is a reference between modules, so it needs NNX's graph mode (the
        default); the embedding and the head must be parts of one module for `nnx.split` and the optimizer to see both.

        Args:
            embed: an `nnx.Embed`, any other module with an `embedding` parameter `[V, H]`, or such a parameter.
            vocab_size: number of its rows that are vocabulary, where it is padded (default: all).
            **options: as for `LossHead`. `dtype` defaults to that of the embedding module, as in `attend`.

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
        shape = _embedding(embed).shape
        if len(shape) != 2:
            raise ValueError(f"embed has shape {shape}: a head needs an embedding of shape (V, features)")
        options.setdefault("dtype", None if isinstance(embed, nnx.Variable) else getattr(embed, "dtype", None))
        return cls._tied(embed, shape, vocab_size, options)

    def _projection(self) -> Projection:
        bias = None if self.bias is None else self.bias[...]
        if self.kernel is not None:
            return Projection(self.kernel[...], 1, bias)
        assert self.embed is not None
        return Projection(_embedding(self.embed)[...], 0, bias)


def _embedding(embed: nnx.Module | nnx.Param[Any]) -> nnx.Variable[Any]:
    """The parameter of an embedding given as a module or as that parameter."""
    parameter = embed if isinstance(embed, nnx.Variable) else getattr(embed, "embedding", None)
    if not isinstance(parameter, nnx.Variable):
        raise TypeError(f"embed is a {type(embed).__name__}: pass an nnx.Embed, or its parameter `embed.embedding`")
    return parameter
