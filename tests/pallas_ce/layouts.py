"""Calls of named arrays, how they lie on several devices, and what one device makes of them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ce import (
    LowRank,
    linear_cross_entropy,
    linear_cross_entropy_and_gradients,
    linear_distillation,
    linear_log_probs,
)
from tests.pallas_ce.oracle import LOW_RANK_SCALE

B, T, H = 8, 8, 16
Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How hidden `[B, T, H]` and the weight `[V, H]` lie on the mesh `data=2, tensor=4`; the weight may have a term."""

    name: str
    hidden: P
    weight: P
    vocabulary: int = 64
    low_rank: bool = False

    @property
    def specs(self) -> dict[str, Any]:
        """By name, how each of `arrays` lies."""
        by_entry = P(self.weight[0] if len(self.weight) else None)
        weight = LowRank(self.weight, by_entry, P(), LOW_RANK_SCALE) if self.low_rank else self.weight
        return {
            **dict.fromkeys(("hidden", "labels", "token_weights", "teacher_hidden", "temperature"), self.hidden),
            **dict.fromkeys(("bias", "teacher_bias"), by_entry),
            "weight": weight, "teacher_weight": self.weight, "logit_scale": P(),
        }  # fmt: skip

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


def arrays(vocabulary: int, low_rank: bool = False) -> dict[str, Any]:
    """Arrays of a call; the vocabulary's last three entries do not exist, and are infinite in the teacher.

    Their logits would be NaN. Processes that share an array compare what each has of it, by which NaN are unequal.
    """
    rng = np.random.default_rng(vocabulary)
    shapes = {
        "hidden": (B, T, H),
        "weight": (vocabulary, H),
        "bias": (vocabulary,),
        "up": (vocabulary, 3),
        "down": (3, H),
    }
    shapes |= {"teacher_hidden": (B, T, 24), "teacher_weight": (vocabulary, 24), "teacher_bias": (vocabulary,)}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found["teacher_weight"][-3:] = np.inf
    labels = rng.integers(0, vocabulary - 3, (B, T)).astype(np.int32)
    labels[3], labels[:, 1] = -100, -100
    by_row = {"labels": labels, "token_weights": rng.random((B, T), np.float32)}
    by_row["temperature"] = np.linspace(0.5, 3.0, B * T, dtype=np.float32).reshape(B, T)
    up, down = found.pop("up"), 0.3 * found.pop("down")
    if low_rank:
        found["weight"] = LowRank(found["weight"], up, down, LOW_RANK_SCALE)
    return found | by_row | {"logit_scale": np.float32(0.7)}


def _head(a: Arrays, vocabulary: int) -> dict[str, Any]:
    return {"bias": a["bias"], "logit_scale": a["logit_scale"], "vocab_size": vocabulary - 3}


def loss(a: Arrays, vocabulary: int, **options: Any) -> Any:
    """Every term of the loss at once; beside a low-rank term the vocabulary's entries have scales, made of the bias."""
    by_entry = 1 + jnp.tanh(a["bias"]) / 2 if isinstance(a["weight"], LowRank) else None
    terms = {
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "class_weights": 0.5 + jnp.arange(vocabulary - 3) % 3,
    }
    return linear_cross_entropy(
        a["hidden"], a["weight"], a["labels"], token_weights=a["token_weights"], vocab_scale=by_entry,
        logit_softcap=5.0, **_head(a, vocabulary), **terms, **options,
    )  # fmt: skip


def distilled(a: Arrays, vocabulary: int, **options: Any) -> Any:
    """The loss from a wider teacher, or the sum over its rows, at a temperature for each or a given one."""
    given = {"temperature": a["temperature"], "logit_softcap": 5.0, **_head(a, vocabulary), **options}
    labels = a["labels"]
    if given.get("reduction") == "none":
        labels, given["row_mask"] = None, labels >= 0
    found = linear_distillation(
        a["hidden"], a["weight"], a["teacher_hidden"], a["teacher_weight"], labels, token_weights=a["token_weights"],
        teacher_bias=a["teacher_bias"], **given,
    )  # fmt: skip
    return jnp.sum(found)


def supported(a: Arrays, vocabulary: int, **options: Any) -> Any:
    """Log-probabilities of ids of all parts, one of them twice, and padding; some without the label.

    The gradients of the token weights are each row's result.
    """
    by_token = jax.lax.stop_gradient(a["token_weights"])
    ids = a["labels"][..., None] + jnp.array([55, 0, 17, 7, 17, 30, 41]) + (by_token < 0.3)[..., None]
    found = linear_log_probs(
        a["hidden"], a["weight"], a["labels"], support=jnp.where(ids % 5 == 0, -1, ids % vocabulary),
        temperature=a["temperature"], return_entropy=True, return_hit=True, **_head(a, vocabulary), **options,
    )  # fmt: skip
    by_row = jnp.where(found.in_support, found.log_probs, 0.1) + jnp.sin(found.entropy) + found.hit
    return jnp.sum(a["token_weights"] * by_row)


def added(a: Arrays, vocabulary: int, **options: Any) -> Any:
    """Gradients added to sums that lie as weight and bias."""
    given = {"label_smoothing": 0.1, "z_loss": 1e-2, "normalizer": 51.0, **_head(a, vocabulary), **options}
    value, *found = linear_cross_entropy_and_gradients(
        a["hidden"], a["weight"], a["labels"], 2 * a["weight"], bias_sum=2 * a["bias"], loss_scale=0.5, **given
    )
    return value, dict(zip(("hidden", "weight", "bias"), found, strict=True))


def shifted(a: Arrays, vocabulary: int, **options: Any) -> Any:
    """Labels a position later."""
    given = {"token_weights": a["token_weights"], "shift": 1, **_head(a, vocabulary), **options}
    return linear_cross_entropy(a["hidden"], a["weight"], a["labels"], **given)


# By name, functions of named arrays and the vocabulary; "sums" returns gradients itself.
CALLS: dict[str, Callable[..., Any]] = {
    **{mode: functools.partial(loss, backward=mode) for mode in MODES},
    **{name: functools.partial(distilled, divergence=name) for name in ("forward_kl", "reverse_kl", "jsd")},
    "support": supported,
    **{f"shift, {mode}": functools.partial(shifted, backward=mode) for mode in MODES},
    **{f"sums, {mode}": functools.partial(added, backward=mode) for mode in MODES},
}
DIFFERENTIATED = ("hidden", "weight", "bias", "logit_scale", "token_weights")


def differentiated(function: Callable[..., Any]) -> Callable[[Arrays], Any]:
    """Value and gradients of a function of named arrays."""

    def run(a: Arrays) -> Any:
        return jax.value_and_grad(lambda trained: function({**a, **trained}))({x: a[x] for x in DIFFERENTIATED})

    return run


def with_gradients(name: str, vocabulary: int, **options: Any) -> Callable[[Arrays], Any]:
    """A call's value, and its gradients by name."""
    function = functools.partial(CALLS[name], vocabulary=vocabulary, **options)
    return function if name.startswith("sums") else differentiated(function)


@functools.cache
def expected(name: str, vocabulary: int, low_rank: bool = False, **options: Any) -> Any:
    """Value and gradients of stored logits on one device."""
    given = {"implementation": "reference", **options}
    given |= {"backward": "auto"} if "backward" in getattr(CALLS[name], "keywords", ()) else {}
    return jax.jit(with_gradients(name, vocabulary, **given))(arrays(vocabulary, low_rank))


def placed(layout: Layout, on: Mesh) -> dict[str, Any]:
    """The arrays, laid so."""
    whole = arrays(layout.vocabulary, layout.low_rank)
    places = jax.tree.map(lambda spec: NamedSharding(on, spec), layout.specs, is_leaf=lambda x: isinstance(x, P))
    return jax.tree.map(jax.device_put, whole, {name: places[name] for name in whole})


def same(got: Any, want: Any, tolerance: float = 1e-5, floor: float = 0.0) -> None:
    """The process's parts of every result: equal to float32 rounding, relative to the largest entry or `floor`."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = tolerance * float(np.max(np.abs(y), initial=floor))
        for part in x.addressable_shards:
            np.testing.assert_allclose(part.data, np.asarray(y)[part.index], rtol=tolerance, atol=atol)
