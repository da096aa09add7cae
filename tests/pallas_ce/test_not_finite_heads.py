"""NaN and infinities in two heads, in choices among logits and in sampled classes, beside plain JAX on stored ones."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce import linear_distillation, linear_sample, linear_top_k, sampled_softmax_cross_entropy
from pallas_ce.objectives.class_samplers import ClassSample
from tests.pallas_ce.checks import with_gradients
from tests.pallas_ce.streamed import exact_head, two_heads

N, H, V = 6, 4, 23
COUNTS = np.arange(N) % 3 != 1
# A processor makes NaN with a minus sign of inf - inf.
BAD = [np.nan, -np.nan, np.inf, -np.inf]
DIVERGENCES = ["forward_kl", "reverse_kl", "jsd"]


def _two_heads(data: Any) -> dict[str, np.ndarray]:
    """All arrays that a student and a teacher may have, with one number not finite."""
    arrays = two_heads(data.draw(st.integers(0, 99)), N, H, V, teacher_h=H)
    rng = np.random.default_rng(1)
    for side in ("", "teacher_"):
        arrays[side + "bias"] = rng.normal(size=V).astype(np.float32)
        arrays[side + "logit_scale"] = np.array(1.3, np.float32)
    name = data.draw(st.sampled_from(sorted(arrays)))
    place = tuple(data.draw(st.integers(0, size - 1)) for size in arrays[name].shape)
    arrays[name][place] = data.draw(st.sampled_from(BAD))
    return arrays


def _stored_divergence(arrays: Any, divergence: str) -> Any:
    """Of the rows that count, with 0·log 0 = 0."""

    def log_softmax(side: str) -> Any:
        hidden = arrays[side + "hidden"][COUNTS]
        z = arrays[side + "logit_scale"] * (hidden @ arrays[side + "weight"].T + arrays[side + "bias"])
        return jax.nn.log_softmax(z)

    def kl(x: Any, y: Any) -> Any:
        some = ~jnp.isneginf(x)
        return jnp.where(some, jnp.exp(x) * (jnp.where(some, x, 0) - jnp.where(some, y, 0)), 0).sum(1)

    log_p, log_q = log_softmax(""), log_softmax("teacher_")
    if divergence == "jsd":
        log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
        return 0.5 * kl(log_q, log_m) + 0.5 * kl(log_p, log_m)
    return kl(log_q, log_p) if divergence == "forward_kl" else kl(log_p, log_q)


@functools.cache
def _divergences(divergence: Any, implementation: Any, scratch: int | None) -> tuple[Any, Any]:
    """Ours and the stored logits', compiled once, with gradients; of the rows that count."""

    def ours(arrays: Any) -> Any:
        options = {"divergence": divergence, "implementation": implementation, "scratch_bytes": scratch}
        return linear_distillation(**arrays, **options, row_mask=COUNTS, reduction="none")[COUNTS]

    return _with_gradients(ours), _with_gradients(functools.partial(_stored_divergence, divergence=divergence))


def _with_gradients(function: Any) -> Any:
    return jax.jit(jax.grad(lambda *given: (lambda x: (x.sum(), x))(function(*given)), has_aux=True))


@pytest.mark.parametrize(("implementation", "scratch"), [("xla", None), ("xla", 700), ("reference", None)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_a_divergence_and_its_gradients_are_finite_where_those_of_stored_logits_are(
    divergence: Any, implementation: Any, scratch: int | None, data: Any
) -> None:
    arrays = _two_heads(data)
    given = {name: np.where(COUNTS[:, None], x, np.nan) if "hidden" in name else x for name, x in arrays.items()}
    ours, stored = _divergences(divergence, implementation, scratch)
    (gradients, found), (plain, want) = ours(given), stored(arrays)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    good = np.isfinite(want)
    np.testing.assert_allclose(np.asarray(found)[good], np.asarray(want)[good], rtol=1e-4, atol=1e-5)
    if np.isfinite(arrays["logit_scale"]):  # which all gradients of hidden states are multiplied by
        assert np.all(np.asarray(gradients["hidden"])[~COUNTS] == 0)
    # By contract the gradient of an infinite divergence is 0, and a bias of -inf has no part in the scale's.
    if np.isinf(want).any() or np.isneginf(arrays["bias"]).any():
        return
    for name in ("weight", "bias", "logit_scale"):
        assert np.isfinite(gradients[name]).all() == np.isfinite(plain[name]).all(), name
    rows = [np.isfinite(g["hidden"]).all(1)[COUNTS] for g in (gradients, plain)]
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("side", ["hidden", "teacher_hidden"])
def test_a_row_with_a_nan_is_nan_in_every_gradient_and_the_others_are_what_they_were(
    divergence: Any, implementation: Any, side: str
) -> None:
    """Also where the student's probability is 0, and 0·NaN might be selected away."""
    arrays = two_heads(0, N, H, V, teacher_h=H)
    arrays["weight"][5] = 0
    closed = {"bias": np.where(np.arange(V) == 5, -np.inf, 0).astype(np.float32)}
    closed = closed if divergence == "reverse_kl" else {"bias": np.zeros(V, np.float32)}

    def loss(arrays: Any) -> Any:
        return linear_distillation(**arrays, divergence=divergence, implementation=implementation, reduction="none")

    want, right = with_gradients(loss, arrays | closed)
    arrays[side][3, 2] = np.nan
    found, gradients = with_gradients(loss, arrays | closed)
    others = np.arange(N) != 3
    assert np.isnan(found[3])
    assert all(np.isnan(gradients[name]).all() for name in ("weight", "bias"))
    assert np.isnan(gradients["hidden"][3]).all()
    np.testing.assert_allclose(found[others], want[others], rtol=1e-6)
    np.testing.assert_allclose(gradients["hidden"][others], right["hidden"][others], rtol=1e-5, atol=1e-7)


def _one_head(data: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A head of small whole numbers, which has up to two that are not finite, and its logits."""
    arrays = exact_head(data.draw(st.integers(0, 99)), N, H, V)
    for _ in range(2):
        name = data.draw(st.sampled_from(sorted(arrays)))
        place = tuple(data.draw(st.integers(0, size - 1)) for size in arrays[name].shape)
        arrays[name][place] = data.draw(st.sampled_from([*BAD, 1.0]))
    with np.errstate(invalid="ignore"):
        return arrays, arrays["hidden"] @ arrays["weight"].T + arrays["bias"]


def _in_order(z: np.ndarray) -> np.ndarray:
    """Places of rows in descending order, equal ones in ascending order, and NaN first."""
    places = np.broadcast_to(np.arange(z.shape[1]), z.shape)
    return np.lexsort((places, np.where(np.isnan(z), 0, -z), ~np.isnan(z)))


@functools.cache
def _largest(k: int, scratch: int | None) -> Any:
    return jax.jit(lambda arrays: linear_top_k(**arrays, k=k, row_mask=COUNTS, scratch_bytes=scratch))


@pytest.mark.parametrize(("k", "scratch"), [(1, None), (5, 180), (V, None)])
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_the_k_largest_begin_with_nan(k: int, scratch: int | None, data: Any) -> None:
    arrays, z = _one_head(data)
    found = jax.tree.map(np.asarray, _largest(k, scratch)(arrays))
    ids = _in_order(z)[:, :k]
    np.testing.assert_array_equal(found.ids, np.where(COUNTS[:, None], ids, -1))
    np.testing.assert_array_equal(found.logits, np.where(COUNTS[:, None], np.take_along_axis(z, ids, 1), 0))
    log_p = np.take_along_axis(np.asarray(jax.nn.log_softmax(z)), ids, 1)
    np.testing.assert_array_equal(np.isfinite(found.log_probs), np.isfinite(np.where(COUNTS[:, None], log_p, 0)))
    assert np.isnan(found.log_probs[np.isnan(z).any(1) & COUNTS]).all()
    assert np.isnan(found.log_probs[np.isposinf(found.logits)]).all()


LIMITS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": np.linspace(0, 2, N).astype(np.float32), "scratch_bytes": 700},
    {"top_p": 0.9}, {"top_p": 1.0, "scratch_bytes": 700}, {"min_p": 0.2, "scratch_bytes": 1500}, {"min_p": 0.0},
    {"top_p": 0.5, "min_p": 0.1, "scratch_bytes": 1500}, {"top_k": 4, "top_p": 0.9}, {"top_k": 4, "min_p": 0.3},
    {"top_k": 4, "min_p": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: " ".join(limits) or "no limit")
def test_a_sample_is_the_first_nan_or_else_the_first_infinite_logit(limits: dict[str, Any]) -> None:
    key = jax.random.key(3)
    sample = jax.jit(lambda arrays: linear_sample(key, **arrays, row_mask=COUNTS, **limits))

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(data=st.data())
    def holds(data: Any) -> None:
        arrays, z = _one_head(data)
        ids, log_probs = (np.asarray(x) for x in sample(arrays))
        nan, infinite = np.isnan(z), np.isposinf(z)
        first = np.where(nan.any(1), nan.argmax(1), infinite.argmax(1))
        sure = (nan.any(1) | infinite.any(1)) & COUNTS
        np.testing.assert_array_equal(ids[sure], first[sure])
        assert np.isnan(log_probs[sure]).all()
        # A row of -inf only has no distribution.
        assert np.isfinite(log_probs[~sure & ~np.isneginf(z).all(1)]).all()
        assert np.all(ids[~COUNTS] == -1)

    holds()


def _first_classes(key: Any, num_samples: int, vocab_size: int) -> ClassSample:
    return ClassSample(jnp.arange(2, 2 + num_samples), jnp.zeros(vocab_size))


LABELS = np.array([9, -100, 3, 20, -100, 9])
COUNTED = LABELS >= 0
# Those that are sampled, and the labels.
READ = np.isin(np.arange(V), [2, 3, 4, 5, 6, 9, 20])


def _stored_sampled_softmax(arrays: Any) -> Any:
    """Of the rows that count."""
    z = arrays["logit_scale"] * (arrays["hidden"][COUNTED] @ arrays["weight"].T + arrays["bias"])
    own = np.arange(V)[None, :] == LABELS[COUNTED][:, None]
    sampled = (np.arange(V) >= 2) & (np.arange(V) < 7)
    return jax.nn.logsumexp(jnp.where(own | sampled, z, -jnp.inf), axis=1) - jnp.where(own, z, 0).sum(1)


@functools.cache
def _sampled_softmaxes(implementation: Any) -> tuple[Any, Any]:
    def ours(arrays: Any) -> Any:
        hidden = jnp.where(COUNTED[:, None], arrays["hidden"], jnp.nan)
        return sampled_softmax_cross_entropy(
            **(arrays | {"hidden": hidden}), labels=LABELS, key=jax.random.key(0), num_samples=5,
            sampler=_first_classes, reduction="none", implementation=implementation,
        )[COUNTED]  # fmt: skip

    return _with_gradients(ours), _with_gradients(_stored_sampled_softmax)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_a_sampled_softmax_is_finite_where_that_of_its_stored_logits_is(implementation: Any, data: Any) -> None:
    """Of classes that are neither sampled nor a counted row's label nothing is read, class 0 included."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes: dict[str, tuple[int, ...]] = {"hidden": (N, H), "weight": (V, H), "bias": (V,), "logit_scale": ()}
    arrays = {name: np.array(rng.normal(size=shape), np.float32) for name, shape in shapes.items()}
    name = data.draw(st.sampled_from(sorted(arrays)))
    place = tuple(data.draw(st.integers(0, size - 1)) for size in arrays[name].shape)
    arrays[name][place] = data.draw(st.sampled_from(BAD))
    ours, stored = _sampled_softmaxes(implementation)
    (gradients, found), (_, want) = ours(arrays), stored(arrays)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
    unread = (name in ("weight", "bias") and not READ[place[0]]) or (name == "hidden" and not COUNTED[place[0]])
    if unread:
        assert all(np.isfinite(g).all() for g in gradients.values())
    bad = np.isnan(want)
    spoilt = np.isnan(np.asarray(gradients["hidden"])[COUNTED]).any(1)
    np.testing.assert_array_equal(spoilt[bad], True)
    assert np.isnan(gradients["weight"]).any() or not bad.any()
