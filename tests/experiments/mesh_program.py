"""Run by `test_mesh.py`, in processes of their own with eight CPU devices, or all GPUs; prints what passed."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

from experiments.lm import loop
from experiments.lm.config import TrainConfig
from experiments.lm.model.mesh import make_layout
from experiments.lm.model.program import TrainState, build
from experiments.lm.model.transformer import Transformer
from experiments.lm.records import curve, read_records
from experiments.train_lm import main

# 301 entries: every tensor axis has to pad.
CONFIG = TrainConfig(
    vocab_size=301, width=16, layers=1, attention_heads=2, mlp_width=32, sequence_length=16, batch_size=8,
    learning_rate=0.01,
)  # fmt: skip
ROWS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 8, 17)).astype(np.int32)
Curve = list[tuple[float, float]]


def trained(head: str = "fused", **changes: Any) -> tuple[Curve, float, TrainState]:
    """Loss and gradient norm of a few steps, the validation loss after them, and the state."""
    program = build(dataclasses.replace(CONFIG, **changes), head, 0)
    state = program.initial_state(0)
    numbers = []
    for rows in ROWS:
        state, step = program.train(state, program.placed(rows))
        numbers.append((float(step.loss), float(step.gradient_norm)))
    return numbers, float(program.validate(state.params, program.placed(ROWS[0]))), state


def held(array: jax.Array) -> float:
    """The share of an array that one device holds."""
    return array.addressable_shards[0].data.size / array.size


def bytes_to_begin(mesh: str) -> int:
    """What one device takes to draw the first weights, and for these."""
    program = build(dataclasses.replace(CONFIG, mesh=mesh, layers=4, width=64), "fused", 0)
    plan = jax.jit(program.initial_state).lower(0).compile().memory_analysis()
    return plan.output_size_in_bytes + plan.temp_size_in_bytes


def curve_of(mesh: str, share: float, one: tuple[Curve, float], head: str = "fused", **changes: Any) -> str:
    """Checks that the mesh gives the losses of one device, and each device holds its share of the state."""
    numbers, validation, state = trained(head, mesh=mesh, **changes)
    np.testing.assert_allclose(numbers, one[0], rtol=1e-5)
    np.testing.assert_allclose(validation, one[1], rtol=1e-5)
    matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
    assert len(matrices) == 3 * (5 if changes else 6)
    assert {held(leaf) for leaf in matrices} == {share}, mesh
    return f"{head} on {mesh}"


def widest() -> Iterator[str]:
    """The mesh of every axis."""
    yield curve_of("data=2,fsdp=2,tensor=2,sequence", 1 / 4, trained()[:2])


def others() -> Iterator[str]:
    """Fewer axes, the plain head, tied embeddings, and where weights and hidden states lie."""
    one = trained(tie_embeddings=True)[:2]
    yield curve_of("data=8", 1, one, tie_embeddings=True)
    yield curve_of("data=2,tensor=2", 1 / 2, one, tie_embeddings=True)
    yield curve_of("fsdp=2,tensor=2", 1 / 4, one, "canonical", tie_embeddings=True)
    assert bytes_to_begin("fsdp=8") < bytes_to_begin("") / 6
    yield "first weights are drawn in shares"
    layout = make_layout(dataclasses.replace(CONFIG, mesh="data=2,tensor=2,sequence"))
    body = Transformer(CONFIG, 0, residual=layout.residual, rngs=nnx.Rngs(0))
    hidden = jax.jit(body)(jax.device_put(ROWS[0, :, 1:], layout.rows))
    assert hidden.addressable_shards[0].data.shape == (8 // 2, 16 // 2, 16)
    yield "sequence splits the hidden states"


def command() -> Iterator[str]:
    """The command itself: a run begun on one mesh goes on on another, and equals one device's."""
    folder, options = Path(sys.argv[2]), sys.argv[3:]
    one, parts = folder / "one", folder / "parts"
    assert main([*options, "--out", str(one)]) == 0
    with mock.patch.object(loop, "stop_requests", return_value=contextlib.nullcontext(lambda step: step == 3)):
        assert main([*options, "--out", str(parts), "--mesh", "data=2,tensor=2,sequence"]) == 130
    assert 'mesh = "data=2,tensor=2,sequence"' in (parts / "config.toml").read_text()
    assert main(["--out", str(parts), "--resume", "--mesh", "data=2,fsdp=2,tensor=2"]) == 0
    got, want = (list(read_records(run / "metrics.jsonl")) for run in (parts, one))
    for kind in ("train", "validation"):
        got_curve, want_curve = curve(got, kind, "fused"), curve(want, kind, "fused")
        assert list(got_curve) == list(want_curve)
        np.testing.assert_allclose(list(got_curve.values()), list(want_curve.values()), rtol=1e-5)
    yield "resumed on another mesh"


def gpus() -> Iterator[str]:
    """Every mesh of this machine's GPUs gives the curve of one GPU, in bfloat16 on the Hopper kernels."""
    count, steps = len(jax.devices()), 30
    rows = np.random.default_rng(0).integers(0, 4096, (4, 8, 257)).astype(np.int32)
    sizes = {"vocab_size": 4096, "width": 256, "attention_heads": 4, "mlp_width": 512, "sequence_length": 256}
    config = dataclasses.replace(CONFIG, dtype="bfloat16", implementation="mosaic_gpu", learning_rate=0.003, **sizes)

    def losses(mesh: str) -> list[float]:
        program = build(dataclasses.replace(config, mesh=mesh), "fused", 0)
        state, found = program.initial_state(0), []
        for i in range(steps):
            state, step = program.train(state, program.placed(rows[i % len(rows)]))
            found.append(float(step.loss))
        return found

    one = losses("")
    assert one[-1] < 0.97 * one[0], one
    both = [f"fsdp={count // 2},tensor=2"] if count >= 4 else []
    for mesh in (f"data={count}", f"tensor={count}", f"tensor={count},sequence", f"fsdp={count}", *both):
        got = losses(mesh)
        apart = np.max(np.abs(np.subtract(got, one)) / one)
        assert apart < 2e-3, (mesh, got, one)
        yield f"{mesh}: {steps} losses from {got[0]:.4f} to {got[-1]:.4f}, at most {apart:.1e} from those of one GPU"


if __name__ == "__main__":
    for passed in {"widest": widest, "others": others, "command": command, "gpus": gpus}[sys.argv[1]]():
        print(f"passed: {passed}", flush=True)
