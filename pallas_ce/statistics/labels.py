"""The label rule: which tokens count, and what stands in for the labels of those that do not."""

import jax
import jax.numpy as jnp
import numpy as np

NO_TARGET = -1


def as_array(labels: np.ndarray | jax.Array) -> jax.Array:
    """Labels as JAX holds them, without wrapping around: host labels beyond 32 bits become `NO_TARGET`."""
    if isinstance(labels, np.ndarray) and labels.dtype.itemsize > 4:
        limits = np.iinfo(np.int32)
        fits = (labels >= limits.min) & (labels <= limits.max)
        labels = np.where(fits, np.where(fits, labels, 0).astype(np.int32), np.int32(NO_TARGET))
    return jnp.asarray(labels)


def canonical(labels: np.ndarray | jax.Array, vocab_size: int) -> jax.Array:
    """int32 labels; whatever lies outside `[0, vocab_size)` becomes `NO_TARGET`.

    They are compared as uint32, which holds every vocabulary: there negative labels are 2³¹ and more. Of 64 bits the
    upper half must be 0. It is read as a word, since without its 64-bit mode JAX cuts off what it converts or compares.
    """
    labels = as_array(labels)
    if labels.dtype.itemsize > 4:
        words = jax.lax.bitcast_convert_type(labels, jnp.uint32)
        unsigned = jnp.where(words[..., 1] == 0, words[..., 0], np.uint32(2**32 - 1))
    else:
        unsigned = labels.astype(jnp.uint32)
    return jnp.where(unsigned < np.uint32(vocab_size), unsigned.astype(jnp.int32), NO_TARGET)


def counted(ids: jax.Array, ignore_index: int | None) -> jax.Array:
    """Bool, the shape of `canonical` labels: in the vocabulary and not `ignore_index`, which may lie inside it."""
    inside = ids != NO_TARGET
    return inside & (ids != ignore_index) if ignore_index is not None and 0 <= ignore_index < 2**31 else inside


def targets(ids: jax.Array, ignore_index: int | None, row_axes: int) -> tuple[jax.Array, jax.Array]:
    """`canonical` labels `[...]` or `[..., K]` with `NO_TARGET` for those that do not count, and the rows that do.

    A row with K labels counts where one of them does.
    """
    counts = counted(ids, ignore_index)
    return jnp.where(counts, ids, NO_TARGET), counts if ids.ndim == row_axes else jnp.any(counts, axis=-1)


def repeated(ids: jax.Array) -> jax.Array:
    """Bool: which of sorted ids `[..., K]` equal the one before."""
    return jnp.concatenate([jnp.zeros_like(ids[..., :1], bool), ids[..., 1:] == ids[..., :-1]], axis=-1)


def shifted(values: jax.Array, shift: int, axis: int, fill: int) -> jax.Array:
    """The values `shift` places later along `axis`, and `fill` behind the last."""
    gone = min(shift, values.shape[axis])
    places = [(-gone, gone, 0) if i == axis else (0, 0, 0) for i in range(values.ndim)]
    return jax.lax.pad(values, jnp.asarray(fill, values.dtype), places)


def check(
    labels: np.ndarray | jax.Array,
    ignore_index: int | None,
    vocab_size: int,
    name: str = "labels",
    shift: int = 0,
    axis: int = 0,
) -> None:
    """Raises ValueError naming the first label that is neither `ignore_index` nor in the vocabulary.

    The first `shift` places along `axis` are no row's label.

    Raises:
        TypeError: `labels` is being traced, so that its values cannot be read.
    """
    if isinstance(labels, jax.core.Tracer):
        raise TypeError(
            "validate_labels=True reads the labels' values, which are not known while JAX traces the call: "
            "validate them outside jit, vmap and scan, or pass validate_labels=False, "
            "where labels outside the vocabulary count as ignored"
        )
    values = np.asarray(labels)
    if values.dtype.itemsize < 8:  # 4 bits cannot be compared with what they do not hold
        values = values.astype(np.int64)
    bad = (values < 0) | (values >= vocab_size)
    if ignore_index is not None:
        bad &= values != ignore_index
    if shift:
        np.moveaxis(bad, axis, 0)[:shift] = False
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name}{list(where)}={int(values[where])} is neither in [0, vocab_size={vocab_size}) "
            f"nor ignore_index={ignore_index}"
        )
