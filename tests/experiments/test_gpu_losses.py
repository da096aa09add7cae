"""The GPU benchmarks of the other losses: their commands at small sizes on a CPU, for a moment on a GPU."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import gpu_losses
from experiments.bench import materialized_logits, timing
from experiments.bench.command import dry

SHAPE = (512, 4096, 256)


def test_points_have_the_published_sizes() -> None:
    assert {name: points[name].shape[:2] for name, points in gpu_losses.SECTIONS.items()} == {
        "log_probs": (16384, 131072), "top_k": (16384, 131072), "given": (8192, 131072)
    }  # fmt: skip


def test_a_dry_run_measures_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--rounds", "1", "--out", str(tmp_path)]
    assert gpu_losses.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"gpu_losses_{section} {section}: N " in out for section in gpu_losses.SECTIONS)
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(files) == {"gpu_losses_log_probs", "gpu_losses_top_k", "gpu_losses_given"}
    found = files["gpu_losses_log_probs"]["points"]["log_probs"]["results"]
    assert set(gpu_losses.log_probs("xla", SHAPE)) <= set(found)
    n, _, h = dry(gpu_losses.SECTIONS["log_probs"]["log_probs"].shape)
    assert found["both"]["temporary_mib"] - found["both"]["beside_accumulator_mib"] == 4 * n * h / 2**20
    assert gpu_losses.main(words) == 0
    assert capsys.readouterr().out == ""  # nothing is left to measure


def test_bandwidth_is_that_of_the_passes_a_program_must_make() -> None:
    """With a clock that says 1 ms for a copy and for everything else, three passes are 3/2 of a copy's bandwidth."""
    programs = materialized_logits.programs("xla")
    record = materialized_logits.measure((16, 256, 1), programs, 3, lambda program, arguments: 1.0)
    passes = 16 * 256 * 2 / 1e-3
    assert record["copy_bytes_per_second"] == pytest.approx(2 * passes)
    shares = {name: record["results"][name]["share"] for name in programs}
    assert shares == pytest.approx({name: 0.5 if name.startswith("forward") else 1.5 for name in programs})
    assert record["results"]["donated xla"]["bytes_per_second"] == pytest.approx(3 * passes)


def test_a_donated_buffer_is_used_again_by_the_next_launch() -> None:
    programs = {name: materialized_logits.programs("xla")[name] for name in ("donated xla", "kept xla")}
    record = materialized_logits.measure((16, 256, 1), programs, 1, timing.back_to_back)
    assert all(record["results"][name]["ms"] > 0 for name in programs)


def test_the_contenders_agree_and_the_upstream_weights_differ() -> None:
    logits = jax.random.normal(jax.random.key(0), (8, 64), jnp.float32)
    programs = materialized_logits.programs("xla")
    ours, plain = (programs[name](logits, jnp.arange(8)) for name in ("kept xla", "kept plain"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, plain)
    # Were both weights the same, the gradients of log-probability and entropy might cancel unnoticed.
    angle = np.arange(64, dtype=np.float32)
    assert not np.any(np.isclose(np.cos(angle), np.sin(angle)))


@pytest.mark.gpu
def test_every_contender_is_timed_on_the_gpu() -> None:
    programs: dict[str, Any] = gpu_losses.log_probs("mosaic_gpu", SHAPE) | gpu_losses.top_k("mosaic_gpu", SHAPE)
    results = timing.measure(SHAPE, programs, 1, timing.back_to_back)["results"]
    assert all(results[name]["ratio"] > 0 for name in programs)
    given = materialized_logits.programs("mosaic_gpu")
    found = materialized_logits.measure((512, 4096, 1), given, 1, timing.back_to_back)["results"]
    assert all(found[name]["share"] > 0 for name in given)
