"""What implementation="triton" does not serve, and what it tells."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_ce import cross_entropy, linear_cross_entropy, linear_distillation
from pallas_ce import linear_top_k as top_k
from pallas_ce.backends import device
from pallas_ce.backends.triton import BACKEND, binding, configs
from pallas_ce.head import HeadSpec
from pallas_ce.statistics.table import FIELDS, Coefficients

pytest.importorskip("triton", reason="needs the triton extra")

HIDDEN, WEIGHT, LABELS = jnp.ones((4, 8)), jnp.ones((6, 8)), jnp.zeros(4, int)
NAMED: Any = {"implementation": "triton"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is taken to have an H200, with which nothing can be run."""
    monkeypatch.setattr(device, "local_cuda", lambda: "NVIDIA H200")


def test_a_process_without_a_gpu_is_told() -> None:
    with pytest.raises(ValueError, match="kernels are for CUDA devices, and this process has none; use 'xla'"):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **NAMED)


@pytest.mark.usefixtures("hopper")
def test_float64_and_other_precisions_are_refused() -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="not float64; use 'xla'"):
        linear_cross_entropy(jnp.ones((4, 8), jnp.float64), WEIGHT, LABELS, dtype=jnp.float64, **NAMED)
    with pytest.raises(ValueError, match=r"does not multiply float32 operands as precision=.*BF16_BF16_F32; use 'xla'"):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, precision="BF16_BF16_F32", **NAMED)


@pytest.mark.usefixtures("hopper")
def test_either_of_two_heads_may_be_refused() -> None:
    heads: Any = (HIDDEN, WEIGHT, HIDDEN, WEIGHT)
    with jax.enable_x64(True), pytest.raises(ValueError, match="not float64; use 'xla'"):
        linear_distillation(*heads[:2], *(x.astype(jnp.float64) for x in heads[2:]), **NAMED)
    with pytest.raises(ValueError, match=r"scratch_bytes=900 is less than the \d+ bytes of one row; use 'xla'"):
        linear_distillation(*heads, scratch_bytes=900, **NAMED)
    with pytest.raises(ValueError, match="'mosaic_gpu' does not serve distillation; choose from 'triton', 'xla'"):
        linear_distillation(*heads, implementation="mosaic_gpu")  # type: ignore[arg-type]


@pytest.mark.usefixtures("hopper")
def test_what_has_no_kernel_of_its_own_is_not_done_by_another_under_its_name() -> None:
    with pytest.raises(ValueError, match="'triton' has no top-k: use 'xla'"):
        jax.eval_shape(lambda *arrays: top_k(*arrays, k=2, **NAMED), HIDDEN, WEIGHT)
    with pytest.raises(ValueError, match="'triton' does not serve materialized logits"):
        cross_entropy(HIDDEN, LABELS, **NAMED)


def test_the_kernel_has_every_field_and_term_of_the_table() -> None:
    """But for single entries."""
    assert {*FIELDS, *Coefficients._fields} - {"target_logit", "target", "sum_weights"} <= {
        *binding._function("head_kernel").arg_names
    }


@pytest.mark.parametrize(("inputs", "outputs"), [({"news": LABELS}, {}), ({}, {"news": LABELS})])
def test_a_field_or_term_that_the_kernel_does_not_translate_is_refused(inputs: Any, outputs: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"nothing for \['news'\] in its kernel: use 'xla'"):
        binding.call("head_kernel", inputs, outputs, {}, configs.Config(64, 64, 32), 1)


@pytest.mark.parametrize("mode", [None, "recompute", "in_forward"])
@pytest.mark.parametrize(("vocabulary", "rank"), [(7, 0), (1000, 0), (50257, 0), (50257, 8)])
def test_a_plan_stays_within_its_budget(vocabulary: int, rank: int, mode: Any) -> None:
    spec = HeadSpec(768, vocabulary, vocabulary, 0, jnp.dtype(jnp.bfloat16), None, rank=rank)
    least = BACKEND.minimum_scratch(spec, mode)
    for budget in (least, 3 * least, max(least, 2**29)):
        for tokens in (1, 100, 9000):
            of_pair = max(budget, BACKEND.pairs.minimum_scratch((spec, spec)))
            pair = BACKEND.pairs.plan((spec, spec), tokens, mode, of_pair)
            for plan, limit in ((BACKEND.plan(spec, tokens, mode, budget), budget), (pair, of_pair)):
                assert 1 <= plan.rows <= tokens
                assert 1 <= plan.columns <= vocabulary
                assert plan.scratch_bytes <= limit
