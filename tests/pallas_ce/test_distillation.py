"""`linear_distillation` against the definitions in float64."""

import functools
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_ce import linear_distillation
from pallas_ce.api.integration import distillation_of_parts_steps
from tests.pallas_ce import oracle, plain
from tests.pallas_ce.checks import assert_close, relative_error, with_gradients
from tests.pallas_ce.streamed import assert_distills, log_softmax, stored_divergence, two_heads

DIVERGENCES = ["forward_kl", "reverse_kl", "jsd"]
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@hypothesis.given(data=st.data())
def test_value_and_gradients_match_the_definition_in_float64(data: Any, implementation: Any) -> None:
    n, h, v = (data.draw(st.integers(1, top)) for top in (20, 9, 90))
    arrays = two_heads(data.draw(st.integers(0, 99)), n, h, v, data.draw(st.sampled_from([0.1, 1.0, 5.0])))
    rng = np.random.default_rng(1)
    options: dict[str, Any] = {}
    for side in ("", "teacher_"):
        if data.draw(st.booleans()):
            arrays[side + "bias"] = rng.normal(size=v).astype(np.float32)
        if data.draw(st.booleans()):
            arrays[side + "logit_scale"] = np.float32(1.3)
        if data.draw(st.booleans()):
            options[side + "logit_softcap"] = 3.0
    if data.draw(st.booleans()):
        options["vocab_size"] = data.draw(st.integers(1, v))
    divergence, beta = data.draw(st.sampled_from(DIVERGENCES)), data.draw(st.sampled_from([0.1, 0.5, 0.9]))
    temperature = data.draw(st.sampled_from([1.0, 2.5, np.linspace(0.5, 3, n).astype(np.float32)]))
    weights = rng.uniform(0.2, 2, size=n).astype(np.float32)
    reduction = data.draw(st.sampled_from(["mean", "none"]))
    cotangent = rng.normal(size=n) if reduction == "none" else np.ones(())
    labels = np.where(rng.random(n) < 0.3, -100, 0)
    labels[0] = 0
    mask = np.where(np.arange(n) % 4 == 3, False, True)
    counts = mask & (labels == 0)
    axes = {"vocab_axis": data.draw(st.sampled_from([0, 1])), "teacher_vocab_axis": data.draw(st.sampled_from([0, 1]))}
    least = {"xla": 24 + (4 + 8) * 2 * (h + 7), "triton": 20_000}.get(implementation, 0)
    scratch = None if implementation == "reference" else data.draw(st.sampled_from([None, least, 10 * least]))

    def ours(given: dict[str, Any]) -> Any:
        given = dict(given)
        for side, name in (("", "vocab_axis"), ("teacher_", "teacher_vocab_axis")):
            given[side + "weight"] = given[side + "weight"] if axes[name] == 0 else given[side + "weight"].T
        return linear_distillation(
            labels=labels, row_mask=mask, divergence=divergence, beta=beta, temperature=temperature,
            reduction=reduction, implementation=implementation, scratch_bytes=scratch, **axes, **options, **given,
        )  # fmt: skip

    def theirs(given: dict[str, Any]) -> Any:
        w = jnp.where(counts, given["token_weights"], 0)
        rows = w * stored_divergence(given, divergence, beta, temperature, options)
        return rows if reduction == "none" else rows.sum() / w.sum()

    assert_distills(ours, theirs, arrays | {"token_weights": weights}, cotangent)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla"])
@hypothesis.given(data=st.data())
def test_parts_that_processes_hold_match_the_definition_in_float64(data: Any, implementation: Any) -> None:
    n, v = data.draw(st.integers(0, 12)), data.draw(st.integers(3, 60))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, v - 1), max_size=3))), v]
    arrays = two_heads(data.draw(st.integers(0, 99)), n, 5, v, data.draw(st.sampled_from([0.1, 1.0, 5.0])))
    bias = np.zeros((2, v), np.float32)
    if data.draw(st.booleans()):  # the teacher closes columns, perhaps a whole part of them
        bias[1, : data.draw(st.integers(0, v - 1))] = -1e4
    arrays |= {"bias": bias[0], "teacher_bias": bias[1]}
    divergence, beta = data.draw(st.sampled_from(DIVERGENCES)), 0.3
    mask, temperature = np.arange(n) % 4 != 3, np.linspace(0.5, 3, n, dtype=np.float32)
    options: dict[str, Any] = {"divergence": divergence, "beta": beta, "temperature": temperature, "row_mask": mask}
    options |= {"reduction": "none", "logit_softcap": data.draw(st.sampled_from([None, 3.0]))}
    options["implementation"] = implementation
    cotangent = np.random.default_rng(1).normal(size=n) * mask
    of_columns = ("weight", "bias", "teacher_weight", "teacher_bias")
    each = [arrays | {k: arrays[k][a:b] for k in of_columns} for a, b in itertools.pairwise(cuts)]

    compute: Any = distillation_of_parts_steps.compute
    if implementation == "triton":  # which runs in programs only
        compute = jax.jit(compute, static_argnums=0)

    def run(part: dict[str, Any], **known: Any) -> Any:
        return compute(*distillation_of_parts_steps.read(**part, **options, **known))

    def theirs(given: dict[str, Any]) -> Any:
        return jnp.where(mask, stored_divergence(given, divergence, beta, temperature, options), 0)

    def weighted(value: Any) -> Any:
        return jnp.sum(value * cotangent)

    known = {"parts": jnp.stack([run(part) for part in each], axis=1)}
    if divergence == "jsd":
        known["sums"] = sum(run(part, **known) for part in each)
    with jax.enable_x64(True):
        want, gradients = with_gradients(theirs, {k: x.astype(np.float64) for k, x in arrays.items()}, weighted)
    found = [with_gradients(functools.partial(run, **known), part, weighted) for part in each]
    for value, _ in found:
        assert_close(value, want, 1e-5, floor=2e-6)
    together = {k: np.concatenate([gradient[k] for _, gradient in found]) for k in of_columns[:2]}
    together["hidden"] = sum(gradient["hidden"] for _, gradient in found)
    assert_close(together, {k: gradients[k] for k in together}, 1e-5, floor=2e-6)


ENDS = [1e-6, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-6]


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("beta", ENDS)
def test_a_mixture_that_is_almost_one_side_has_relative_accuracy(implementation: Any, beta: float) -> None:
    """Logits are given as they are, so that nothing is rounded before; in float64 log(m) itself is exact enough."""
    n, v = 48, 60
    rng, scale = np.random.default_rng(0), np.geomspace(0.1, 6.0, n)[:, None]
    student, teacher = ((rng.normal(size=(n, v)) * scale).astype(np.float32) for _ in range(2))
    rows = np.eye(n, dtype=np.float32)

    def ours(z: Any) -> Any:
        return linear_distillation(
            rows, z, rows, teacher, vocab_axis=1, divergence="jsd", beta=beta, reduction="none", precision="highest",
            implementation=implementation, scratch_bytes=20_000 if implementation == "xla" else None,
        )  # fmt: skip

    found, gradient = with_gradients(ours, student)
    log_p, log_q = (log_softmax(z) for z in (student, teacher))
    p, q = np.exp(log_p), np.exp(log_q)
    want = oracle.divergence("jsd", beta, p, q)
    over = log_p - np.log(beta * q + (1 - beta) * p)
    slope = (1 - beta) * p * (over - (p * over).sum(1, keepdims=True))
    np.testing.assert_allclose(found, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-5 * np.abs(slope).max())
    assert np.abs(slope).max() < 20 * min(beta, 1 - beta)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_mixture_of_almost_equal_heads_is_never_negative(implementation: Any) -> None:
    p = two_heads(0, 300, 6, 40)
    near = p["weight"] * (1 + 1e-7 * np.arange(40, dtype=np.float32)[:, None])
    found = linear_distillation(
        p["hidden"], near, p["hidden"], p["weight"], divergence="jsd", beta=1e-3, reduction="none",
        implementation=implementation,
    )  # fmt: skip
    assert np.all(np.asarray(found) >= 0)
    assert np.any(np.asarray(found) > 0)


def test_a_teacher_of_another_number_of_entries_is_cut_where_it_is_named() -> None:
    p = two_heads(0, 9, 6, 40)
    cut = {**p, "teacher_weight": p["teacher_weight"][:33]}
    both = {**cut, "weight": p["weight"][:33]}
    np.testing.assert_array_equal(linear_distillation(**cut, vocab_size=33), linear_distillation(**both))


@every_divergence
def test_a_head_against_itself_is_zero_with_zero_gradient(divergence: Any) -> None:
    p = two_heads(0, 9, 6, 40)
    value, gradient = jax.value_and_grad(linear_distillation)(
        p["hidden"], p["weight"], p["hidden"], p["weight"], divergence=divergence, reduction="sum"
    )
    assert 0 <= value < 1e-5
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


@every_divergence
def test_bfloat16_gradients_are_as_accurate_as_materialised_float32_logits(divergence: Any) -> None:
    assert_as_accurate_as_stored(divergence, ml_dtypes.bfloat16, (96, 64, 500), scratch_bytes=300_000)


def assert_as_accurate_as_stored(divergence: Any, dtype: Any, sizes: tuple[int, int, int], **options: Any) -> None:
    """Gradients as of stored float32 logits whose dlogits are rounded; so are a kernel's of 16 bits, or twice as
    accurate as of stored bfloat16 logits, and values are."""
    n, h, v = sizes
    p = {k: x.astype(dtype) for k, x in two_heads(0, n, h, v, teacher_h=h * 3 // 4).items()}
    exact, arrays = {k: x.astype(np.float64) for k, x in p.items()}, jax.tree.map(jnp.asarray, p)
    sides = ("hidden", "weight"), ("teacher_hidden", "teacher_weight")

    def definition(student: Any, teacher: Any) -> Any:
        return plain.divergence(divergence, 0.5, student, teacher, plain.FORMS["logsumexp"])

    with jax.enable_x64(True):
        logits = [exact[a] @ exact[b].T for a, b in sides]
        values, dz = (np.asarray(x) for x in _with_slopes(definition, *logits))
        coarse = [jnp.asarray(z).astype(jnp.bfloat16).astype(float) for z in logits]
        stored = [np.asarray(x) for x in _with_slopes(definition, *coarse)]

    def of_dlogits(dz: Any) -> dict[str, Any]:
        return {"hidden": dz @ exact["weight"] / n, "weight": dz.T @ exact["hidden"] / n}

    def ours(arrays: Any) -> Any:
        rows = linear_distillation(**arrays, divergence=divergence, reduction="none", **options)
        return rows.mean(), rows

    found, each = jax.grad(ours, has_aux=True)(arrays)
    half = 0.5 * np.abs(stored[0] - values).mean()
    assert np.abs(np.asarray(each, float) - values).mean() <= half
    want, rounded, coarse = map(of_dlogits, (dz, dz.astype(dtype).astype(float), stored[1]))
    for name in ("hidden", "weight"):
        assert found[name].dtype == dtype
        rounded_too = rounded[name].astype(dtype)
        bound = max(1.5 * relative_error(rounded_too, want[name]), 0.5 * relative_error(coarse[name], want[name]))
        assert relative_error(found[name], want[name]) <= bound, (divergence, name)


def _with_slopes(definition: Any, student: Any, teacher: Any) -> tuple[Any, Any]:
    values, transposed = jax.vjp(lambda z: definition(z, teacher), student)
    return values, transposed(jnp.ones_like(values))[0]
