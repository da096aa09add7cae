"""Block sizes of the portable backend, by platform: within the budget, and large enough for the chip."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_ce import explain
from pallas_ce.backends import xla_tiling as tiling
from pallas_ce.backends.protocol import Mode
from pallas_ce.backends.xla import BACKEND
from pallas_ce.head import Batch, Head, HeadSpec
from pallas_ce.modes.how import How, decide
from pallas_ce.parallel.shards import Local, RowArrays, Shards
from pallas_ce.streaming.gradient_products import NO_ARRAYS
from tests.pallas_ce.checks import assert_as_accurate_as_rounded_dlogits, assert_near_oracle, library_results
from tests.pallas_ce.problems import make

MODES: list[Mode | None] = [None, "in_forward", "recompute"]
MIB = 2**20


def _on(platform: str) -> Any:
    """Programs are for a device of that platform."""
    device = AbstractDevice("a model", 1, platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


def _spec(hidden_size: int, vocab_size: int, dtype: str = "bfloat16") -> HeadSpec:
    return HeadSpec(hidden_size, vocab_size, vocab_size, 0, np.dtype(jnp.dtype(dtype)), None)


@hypothesis.given(
    platform=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    hidden_size=st.integers(1, 8192),
    vocab_size=st.integers(1, 300_000),
    tokens=st.integers(1, 100_000),
    mode=st.sampled_from(MODES),
    share=st.floats(0, 1),
    spare=st.sampled_from([0, 2**28]),
)
def test_plans_heed_any_budget(
    platform: str,
    dtype: str,
    hidden_size: int,
    vocab_size: int,
    tokens: int,
    mode: Mode | None,
    share: float,
    spare: int,
) -> None:
    spec, backend = _spec(hidden_size, vocab_size, dtype), BACKEND.on(platform)
    least = backend.minimum_scratch(spec, mode)
    limit = int(least * (2**34 / least) ** share)  # from the least to plenty
    plan = backend.plan(spec, tokens, mode, limit, spare)
    assert plan == backend.plan(spec, tokens, mode, limit, spare)
    assert 1 <= plan.rows <= tokens
    assert 1 <= plan.columns <= vocab_size
    assert plan.scratch_bytes <= limit
    tiled = -(-vocab_size // plan.columns) * plan.columns
    beside = spec.accumulator.itemsize * plan.rows * tiled if mode == "in_forward" else 0
    assert plan.rows * plan.columns * spec.dtype.itemsize <= limit
    assert beside <= limit or (beside <= spare and plan.rows < tokens)


def test_few_rows_of_logits_are_rather_made_again() -> None:
    spec, budget = _spec(4096, 131072), 128 * MIB
    for platform, mode in (("cuda", "recompute"), ("cpu", "in_forward")):
        with _on(platform):
            settings = decide(spec, 8192, (), scalar_loss=True, implementation="xla", scratch_bytes=budget)
        assert settings.mode == mode
        assert settings.platform == platform
    assert "the scratch budget holds" in BACKEND.on("cuda").plan(spec, 8192, "in_forward", budget).slower


def test_what_stands_in_for_the_gpus_kernels_is_planned_for_a_cpu() -> None:
    arrays = {"weight": jnp.zeros((8, 4), jnp.bfloat16), "bias": None, "logit_scale": None, "logit_weights": None}
    settings = How("mosaic_gpu", "recompute", None, certain=False)
    rows, head = RowArrays(Batch(jnp.zeros((2, 4))), None), Head(**arrays, spec=_spec(4, 8))
    chosen, elsewhere = settings.variants(Local(Shards(), rows, head, NO_ARRAYS))
    assert (chosen.implementation, chosen.platform) == ("mosaic_gpu", None)
    assert (elsewhere.implementation, elsewhere.platform) == ("xla", "cpu")


def test_explain_knows_the_platform_of_a_mesh() -> None:
    hidden, weight = (jax.ShapeDtypeStruct((n, 512), jnp.bfloat16) for n in (8192, 65536))
    with _on("tpu"):
        there = explain(hidden, weight, implementation="xla", backward="recompute")
    assert there.rows == 8192
    assert explain(hidden, weight, implementation="xla", backward="recompute").rows == (
        1024 if jax.default_backend() == "cpu" else 8192
    )


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize(
    ("dtype", "tokens", "vocab_size", "scratch_bytes"),
    [
        ("float32", 40, 100, None),  # one block, one tile
        ("float32", 40, 100, 24_000),  # one block, or several; ragged tiles
        ("float32", 64, 64, 16_000),  # even ones
        ("float16", 40, 100, 16_000),  # the factor stands between product and sum
    ],
)
def test_an_accelerators_tiles_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, platform: str, backward: Any, dtype: str, tokens: int, vocab_size: int,
    scratch_bytes: int | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(tiling, "_STEP", 8)
    p = make(0, tokens, 16, vocab_size, scale=4.0)
    p.arrays = {name: x.astype(dtype) for name, x in p.arrays.items()}
    p.arrays["bias"] = np.random.default_rng(0).normal(size=vocab_size).astype(np.float32)
    p.options = {"z_loss": 1e-2}
    with _on(platform):
        found = library_results(p, "xla", backward, scratch_bytes=scratch_bytes)
    if dtype == "float32":
        assert_near_oracle(p, found)
    else:
        assert_as_accurate_as_rounded_dlogits(p, found, backward)
