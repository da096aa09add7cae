"""A NaN or an infinity in one input of a function, beside plain JAX: spoilt entries, and how results are compared.

`check` spoils entries of each input at drawn places and compares which results and gradients are finite, NaN, +inf or
-inf, and the values where they are finite. `spoilt_functions` has the table of the functions.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.pallas_ce.plain import FORMS, Arrays

BAD = (np.nan, np.nan, np.inf, -np.inf)  # NaN as often as an infinity
Way = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a problem; `classes` of the weight's `padded` rows exist. A dtype for hidden states and weights."""

    rows: int = 12
    width: int = 5
    classes: int = 31
    padded: int = 34
    dtype: str = "float32"
    scratch_bytes: int | None = 2600

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """The first and the last class among them; every fifth is ignored, and one is a class that does not exist."""
        labels = (np.arange(self.rows) * 7 % self.classes).astype(np.int32)
        labels[1], labels[2::5], labels[-1] = self.classes - 1, -100, self.classes
        return labels

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Which rows count, `[rows]` bool."""
        return (self.labels >= 0) & (self.labels < self.classes)

    @property
    def counted(self) -> np.ndarray:
        """The rows that count."""
        return np.flatnonzero(self.counts)

    @property
    def several(self) -> np.ndarray:
        """Three labels for each row, some of them ignored, others twice."""
        one = self.labels
        return np.stack([one, np.where(np.arange(self.rows) % 2, one, -100), np.where(one < 0, one, 4)], axis=1)

    def spread(self, values: Any) -> Any:
        """Of results for rows that count, results for all rows, 0 in the others."""
        return jax.tree.map(lambda x: jnp.zeros((self.rows, *x.shape[1:]), x.dtype).at[self.counted].set(x), values)

    def shape(self, name: str) -> tuple[int, ...]:
        """An array's."""
        n, h, v, wide, ht = self.rows, self.width, self.classes, self.padded, self.width + 2
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("token_weights", "temperature", "row_input"), (n,)),
            **dict.fromkeys(("logit_scale", "teacher_logit_scale", "label_smoothing", "z_loss"), ()),
            **dict.fromkeys(("class_weights", "logit_weights"), (v,)),
            **dict.fromkeys(("bias", "teacher_bias"), (wide,)),
            "hidden": (n, h), "weight": (wide, h), "teacher_hidden": (n, ht), "teacher_weight": (wide, ht),
            "up": (wide, 2), "down": (2, h), "logits": (n, wide), "all_logits": (n, v),
            "emissions": (3, 4, 3), "transitions": (3, 3), "each_transitions": (3, 3, 3, 3), "rewards": (6,),
            **dict.fromkeys(("log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages"), (2, 3)),
            **dict.fromkeys(("chosen", "rejected", "ref_chosen", "ref_rejected"), (4,)),
            **dict.fromkeys(("top_log_probs", "teacher_log_probs"), (2, 3, 4)), "kernel": (h, v),
        }  # fmt: skip
        return shapes[name]

    def array(self, name: str) -> np.ndarray:
        """An unspoilt array."""
        x = np.random.default_rng(len(name) + ord(name[0])).normal(size=self.shape(name))
        if name in ("label_smoothing", "z_loss"):
            x = np.asarray(0.1)
        elif name.endswith("log_probs"):
            x = -2.0 - abs(x)
        elif name.endswith(("weights", "temperature", "scale")):
            x = 0.5 + abs(x)
        if name in ("weight", "teacher_weight", "down"):  # so that no exponential overflows where +inf is the maximum
            x = x / np.sqrt(self.width)
        narrow = name.removeprefix("teacher_") in ("hidden", "weight", "up", "down")
        return x.astype(jnp.dtype(self.dtype) if narrow else np.float32)


class Function(NamedTuple):
    """A public function.

    Attributes:
        ours: `(sizes, arrays, implementation, backward)`; the two are "" where it has no such option.
        plain: `(sizes, arrays, form, reduction)`, the same in plain JAX.
        inputs: the arrays that it takes.
        constants: those that have no gradient, and all that are not floating.
        ways: implementations and backward modes; with in_forward a mean, else a result for each row.
        finite: inputs in which only NaN is drawn, since infinities of them have no meaning.
        below: those in which +inf is not drawn: no log-probability is.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: tuple[str, ...]
    constants: tuple[str, ...] = ()
    ways: tuple[Way, ...] = (("", ""),)
    finite: tuple[str, ...] = ()
    below: tuple[str, ...] = ()

    def values(self, name: str) -> tuple[float, ...]:
        """Values drawn in one of its inputs."""
        return BAD[:1] if name in self.finite else (np.nan, -np.inf) if name in self.below else BAD


def without(function: Function, name: str) -> Function:
    """The function without one of its optional inputs."""
    return function._replace(inputs=tuple(x for x in function.inputs if x != name),
                             constants=tuple(x for x in function.constants if x != name))  # fmt: skip


@functools.cache
def _ours(function: Function, s: Sizes, way: Way, differentiated: tuple[str, ...]) -> Any:
    return jax.jit(_with_gradients(lambda a: function.ours(s, a, *way), differentiated))


@functools.cache
def _plain(function: Function, s: Sizes, reduction: str, differentiated: tuple[str, ...]) -> Any:
    """By each form."""
    forms = [
        _with_gradients(lambda a, form=form: function.plain(s, a, form, reduction), differentiated)
        for form in FORMS.values()
    ]
    return jax.jit(lambda a: [form(a) for form in forms])


def _with_gradients(function: Callable[[Arrays], Any], differentiated: tuple[str, ...]) -> Callable[[Arrays], Any]:
    """Results, and the gradients of their sum: finite cotangents, whatever the results are."""

    def run(a: Arrays) -> Any:
        def total(chosen: Arrays) -> Any:
            found = function(a | chosen)
            return sum(jnp.sum(x) for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating)), found

        return jax.grad(total, has_aux=True)({name: a[name] for name in differentiated})[::-1]

    return run


def place(s: Sizes, name: str, rng: np.random.Generator) -> tuple[int, ...]:
    """Of an entry: the first, the last, a target's column, one that does not count or one that may be anywhere."""
    shape = s.shape(name)
    found = [int(rng.integers(size)) for size in shape]
    if shape and shape[0] == s.rows:
        found[0] = int(rng.choice([0, 2, s.rows - 2, found[0]]))
    elif shape and shape[0] in (s.padded, s.classes):
        found[0] = int(rng.choice([0, shape[0] - 1, s.classes - 1, s.labels[0], s.labels[3], found[0]]))
    return tuple(found)


# XLA's maximum of a row on a CPU drops a NaN in some hundred columns or more, and keeps it in a few.
SIZES = {"wide": Sizes(classes=1003, padded=1010, scratch_bytes=None), "tiles": Sizes()}


def check(
    function: Function, s: Sizes, way: Way, seed: int, only: Iterable[str] = (), put: Callable[..., Any] | None = None
) -> None:
    """Compares the function with plain JAX, for each input with what `seed` draws at a place that it draws.

    `put(name, array)` places an array on devices.
    """
    rng = np.random.default_rng(seed)
    clean = {name: s.array(name) for name in function.inputs}
    for name in only or function.inputs:
        where, bad = place(s, name, rng), rng.choice(function.values(name))
        assert_like_plain_jax(function, s, way, spoilt(clean, name, where, bad), f"{name}{[*where]} = {bad}", put)


def spoilt(clean: Arrays, name: str, where: Any, bad: float) -> Arrays:
    """The arrays with that entry of one of them replaced."""
    found = np.array(clean[name])
    found[where] = bad
    return clean | {name: found}


def assert_like_plain_jax(
    function: Function, s: Sizes, way: Way, arrays: Arrays, said: str, put: Callable[..., Any] | None = None
) -> None:
    """Results and gradients have the kinds that plain JAX has, and its values where these are finite."""
    differentiated = tuple(name for name in function.inputs if name not in function.constants)
    given = arrays if put is None else {name: put(name, x) for name, x in arrays.items()}
    got = jax.tree.map(np.asarray, _ours(function, s, way, differentiated)(given))
    wants = jax.tree.map(
        np.asarray, _plain(function, s, "mean" if way[1] == "in_forward" else "none", differentiated)(arrays)
    )
    bound = 6e-2 if jnp.dtype(s.dtype).itemsize == 2 else 2e-4
    leaves = [jax.tree.leaves(want) for want in wants]
    infinite = any(np.isinf(np.asarray(x, np.float32)).any() for x in arrays.values())
    for index, (path, x) in enumerate(jax.tree.leaves_with_path(got)):
        if infinite and jax.tree_util.keystr(path) == "[1]['logit_scale']":
            continue  # a sum of 0·inf or of inf - inf, in whichever order it is taken
        fits = np.zeros(x.shape, bool)
        for want in leaves:
            fits |= _same(x, want[index], bound)
            if infinite and path[0] == jax.tree_util.SequenceKey(1):  # whether inf or inf - inf depends on the order
                fits |= ~np.isfinite(x) & ~np.isfinite(want[index])
                fits |= np.isinf(arrays.get("logit_scale", 1.0)) & (x == 0)  # 0·(±inf) is 0
        if put is not None and x.shape[:1] == (s.padded,):
            fits[s.classes :] |= np.isnan(x[s.classes :])  # a shard's padding has 0 times the hidden states
        if not np.all(fits):
            at = tuple(np.argwhere(~fits)[0])
            raise AssertionError(
                f"{said}, {way}: {jax.tree_util.keystr(path)} has {np.sum(~fits)} of {fits.size} entries unlike plain "
                f"JAX's, first {[int(i) for i in at]}: {x[at]}, where that has {[want[index][at] for want in leaves]}"
            )


def _same(x: np.ndarray, y: np.ndarray, bound: float) -> np.ndarray:
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return x == y
    x, y = x.astype(np.float32), y.astype(np.float32)
    finite = np.isfinite(y)
    largest = np.max(np.abs(y[finite]), initial=0.0)
    close = np.abs(np.where(finite, x, 0.0) - np.where(finite, y, 0.0)) <= bound * (np.abs(y) + 0.1 * largest) + 1e-6
    return np.where(finite, np.isfinite(x) & close, (x == y) | (np.isnan(x) & np.isnan(y)))
