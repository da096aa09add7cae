"""`linear_log_probs`: what it returns; and over a support, against a softmax of the kept logits in float64."""

import copy
import importlib.util
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_ce import linear_log_probs
from tests.pallas_ce import oracle
from tests.pallas_ce.checks import assert_close, call, with_gradients
from tests.pallas_ce.problems import Problem, problems
from tests.pallas_ce.streamed import no_stored_logits

H200 = AbstractDevice("NVIDIA H200", 132, platform="cuda")
HIDDEN, WEIGHT = jnp.arange(12.0).reshape(4, 3) / 7, jnp.sin(jnp.arange(15.0)).reshape(5, 3)


def asked(*given: Any, **options: Any) -> Any:
    everything = {"return_entropy": True, "return_sum_sq_probs": True, "return_hit": True}
    return linear_log_probs(*given, **everything, **options)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@hypothesis.given(p=problems(scaled=True), kept=st.integers(1, 9), seed=st.integers(0, 2**31), by_row=st.booleans())
def test_it_is_the_softmax_of_the_kept_logits(
    p: Problem, kept: int, seed: int, by_row: bool, implementation: str
) -> None:
    p.options = {name: x for name, x in p.options.items() if name in ("vocab_size", "logit_softcap")}
    p.arrays.pop("token_weights", None)
    n, v = p.labels.shape[0], p.options.get("vocab_size", p.arrays["weight"].shape[0])
    rng = np.random.default_rng(seed)
    support = rng.integers(-2, v + 2, size=(n, kept))
    has = rng.random(n) < 0.7
    support[has, rng.integers(kept, size=n)[has]] = p.labels[has]
    temperature = rng.uniform(0.5, 2, size=n).astype(np.float32) if by_row else 1.3
    logits = oracle.Logits(p.arrays, **p.options, temperature=temperature)

    counts = (p.labels >= 0) & (p.labels < v)
    inside = np.any(np.arange(v) == support[..., None], axis=1) & counts[:, None]
    in_support = (inside & (np.arange(v) == p.labels[:, None])).any(1)
    total = np.where(inside, logits.p, 0.0).sum(1)
    log_total = np.log(np.where(total == 0, 1.0, total))[:, None]
    among = copy.copy(logits)
    among.lse, among.log_p = logits.lse + log_total[:, 0], np.where(inside, logits.log_p - log_total, 0.0)
    among.p = np.where(inside, np.exp(among.log_p), 0.0)
    values, slopes = oracle.statistics(among, p.labels)
    names = ("log_prob", "entropy", "sum_sq_probs")
    cotangents = {name: rng.normal(size=n).astype(np.float32) for name in names}
    cotangents["log_prob"] *= in_support

    def of_support(found: Any) -> Any:
        return jnp.where(found.in_support, found.log_probs, 0.0), found.entropy, found.sum_sq_probs

    def weighted(found: Any) -> Any:
        return sum(jnp.sum(x * g) for x, g in zip(of_support(found), cotangents.values(), strict=True))

    options = {"support": support, "temperature": temperature, "implementation": implementation}
    found, got = with_gradients(lambda x: call(asked, p, x, **options), p.arrays, weighted)
    np.testing.assert_array_equal(found.in_support, in_support)
    np.testing.assert_array_equal(found.log_probs[~in_support], np.where(counts, -np.inf, 0.0)[~in_support])
    values["log_prob"] *= in_support
    assert_close(of_support(found), tuple(values[name] for name in names), 1e-5, floor=5e-6)
    largest = np.where(inside, logits.z, -np.inf).argmax(1)
    np.testing.assert_array_equal(found.hit, in_support & (largest == p.labels))
    assert_close(got, logits.gradients(oracle.pull_back(slopes, cotangents)), 1e-5, floor=1e-5)


def test_a_support_belongs_to_its_label_when_that_is_shifted() -> None:
    labels = jnp.array([3, 1, 2, 4])
    support = labels[:, None] + jnp.array([[0, -1]])
    shifted = asked(HIDDEN, WEIGHT, labels, support=support, shift=1)
    want = asked(HIDDEN[:3], WEIGHT, labels[1:], support=support[1:])
    for x, y in zip(shifted, want, strict=True):
        np.testing.assert_array_equal(x[:3], y)
        assert not x[3]


def test_nan_of_a_kept_logit_is_seen_and_of_others_is_not() -> None:
    weight, labels = WEIGHT.at[2].set(jnp.nan), jnp.array([0, 1, 3, 4])
    support = jnp.stack([labels, jnp.array([2, 3, 2, -1])], axis=1)
    found = asked(HIDDEN, weight, labels, support=support)
    for values in found[:3]:
        np.testing.assert_array_equal(np.isnan(values), [True, False, True, False])


def test_only_what_is_asked_for_is_returned() -> None:
    """And 0 of a label that is ignored."""
    labels = jnp.array([0, 1, -100, 4])
    plain = linear_log_probs(HIDDEN, WEIGHT, labels)
    assert plain.shape == (4,)
    assert plain.dtype == jnp.float32
    found = linear_log_probs(HIDDEN, WEIGHT, labels, return_hit=True)
    np.testing.assert_array_equal(found.log_probs, plain)
    np.testing.assert_array_equal(found.hit, labels == jnp.argmax(HIDDEN @ WEIGHT.T, axis=1))
    assert found.entropy is None
    assert found.sum_sq_probs is None
    np.testing.assert_array_equal(linear_log_probs(HIDDEN, WEIGHT, labels, ignore_index=1), plain.at[1].set(0.0))


@pytest.mark.parametrize("support", [False, True])
def test_no_array_of_rows_times_vocabulary(support: bool) -> None:
    n, v, k = 512, 4096, 64

    def total(hidden: Any, weight: Any, ids: Any) -> Any:
        given = {"labels": ids[:, 0], "support": ids} if support else {"labels": ids}
        found = linear_log_probs(hidden, weight, **given, return_entropy=True, scratch_bytes=2**20)
        return jnp.sum(found.log_probs**2) + jnp.sum(found.entropy)

    # The budget, hidden's float32 gradient, and a few numbers for each id: fewer than K.
    limit = 2**20 + 4 * n * 64 + 48 * n * k
    shapes = ((n, 64), jnp.bfloat16), ((v, 64), jnp.bfloat16), ((n, k), jnp.int32)
    no_stored_logits(jax.grad(total, (0, 1)), n, v, limit, *shapes)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu", "triton"])
def test_the_gradients_work_grows_by_ids_and_not_by_pairs_of_them(implementation: str) -> None:
    if implementation == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("needs the triton extra")

    def total(hidden: Any, weight: Any, support: Any) -> Any:
        options: Any = {"support": support, "implementation": implementation}
        return linear_log_probs(hidden, weight, support[:, 0], **options).log_probs.sum()

    def elements(jaxpr: Any) -> int:
        """Of all results, as often as a loop makes them; kernels' bodies apart."""
        count = 0
        for equation in jaxpr.eqns:
            inner = [] if equation.primitive.name == "pallas_call" else jex.jaxprs_in_params(equation.params)
            count += equation.params.get("length", 1) * sum(map(elements, inner))
            count += sum(math.prod(x.aval.shape) for x in equation.outvars)
        return count

    def work(k: int) -> int:
        shapes = ((256, 64), jnp.bfloat16), ((4096, 64), jnp.bfloat16), ((256, k), jnp.int32)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=H200)):
            traced = jax.jit(jax.grad(total, (0, 1))).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        return elements(traced.jaxpr.jaxpr)

    assert work(1024) - work(512) <= 2.2 * (work(512) - work(256))
