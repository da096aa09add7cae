"""How calls lie on several devices, their arrays, and what one device makes of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import LowRank, linear_cross_entropy, sampled_softmax_cross_entropy
from tests.pallas_ce.oracle import LOW_RANK_SCALE

B, T, H = 8, 8, 16
DIFFERENTIATED = (0, 1, 2, 3, 5)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How hidden `[B, T, H]` and the weight `[V, H]` lie on the mesh `data=2, tensor=4`; the weight may have a term."""

    name: str
    hidden: P
    weight: P
    vocabulary: int = 64
    low_rank: bool = False

    @property
    def bias(self) -> P:
        return P(self.weight[0] if len(self.weight) else None)

    @property
    def specs(self) -> tuple[Any, ...]:
        """Of hidden, weight, bias, scale, labels and token weights."""
        weight = LowRank(self.weight, self.bias, P(), LOW_RANK_SCALE) if self.low_rank else self.weight
        return self.hidden, weight, self.bias, P(), self.hidden, self.hidden

    def with_term(self, low_rank: bool) -> "Layout":
        return dataclasses.replace(self, low_rank=low_rank)

    @property
    def axes(self) -> dict[str, Any]:
        """The arguments of `MeshAxes` beside `grad`."""
        width = flat(self.weight[1:])
        split = flat(self.weight[:1]) + width
        return {
            "vocabulary": flat(self.weight[:1]),
            "width": width,
            "rows": tuple(axis for axis in flat(self.hidden) if axis in split),
        }

    @property
    def only_rows(self) -> tuple[str, ...]:
        """The axes that split the rows only."""
        return tuple(axis for axis in flat(self.hidden) if axis not in self.axes["rows"])


def flat(spec: Any) -> tuple[str, ...]:
    return tuple(axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,)))


ALL = ("data", "tensor")
MODES = ("recompute", "in_forward")
LAYOUTS = (
    Layout("DP 8", P(ALL), P()),
    Layout("TP 8", P(), P(ALL)),
    Layout("TP 4, DP 2", P("data"), P("tensor")),
    Layout("SP 4, DP 2", P("data", "tensor"), P("tensor"), vocabulary=256),
    Layout("FSDP 8 over V", P(ALL), P(ALL), vocabulary=32),
    Layout("FSDP 8 over H", P(ALL), P(None, ALL)),
    Layout("TP 4, FSDP 2 over V", P("data"), P(("tensor", "data")), vocabulary=32),
    Layout("TP 4, FSDP 2 over H", P("data"), P("tensor", "data")),
)


def mesh(kind: AxisType = AxisType.Auto, shape: tuple[int, int] = (2, 4)) -> Mesh:
    return jax.make_mesh(shape, ALL, axis_types=(kind,) * 2, devices=jax.devices()[: shape[0] * shape[1]])


def arrays(vocabulary: int, padded: bool, low_rank: bool = False) -> tuple[Any, ...]:
    """hidden, weight, bias, scale, labels, token weights; with padding the last three entries do not exist."""
    keys = jax.random.split(jax.random.key(vocabulary), 7)
    labels = jax.random.randint(keys[3], (B, T), 0, vocabulary - 3 * padded).at[3].set(-100).at[:, 1].set(-100)
    weights = jax.random.uniform(keys[4], (B, T))
    hidden, weight = jax.random.normal(keys[0], (B, T, H)), jax.random.normal(keys[1], (vocabulary, H))
    if low_rank:
        up, down = jax.random.normal(keys[5], (vocabulary, 3)), jax.random.normal(keys[6], (3, H))
        weight = LowRank(weight, up, 0.3 * down, LOW_RANK_SCALE)
    return hidden, weight, jax.random.normal(keys[2], (vocabulary,)), jnp.float32(0.7), labels, weights


def sampled(hidden: Any, weight: Any, **options: Any) -> Any:
    """The loss with a few of the classes, each row's label its largest feature."""
    return sampled_softmax_cross_entropy(
        hidden, weight, jnp.argmax(hidden, axis=-1), key=jax.random.key(0), num_samples=9, **options
    )


def loss(
    hidden: Any, weight: Any, bias: Any, scale: Any, labels: Any, token_weights: Any, *, padded: bool, **options: Any
) -> Any:
    """Every term of the loss at once; beside a low-rank term the vocabulary's entries have scales, made of the bias."""
    by_entry = 1 + jnp.tanh(bias) / 2 if isinstance(weight, LowRank) else None
    vocabulary = bias.shape[0] if "vocabulary" not in options else options.pop("vocabulary")
    classes = 0.5 + jnp.arange(vocabulary - 3 * padded) % 3
    return linear_cross_entropy(
        hidden, weight, labels, bias=bias, vocab_scale=by_entry, logit_scale=scale, token_weights=token_weights,
        class_weights=classes, label_smoothing=0.1, z_loss=1e-2, logit_softcap=5.0,
        vocab_size=vocabulary - 3 * padded if padded else None, **options,
    )  # fmt: skip


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(function, argnums=DIFFERENTIATED)


def same(got: Any, want: Any, tolerance: float = 1e-5, floor: float = 0.0) -> None:
    """The process's parts of every result: equal to float32 rounding, relative to the largest entry or `floor`."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = tolerance * float(np.max(np.abs(y), initial=floor))
        for part in x.addressable_shards:
            np.testing.assert_allclose(part.data, np.asarray(y)[part.index], rtol=tolerance, atol=atol)


@functools.cache
def expected(vocabulary: int, padded: bool, low_rank: bool = False) -> Any:
    function = functools.partial(loss, padded=padded, implementation="reference")
    return gradients(function)(*arrays(vocabulary, padded, low_rank))


def placed(layout: Layout, on: Mesh, padded: bool) -> tuple[Any, ...]:
    given = arrays(layout.vocabulary, padded, layout.low_rank)
    places = jax.tree.map(lambda spec: NamedSharding(on, spec), layout.specs, is_leaf=lambda x: isinstance(x, P))
    return tuple(jax.device_put(x, place) for x, place in zip(given, places, strict=True))
