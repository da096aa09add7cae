"""A NaN or an infinity in one input of a call of `cases.CASES`, beside plain JAX."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.pallas_ce.cases import Case, Sizes, Way
from tests.pallas_ce.plain import FORMS, Arrays

BAD = (np.nan, np.nan, np.inf, -np.inf)  # NaN as often as an infinity
# XLA's maximum of a row on a CPU drops a NaN in some hundred columns or more, and keeps it in a few.
SIZES = {"wide": Sizes(classes=1003, padded=1010, scratch_bytes=None), "tiles": Sizes()}


@functools.cache
def _ours(case: Case, s: Sizes, way: Way) -> Any:
    """Under JAX's strictest rules for dtypes and ranks, under which a program may run."""
    run = _with_gradients(lambda a: case.ours(s, a, *way), case.differentiated)

    def strictly(a: Arrays) -> Any:
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            return run(a)

    return jax.jit(strictly)


@functools.cache
def _plain(case: Case, s: Sizes, reduction: str) -> Any:
    """By each form."""
    forms = [
        _with_gradients(lambda a, form=form: case.plain(s, a, form, reduction), case.differentiated)
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


def _place(s: Sizes, name: str, rng: np.random.Generator) -> tuple[int, ...]:
    """Of an entry: the first, the last, a target's column, one that does not count or one that may be anywhere."""
    shape = s.shape(name)
    found = [int(rng.integers(size)) for size in shape]
    if shape and shape[0] == s.rows:
        found[0] = int(rng.choice([0, 2, s.rows - 2, found[0]]))
    elif shape and shape[0] in (s.padded, s.classes):
        found[0] = int(rng.choice([0, shape[0] - 1, s.classes - 1, s.labels[0], s.labels[3], found[0]]))
    return tuple(found)


def check(
    case: Case, s: Sizes, way: Way, seed: int, only: Iterable[str] = (), put: Callable[..., Any] | None = None
) -> None:
    """Compares the call with plain JAX, for each input with what `seed` draws at a place that it draws.

    Results and gradients have the kinds that plain JAX has, and its values where these are finite. `put(name, array)`
    places an array on devices.
    """
    rng = np.random.default_rng(seed)
    clean = {name: s.array(name) for name in case.inputs}
    for name in only or case.inputs:
        place = _place(s, name, rng)
        bad = rng.choice(BAD[:1] if name in case.finite else (np.nan, -np.inf) if name in case.below else BAD)
        arrays = clean | {name: np.array(clean[name])}
        arrays[name][place] = bad
        given = arrays if put is None else {name: put(name, x) for name, x in arrays.items()}
        got = jax.tree.map(np.asarray, _ours(case, s, way)(given))
        wants = jax.tree.map(np.asarray, _plain(case, s, "mean" if way[1] == "in_forward" else "none")(arrays))
        _assert_alike(got, wants, s, arrays, f"{name}{[*place]} = {bad}, {way}", on_a_mesh=put is not None)


def _assert_alike(got: Any, wants: list[Any], s: Sizes, arrays: Arrays, said: str, on_a_mesh: bool) -> None:
    """Each entry is as in one of `wants`."""
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
        if on_a_mesh and x.shape[:1] == (s.padded,):
            fits[s.classes :] |= np.isnan(x[s.classes :])  # a shard's padding has 0 times the hidden states
        if not np.all(fits):
            at = tuple(np.argwhere(~fits)[0])
            raise AssertionError(
                f"{said}: {jax.tree_util.keystr(path)} has {np.sum(~fits)} of {fits.size} entries unlike plain JAX's, "
                f"first {[int(i) for i in at]}: {x[at]}, where that has {[want[index][at] for want in leaves]}"
            )


def _same(x: np.ndarray, y: np.ndarray, bound: float) -> np.ndarray:
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return x == y
    x, y = x.astype(np.float32), y.astype(np.float32)
    finite = np.isfinite(y)
    largest = np.max(np.abs(y[finite]), initial=0.0)
    close = np.abs(np.where(finite, x, 0.0) - np.where(finite, y, 0.0)) <= bound * (np.abs(y) + 0.1 * largest) + 1e-6
    return np.where(finite, np.isfinite(x) & close, (x == y) | (np.isnan(x) & np.isnan(y)))
