"""Trains a model of Flax NNX on a mesh, data by vocabulary: `python examples/nnx_mesh.py`.

Four devices of a CPU are two parts of the batch by two of the vocabulary. The parameters say in Flax's metadata
(`out_sharding`) how they are split: embedding and head over the vocabulary. The loss needs no word about it, and
equals one device's. It takes seconds on a CPU, and needs the extra `flax`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_modules.nnx import LossHead

jax.config.update("jax_platforms", "cpu")  # before JAX starts
jax.config.update("jax_num_cpu_devices", 4)

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, CONTEXT, WIDTH, ROWS, TIME, STEPS = 128, 4, 64, 16, 32, 100


class LanguageModel(nnx.Module):
    """A convolution over the last `CONTEXT` characters, and the head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        by_rows = {"out_sharding": ("vocabulary", None)}
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_metadata=by_rows, rngs=rngs)
        self.trunk = nnx.Conv(WIDTH, WIDTH, (CONTEXT,), padding="CAUSAL", rngs=rngs)
        by_columns = {"out_sharding": (None, "vocabulary")}
        self.head = LossHead(WIDTH, VOCABULARY, kernel_metadata=by_columns, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> Any:
        """The loss of predicting each token of `[B, T + 1]` from those before it."""
        return self.head(jax.nn.tanh(self.trunk(self.embed(tokens[:, :-1]))), tokens[:, 1:])


@nnx.jit
def train_step(model: LanguageModel, optimizer: nnx.Optimizer[LanguageModel], tokens: jax.Array) -> jax.Array:
    """One step; the loss before it."""
    loss, gradients = nnx.value_and_grad(lambda model: model(tokens))(model)
    optimizer.update(model, gradients)
    return loss


def batches() -> Iterable[np.ndarray]:
    """Pieces of this project's pages, `[B, T + 1]`, from places drawn at random."""
    pages = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md")))
    text = np.frombuffer(pages.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    for places in rng.integers(0, len(text) - TIME, (STEPS, ROWS)):
        yield text[places[:, None] + np.arange(TIME + 1)]


def train(mesh: Mesh) -> tuple[LanguageModel, list[float]]:
    """The model, and the losses of its training."""
    with jax.set_mesh(mesh):
        model = LanguageModel(nnx.Rngs(0))  # its parameters are split as they are made
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        rows = NamedSharding(mesh, P("data"))
        losses = [train_step(model, optimizer, jax.device_put(tokens, rows)) for tokens in batches()]
    return model, [float(loss) for loss in losses]


def main() -> None:
    """Trains on one device and on four, and shows the losses side by side."""
    axes, types = ("data", "vocabulary"), (AxisType.Auto, AxisType.Auto)
    _, one = train(jax.make_mesh((1, 1), axes, axis_types=types, devices=jax.devices()[:1]))
    model, four = train(jax.make_mesh((2, 2), axes, axis_types=types))
    print("step  one device  2 × 2 devices")
    for step in range(0, STEPS, 20):
        print(f"{step:4}  {one[step]:10.5f}  {four[step]:13.5f}")
    parts = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, whole = ".".join(map(str, path)), parameter.shape
        parts[name] = parameter[...].addressable_shards[0].data.shape
        print(f"{name:15} {whole!s:13} a device has {parts[name]}")
    assert parts["embed.embedding"] == (VOCABULARY // 2, WIDTH)
    assert parts["head.kernel"] == (WIDTH, VOCABULARY // 2)
    np.testing.assert_allclose(four, one, rtol=1e-4)
    assert four[-1] < 0.7 * four[0]


if __name__ == "__main__":
    main()
