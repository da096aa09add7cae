"""`shift`: the loss of sliced hidden states and labels, without slices; and where it is refused."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_cross_entropy, linear_log_probs, linear_loss
from tests.pallas_ce.checks import assert_close, with_gradients

H, V = 5, 17


def _focal(statistics: Any, power: Any) -> Any:
    log_p = jnp.sum(jnp.atleast_2d(statistics.log_prob.T), axis=0)
    return -power * log_p * jnp.exp(log_p)


def _loss(x: Any, labels: Any, by_row: Any, **options: Any) -> Any:
    return linear_cross_entropy(**x, labels=labels, label_smoothing=0.1, z_loss=1e-2, **options)


def _row_loss(x: Any, labels: Any, by_row: Any, **options: Any) -> Any:
    head = {**x, **options, "temperature": 1 + by_row}
    return linear_loss(_focal, head.pop("hidden"), head.pop("weight"), labels, by_row, **head)


def _log_probs(x: Any, labels: Any, by_row: Any, *, reduction: str, **options: Any) -> Any:
    found = linear_log_probs(**x, labels=labels, temperature=1 + by_row, return_entropy=True, **options)
    if reduction == "none":
        several = tuple(range(found.entropy.ndim, found.log_probs.ndim))
        return jnp.sum(found.log_probs, axis=several) + found.entropy
    return jnp.sum(found.log_probs) + jnp.sum(jnp.sin(found.entropy))


FUNCTIONS = {"cross_entropy": _loss, "loss": _row_loss, "log_probs": _log_probs}


@pytest.mark.parametrize("name", FUNCTIONS)
@hypothesis.given(data=st.data())
def test_it_is_the_loss_of_slices(name: str, data: Any) -> None:
    """Of values and all gradients; what hidden states without a label hold does not matter."""
    function, draw = FUNCTIONS[name], data.draw
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    leading = (*draw(st.sampled_from([(), (3,)])), length := draw(st.sampled_from([6, 1, 2])))
    shift = draw(st.sampled_from([1, 2, 7]))
    kept = max(length - shift, 0)
    several = name != "cross_entropy" and draw(st.booleans())
    dtype = draw(st.sampled_from([np.int32, np.uint8]))
    labels = rng.integers(0, V + 4, (*leading, *([2] if several else []))).astype(dtype)  # some lie outside
    arrays = {"hidden": rng.normal(size=(*leading, H)), "weight": rng.normal(size=(V, H))}
    if name != "log_probs" and draw(st.booleans()):
        arrays["token_weights"] = rng.uniform(size=leading)
    arrays = {key: np.float32(x) for key, x in arrays.items()}
    by_row = np.float32(rng.uniform(size=leading))
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "ignore_index": draw(st.sampled_from([-100, 3, None])),
        "implementation": draw(st.sampled_from(["reference", "xla"])),
    }
    along = len(leading) - 1
    first, last = ((*[slice(None)] * along, part) for part in (slice(0, kept), slice(length - kept, length)))

    def sliced(x: Any) -> Any:
        places = {"hidden": first, "weight": ..., "token_weights": last}
        values = function({name: y[places[name]] for name, y in x.items()}, labels[last], by_row[first], **options)
        return jnp.pad(values, [(0, 0)] * along + [(0, length - kept)]) if values.ndim else values

    def by_shift(x: Any) -> Any:
        without = (jnp.arange(length) >= kept)[:, None]
        given = x | {"hidden": jnp.where(without, jnp.nan, x["hidden"])}
        return function(given, labels, by_row, shift=shift, **options)

    def squares(values: Any) -> Any:
        return jnp.sum(jnp.sin(values))

    got, want = (with_gradients(way, arrays, squares) for way in (by_shift, sliced))
    assert_close(got, want, 1e-5, floor=1e-6)


def test_labels_of_no_row_are_not_validated() -> None:
    hidden, weight = jnp.ones((2, 3, H)), jnp.ones((V, H))
    labels = np.array([[V, 0, 1], [V, 2, -100]])
    linear_cross_entropy(hidden, weight, labels, shift=1, validate_labels=True)
    linear_log_probs(hidden, weight, labels[..., None], shift=1, validate_labels=True)
    with pytest.raises(ValueError, match=rf"labels\[1, 1\]={V} is neither"):
        linear_cross_entropy(hidden, weight, np.where(labels == 2, V, labels), shift=1, validate_labels=True)


def test_examples_of_a_vmap_are_shifted_each_by_itself() -> None:
    hidden, weight = jax.random.normal(jax.random.key(0), (3, 4, H)), jax.random.normal(jax.random.key(1), (V, H))
    labels = jnp.arange(12).reshape(3, 4)
    each = jax.vmap(lambda h, t: linear_cross_entropy(h, weight, t, shift=1, reduction="none"))(hidden, labels)
    whole = linear_cross_entropy(hidden, weight, labels, shift=1, reduction="none")
    np.testing.assert_allclose(each, whole, rtol=1e-6)
