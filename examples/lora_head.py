"""Trains a low-rank adapter (LoRA) of a head, the rest of the model frozen: `python examples/lora_head.py`.

A model of a few characters' context learns prose, this project's pages. Then the adapter alone learns Python, this
project's modules: the logits are `hidden·weight + scale·(hidden·down)·up`, so that neither a sum of the two nor a
gradient of the weight's size is made. At the end the adapter is merged. It takes seconds on a CPU, and needs optax,
which the extra `flax` brings.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_ce import LowRank, explain, linear_cross_entropy

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, CONTEXT, WIDTH, RANK, SCALE = 128, 8, 64, 4, 2.0
BATCH, STEPS = 256, 300


class Model(NamedTuple):
    """Embedding `[V, 16]`, hidden layer `[16 · CONTEXT, WIDTH]`, and the head's weight `[V, WIDTH]`."""

    embedding: jax.Array
    trunk: jax.Array
    weight: jax.Array


class Adapter(NamedTuple):
    """LoRA's B `[V, RANK]`, zero at first, and A `[RANK, WIDTH]`."""

    up: jax.Array
    down: jax.Array


def characters(files: Iterable[Path]) -> np.ndarray:
    """The ASCII characters of files, as ids."""
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(files))
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)


def hidden_states(model: Model, context: jax.Array) -> jax.Array:
    """`[B, WIDTH]` of `CONTEXT` characters each, `[B, CONTEXT]`."""
    embedded = model.embedding[context].reshape(len(context), -1)
    return jnp.tanh(embedded @ model.trunk)


def loss_of_model(model: Model, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean loss of the next characters, by the weight alone."""
    context, following = batch
    return linear_cross_entropy(hidden_states(model, context), model.weight, following)


def loss_of_adapter(adapter: Adapter, model: Model, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The same with the adapter, the only thing that is differentiated: the model is frozen."""
    context, following = batch
    weight = LowRank(model.weight, adapter.up, adapter.down, SCALE)
    return linear_cross_entropy(hidden_states(model, context), weight, following)


def batches(text: np.ndarray, count: int) -> Iterable[tuple[jax.Array, jax.Array]]:
    """Contexts and the characters that follow them, from places drawn at random."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        places = rng.integers(0, len(text) - CONTEXT, BATCH)
        windows = text[places[:, None] + np.arange(CONTEXT + 1)]
        yield jnp.asarray(windows[:, :-1]), jnp.asarray(windows[:, -1])


def trained[T](parameters: T, loss: Callable[..., jax.Array], text: np.ndarray, steps: int, *frozen: Any) -> T:
    """Returns the parameters after `steps` steps of Adam; the loss takes `frozen` beside them."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(parameters: T, state: Any, frozen: Any, batch: Any) -> tuple[T, Any]:
        gradients = jax.grad(loss)(parameters, *frozen, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state

    state = optimizer.init(parameters)
    for batch in batches(text, steps):
        parameters, state = step(parameters, state, frozen, batch)
    return parameters


def main() -> None:
    """Trains the model, then the adapter; shows the loss of Python before, after, and of the merged weight."""
    keys = jax.random.split(jax.random.key(0), 4)
    model = Model(
        jax.random.normal(keys[0], (VOCABULARY, 16)),
        jax.random.normal(keys[1], (16 * CONTEXT, WIDTH)) / np.sqrt(16 * CONTEXT),
        jax.random.normal(keys[2], (VOCABULARY, WIDTH)) / np.sqrt(WIDTH),
    )
    prose = characters((ROOT / "docs").glob("*.md"))
    python = characters((ROOT / "flax_modules").rglob("*.py"))
    model = trained(model, loss_of_model, prose, STEPS)

    adapter = Adapter(jnp.zeros((VOCABULARY, RANK)), jax.random.normal(keys[3], (RANK, WIDTH)) / np.sqrt(WIDTH))
    adapter = trained(adapter, loss_of_adapter, python, STEPS, model)
    merged = model._replace(weight=model.weight + SCALE * adapter.up @ adapter.down)

    (batch,) = batches(python, 1)
    found = {
        "before": float(loss_of_model(model, batch)),
        "with the adapter": float(loss_of_adapter(adapter, model, batch)),
        "merged": float(loss_of_model(merged, batch)),
    }
    for name, loss in found.items():
        print(f"loss of Python, {name + ':':18} {loss:.3f}")
    share = sum(x.size for x in adapter) / model.weight.size
    weight = LowRank(model.weight, adapter.up, adapter.down, SCALE)
    counts = [
        explain(hidden_states(model, batch[0]), weight, differentiate=names).gemms
        for names in (("up", "down"), ("weight", "up", "down"))
    ]
    print(
        f"the adapter has {share:.0%} of the weight's numbers; large products: {counts[0]}, with the weight {counts[1]}"
    )
    assert found["with the adapter"] < 0.95 * found["before"]
    np.testing.assert_allclose(found["merged"], found["with the adapter"], rtol=1e-5)


if __name__ == "__main__":
    main()
