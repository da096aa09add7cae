"""What implementation="triton" does not serve, and what it tells."""

import dataclasses
import functools
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_ce import cross_entropy, explain, linear_cross_entropy, linear_distillation
from pallas_ce import linear_top_k as top_k
from pallas_ce.backends import device
from pallas_ce.backends.triton import BACKEND, binding, configs
from pallas_ce.head import HeadSpec
from pallas_ce.statistics.table import FIELDS, Coefficients
from tests import compile_for_h200 as h200

pytest.importorskip("triton", reason="needs the triton extra")

HIDDEN, WEIGHT, LABELS = jnp.ones((4, 8)), jnp.ones((6, 8)), jnp.zeros(4, int)
NAMED: Any = {"implementation": "triton"}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is taken to have an H200, with which nothing can be run."""
    monkeypatch.setattr(device, "local_cuda", lambda: "NVIDIA H200")


def test_a_process_without_a_gpu_is_told() -> None:
    with pytest.raises(ValueError, match="compiled for a CUDA device, and this process knows of none; use 'xla'"):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **NAMED)


def test_an_architecture_without_tiles_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "capability", lambda: 75)
    with pytest.raises(ValueError, match=r"tiles for compute capability 8\.0, 8\.6, .* device is of 7\.5; use 'xla'"):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **NAMED)


@pytest.mark.usefixtures("hopper")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("it needs the package triton: pip install 'triton>=3.6,<3.10'")):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **NAMED)


@pytest.mark.usefixtures("hopper")
def test_float64_and_other_precisions_are_refused() -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="not float64; use 'xla'"):
        linear_cross_entropy(jnp.ones((4, 8), jnp.float64), WEIGHT, LABELS, dtype=jnp.float64, **NAMED)
    with pytest.raises(ValueError, match=r"does not multiply float32 operands as precision=.*BF16_BF16_F32; use 'xla'"):
        linear_cross_entropy(HIDDEN, WEIGHT, LABELS, precision="BF16_BF16_F32", **NAMED)


@pytest.mark.usefixtures("hopper")
def test_what_has_no_kernel_of_its_own_is_not_done_by_another_under_its_name() -> None:
    with pytest.raises(ValueError, match="'triton' has no top-k: use 'xla'"):
        jax.eval_shape(lambda *arrays: top_k(*arrays, k=2, **NAMED), HIDDEN, WEIGHT)
    with pytest.raises(ValueError, match="'triton' does not serve distillation yet"):
        linear_distillation(HIDDEN, WEIGHT, HIDDEN, WEIGHT, **NAMED)
    with pytest.raises(ValueError, match="'triton' does not serve materialized logits"):
        cross_entropy(HIDDEN, LABELS, **NAMED)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_explain_tells_the_tiles(backward: Any) -> None:
    shapes = (jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((32768, 1024), jnp.bfloat16))
    told = str(explain(*shapes, backward=backward, **NAMED))
    assert re.search("head_kernel: tiles of .* x ", told)


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
            plan = BACKEND.plan(spec, tokens, mode, budget)
            assert 1 <= plan.rows <= tokens
            assert 1 <= plan.columns <= vocabulary
            assert plan.scratch_bytes <= budget


@pytest.mark.parametrize("mode", [None, "in_forward", "recompute"])
def test_a_low_rank_term_takes_no_rows_off_a_block_to_speak_of(mode: Any) -> None:
    plain = HeadSpec(4096, 131072, 131072, 0, jnp.dtype(jnp.bfloat16), None)
    found = [BACKEND.plan(spec, 8192, mode, 2**29) for spec in (plain, dataclasses.replace(plain, rank=16))]
    assert found[1].rows * found[1].columns >= 0.95 * found[0].rows * found[0].columns


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("vocabulary", [32768, 262144])
@pytest.mark.parametrize("tokens", [1024, 8192, 32768])
def test_the_forward_keeps_little_of_each_row(tokens: int, vocabulary: int) -> None:
    given = [((tokens, 4096), jnp.bfloat16), ((vocabulary, 4096), jnp.bfloat16), ((tokens,), jnp.int32)]
    mesh = h200.h200_mesh()
    run = functools.partial(linear_cross_entropy, implementation="triton")
    program, _ = h200.compile_for_h200(run, *(h200.shaped(mesh, *x) for x in given))
    assert program.memory_analysis().temp_size_in_bytes <= 40 * 2**20


@pytest.mark.parametrize("vocabulary", [32768, 65536, 131072, 262144])
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_parts_of_the_vocabulary_fill_the_multiprocessors(tokens: int, vocabulary: int) -> None:
    spec = HeadSpec(4096, vocabulary, vocabulary, 0, jnp.dtype(jnp.bfloat16), None)
    plan = BACKEND.plan(spec, tokens, "recompute", min(2**29, 4 * tokens * vocabulary))
    tile, at_once = configs.config_for(spec, None, "dlogits"), device.multiprocessors()
    rows, columns, parts = tokens // tile.rows, -(-plan.columns // tile.columns), -(-vocabulary // plan.columns)
    assert parts * -(-rows * columns // at_once) <= 1.05 * (rows * vocabulary / tile.columns / at_once)


def test_blocks_take_no_memory_that_would_save_little_time() -> None:
    """Dlogits of large problems stay small, and a stash lies where the gradient will, if most of the rows fit there."""
    for tokens, vocabulary in ((8192, 131072), (16384, 262144), (32768, 32768)):
        spec = HeadSpec(4096, vocabulary, vocabulary, 0, jnp.dtype(jnp.bfloat16), None)
        plan = BACKEND.plan(spec, tokens, "recompute", 2**29)
        assert plan.rows == tokens
        assert 2 * tokens * plan.columns <= 160 * 2**20
    stash = 2 * vocabulary * BACKEND.plan(spec, tokens, "in_forward", 2**29, 2**28).rows
    assert 2**27 <= stash <= 2**28
