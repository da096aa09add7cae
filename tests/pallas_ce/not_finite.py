"""Heads with a number that is not finite, beside plain JAX on materialised logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce import linear_cross_entropy, linear_row_statistics
from pallas_ce.statistics.row import STATISTICS
from tests.pallas_ce.checks import with_gradients

ROWS, WIDTH, VOCABULARY = 12, 16, 200
LABELS = np.arange(ROWS) * 7 % 61
# The first row does not count, and the one behind it does, and has no number of its own that is not finite.
LABELS[0] = -100
PLACES = ("hidden", "weight", "bias", "logit_scale")


def arrays(place: str, value: float, dtype: Any = np.float32) -> dict[str, Any]:
    """A head's arrays, with the value in a row, a target's column, or everywhere."""
    rng = np.random.default_rng(0)
    found = {
        "hidden": rng.normal(size=(ROWS, WIDTH)).astype(dtype),
        "weight": rng.normal(size=(VOCABULARY, WIDTH)).astype(dtype),
        "bias": rng.normal(size=VOCABULARY).astype(np.float32),
        "logit_scale": np.float32(0.7),
    }
    if place == "hidden":
        found["hidden"][3, 5] = value
    elif place == "weight":
        found["weight"][LABELS[4], 2] = value
    elif place == "bias":
        found["bias"][LABELS[4]] = value
    else:
        found["logit_scale"] = np.float32(value)
    found["hidden"][0] = np.nan  # it does not count
    return found


def logits(given: dict[str, Any]) -> jax.Array:
    """Logits `[ROWS, VOCABULARY]` float32; 0 in the row that does not count."""
    hidden = jnp.where((LABELS < 0)[:, None], 0, given["hidden"]).astype(jnp.float32)
    product = jnp.dot(hidden, given["weight"].astype(jnp.float32).T, precision="highest")
    return jnp.where((LABELS < 0)[:, None], 0.0, given["logit_scale"] * (product + given["bias"]))


def plain_loss(given: dict[str, Any]) -> jax.Array:
    """The summed cross entropy, of logits that plain JAX stores."""
    z = logits(given)
    by_row = jax.nn.logsumexp(z, axis=1) - z[jnp.arange(ROWS), np.maximum(LABELS, 0)]
    return jnp.sum(jnp.where(LABELS < 0, 0.0, by_row))


def assert_as_plain_jax(
    place: str, value: float, dtype: Any = np.float32, compiled: Any = jax.jit, **options: Any
) -> None:
    """Each entry of the loss and of each gradient is finite where plain JAX's is.

    But for the gradient of the scale with a bias of -inf, which is as if the entry were not there, and of the row that
    does not count, which is 0 times the scale.
    """
    given = arrays(place, value, dtype)

    def loss(given: dict[str, Any]) -> jax.Array:
        return linear_cross_entropy(**given, labels=LABELS, reduction="sum", **options)

    got, gradients = compiled(jax.value_and_grad(loss))(jax.tree.map(jnp.asarray, given))
    want, right = with_gradients(plain_loss, given)
    assert np.isnan(got) == np.isnan(want)
    assert np.isfinite(got) == np.isfinite(want)
    for name, gradient in gradients.items():
        if (place, value, name) == ("bias", -np.inf, "logit_scale"):
            continue
        if name == "hidden":
            assert place == "logit_scale" or not gradient[0].any()
            gradient, right[name] = gradient[1:], right[name][1:]
        np.testing.assert_array_equal(np.isfinite(gradient), np.isfinite(right[name]), err_msg=name)


def assert_statistics_as_defined(
    place: str, value: float, dtype: Any = np.float32, compiled: Any = jax.jit, **options: Any
) -> None:
    """Checks which statistics of a row are NaN, and which infinite; and the column of its largest logit."""
    given = arrays(place, value, dtype)
    counts, labels = LABELS >= 0, np.maximum(LABELS, 0)

    def statistics(given: dict[str, Any]) -> Any:
        return linear_row_statistics(**given, labels=labels, row_mask=counts, statistics=STATISTICS, **options)

    found, z = compiled(statistics)(jax.tree.map(jnp.asarray, given)), logits(given)
    lse, at, p = jax.nn.logsumexp(z, axis=1), z[jnp.arange(ROWS), labels], jax.nn.softmax(z)
    with np.errstate(invalid="ignore"):
        uncertain = jnp.isnan(p).any(axis=1)  # of logits of +inf, too
    nan = np.where(uncertain, np.nan, 0.0)
    want = {"lse": lse, "target_logit": at, "log_prob": at - lse, "mean_logit": z.mean(1), "max_logit": z.max(1)}
    want |= dict.fromkeys(("entropy", "expected_logit", "sum_sq_probs", "varentropy"), nan)
    np.testing.assert_array_equal(found.argmax[counts], jnp.argmax(z, axis=1)[counts])
    for name, right in want.items():
        got, right = np.asarray(getattr(found, name)), np.asarray(right)
        np.testing.assert_array_equal(np.isnan(got[counts]), np.isnan(right[counts]), err_msg=name)
        if name in ("lse", "target_logit", "log_prob", "max_logit"):
            np.testing.assert_array_equal(np.isinf(got[counts]), np.isinf(right[counts]), err_msg=name)
