"""Any options in any kind of call: what the tests of the contract hold fixed is drawn here, too."""

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from pallas_ce import linear_cross_entropy
from tests.pallas_ce.checks import (
    assert_as_accurate_as_rounded_dlogits,
    assert_near_oracle,
    call,
    library_results,
    oracle_results,
    with_gradients,
)
from tests.pallas_ce.problems import STREAMED, WAYS, Problem, narrow_problems, problems, small_scratch


@hypothesis.given(p=narrow_problems(), way=st.sampled_from(STREAMED), divisor=st.none() | st.integers(2, 60))
def test_operands_of_16_bits(p: Problem, way: Any, divisor: int | None) -> None:
    scratch = None if divisor is None else small_scratch(p, divisor)
    assert_as_accurate_as_rounded_dlogits(p, library_results(p, *way, scratch_bytes=scratch), way[1])


def _mapped(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The mean over two examples that are equal."""
    return lambda arrays: jnp.mean(jax.vmap(loss)(jax.tree.map(lambda x: jnp.stack([x, x]), arrays)))


def _scanned(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The mean over two steps that are equal."""

    def mean(arrays: Any) -> Any:
        return jax.lax.scan(lambda total, _: (total + loss(arrays) / 2, None), jnp.zeros((), "float32"), length=2)[0]

    return mean


WITHIN: dict[str, Callable[[Any], Any]] = {
    "alone": lambda loss: loss,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": _mapped,
    "scan": _scanned,
}
HIGHEST = (None, "highest", "float32", jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.F32_F32_F32)


@hypothesis.given(
    p=problems(), way=st.sampled_from([*WAYS, (None, "auto"), (None, "in_forward"), (None, "recompute")]),
    within=st.sampled_from(sorted(WITHIN)), columns=st.none() | st.integers(1, 3), metrics=st.booleans(),
    labels=st.sampled_from([np.int16, np.int32, np.int64]), precision=st.sampled_from(HIGHEST),
)  # fmt: skip
def test_every_kind_of_call(
    p: Problem, way: Any, within: str, columns: int | None, metrics: bool, labels: Any, precision: Any
) -> None:
    """Leading axes, the labels' dtype, transformations, metrics, and names of the precision change no result."""
    leading = p.labels.shape
    if columns is not None and leading[0] % columns == 0:
        leading = (-1, columns)
    shaped = dataclasses.replace(p, labels=p.labels.astype(labels).reshape(leading))
    implementation, backward = way
    options: dict[str, Any] = {"implementation": implementation, "backward": backward, "precision": precision}

    def loss(arrays: Any) -> Any:
        rows = {name: arrays[name].reshape(*shaped.labels.shape, *arrays[name].shape[1:])
                for name in ("hidden", "token_weights") if name in arrays}  # fmt: skip
        found = call(linear_cross_entropy, shaped, arrays | rows, return_metrics=metrics, **options)
        return found[0] if metrics else found

    assert_near_oracle(p, with_gradients(WITHIN[within](loss), p.arrays))


@hypothesis.given(
    p=problems(), way=st.sampled_from(WAYS), frozen=st.sets(st.sampled_from(["hidden", "weight", "bias"]))
)
def test_what_is_not_differentiated_changes_no_other_gradient(p: Problem, way: Any, frozen: set[str]) -> None:
    implementation, backward = way
    trained = {name: x for name, x in p.arrays.items() if name not in frozen}
    hypothesis.assume(trained)

    def loss(arrays: Any) -> Any:
        options = {"implementation": implementation, "backward": backward}
        return call(linear_cross_entropy, p, p.arrays | arrays, **options)

    found, gradients = with_gradients(loss, trained)
    assert gradients.keys() == trained.keys()
    assert_near_oracle(p, (found, oracle_results(p)[1] | gradients))
