"""How work is cut into windows and blocks, and which heads the backend takes."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ce.backends import device as targets
from pallas_ce.backends.mosaic_gpu import BACKEND
from pallas_ce.backends.mosaic_gpu.schedule.config import PARTIALS_BYTES, Config, busiest, schedule
from pallas_ce.dispatch.settings import Settings
from pallas_ce.gradient_products import NeedsGrad
from pallas_ce.head import HeadSpec
from pallas_ce.parallel.shards import Shards

SPEC = HeadSpec(4096, 131072, 131072, 0, np.dtype(jnp.bfloat16), None)
SIZES = list(itertools.product((1024, 4096, 8192, 16384, 32768), (32768, 65536, 131072, 262144)))


@pytest.mark.parametrize(("n", "v"), SIZES)
def test_windows_keep_the_chip_busy_within_little_memory(n: int, v: int) -> None:
    config = Config(sms=132)
    found = schedule(config, n, v, 8)
    assert schedule(dataclasses.replace(config, windows=5), n, 3 * config.columns, 8).windows == 3  # of a tile each
    assert found.windows * n * 8 <= PARTIALS_BYTES
    sizes = np.diff(np.arange(found.windows + 1) * found.column_blocks // found.windows)
    ideal = found.row_blocks * found.column_blocks / 66
    group = min(config.row_group, found.row_blocks)
    assert busiest(sizes.astype(float), found.row_blocks, group, 66) <= 1.04 * ideal


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": 96}, "rows=96 must be a multiple of 64"),
        ({"columns": 320}, "columns=320 must be"),
        ({"stages": 1}, "stages=1 must be at least 2"),
        ({"in_flight": 2}, "in_flight=2 must be 0 or 1"),
        ({"piece": 96}, "piece=96 must be a multiple of 16 that divides columns=128"),
        ({"columns": 72}, "columns=72 must be a multiple of 16"),
        ({"ping_pong": True, "lead": 1}, "ping_pong goes with lead=0, not 1"),
    ],
)
def test_impossible_tiles_are_refused(change: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Config(**change)


@pytest.mark.parametrize("mode", [None, "in_forward", "recompute"])
@pytest.mark.parametrize("v", [1, 201, 50257, 131072])
def test_plans_stay_within_their_budget(mode: str | None, v: int) -> None:
    spec = dataclasses.replace(SPEC, weight_rows=v, vocab_size=v, hidden_size=64)
    least = BACKEND.minimum_scratch(spec, mode)
    for budget, tokens in itertools.product((least, least + 1000, 3 * least, 2**29), (1, 7, 1000, 100000)):
        plan = BACKEND.plan(spec, tokens, mode, budget)
        assert plan.scratch_bytes <= budget
        assert 1 <= plan.rows <= tokens
        assert 1 <= plan.columns <= v


@pytest.mark.parametrize(("capability", "refused"), [("9.0", False), ("8.0", True), ("10.0", True)])
def test_other_gpus_are_refused_with_the_alternative(
    monkeypatch: pytest.MonkeyPatch, capability: str, refused: bool
) -> None:
    gpu = SimpleNamespace(compute_capability=capability, device_kind="NVIDIA Test")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    monkeypatch.setattr(targets, "local_cuda", lambda: gpu.device_kind)
    reason = BACKEND.refusal(SPEC)
    assert (reason is not None) == refused
    if reason is not None:
        assert capability in reason
        assert "'xla'" in reason


@pytest.mark.parametrize(
    ("n", "v", "h", "rows"),
    [
        (8192, 131072, 4096, 8192),  # one block in the memory that a wide sum for the weight would take
        (8192, 201088, 2880, 2048),  # a stash of more than H rows does not fit where the gradient will lie
        (8192, 262144, 2560, 2048),
        (8192, 50257, 768, 2048),  # unless scratch memory holds it
        (16384, 32768, 4096, 4096),  # four, of 5504 rows three, which overlap: no row twice
    ],
)
def test_blocks_of_in_forward_are_those_that_cost_least(n: int, v: int, h: int, rows: int) -> None:
    spec, settings = HeadSpec(h, v, v, 0, np.dtype(jnp.bfloat16), None), Settings("mosaic_gpu", None, None)
    sums = settings.sum_bytes(spec, spec.dtype, NeedsGrad(weight=True), Shards())
    plan = settings.block_sizes(spec, n, "in_forward", sums)
    assert plan.rows == rows
    assert plan.scratch_bytes <= max(2**29, 4096 * v) + (sums if rows == n else 0)
    half = dataclasses.replace(settings, scratch_bytes=plan.scratch_bytes // 2).block_sizes(spec, n, "in_forward", sums)
    assert half.scratch_bytes <= plan.scratch_bytes // 2
    assert half.rows >= rows // 4  # a bound does not count what lies where the gradient will


def test_a_small_bound_gives_up_parts_of_a_product_before_rows() -> None:
    """Of 384 rows a product for hidden states would fill the chip in two parts, for which 16 MiB have no room."""
    sums = 4 * SPEC.vocab_size * SPEC.hidden_size
    bounded = Settings("mosaic_gpu", None, 2**24).block_sizes(SPEC, 16384, "in_forward", sums)
    assert (bounded.rows, bounded.splits) == (384, False)
    assert bounded.scratch_bytes <= 2**24
    assert BACKEND.plan(SPEC, 384, "in_forward", 2**28).splits
