"""Puts `linear_cross_entropy` in the place of optax's cross entropy in a trainer: `python examples/loss_swap.py`.

The trainer is of the kind that stores logits: `hidden @ weight.T`, then optax's loss of them under a mask. One function
of it changes. The losses are the same up to rounding, and a step needs less memory. Tokens are pairs of characters of
this project's pages, so that the vocabulary is wide, as in language models. It takes seconds on a CPU, and needs optax,
which the extra `flax` brings.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_ce import linear_cross_entropy

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, WIDTH, ROWS, TIME, STEPS = 128 * 128, 64, 8, 64, 20

Parameters = dict[str, jax.Array]


def hidden_states(parameters: Parameters, tokens: jax.Array) -> jax.Array:
    """`[B, T, WIDTH]`, of each token and the one before."""
    before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    pairs = jnp.concatenate([parameters["embedding"][before], parameters["embedding"][tokens]], axis=-1)
    return jnp.tanh(pairs @ parameters["trunk"])


def stored(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """The loss as it was: of logits `[B, T, V]`."""
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, labels)
    return jnp.sum(mask * losses) / jnp.sum(mask)


def fused(hidden: jax.Array, weight: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """The loss as it is now."""
    return linear_cross_entropy(hidden, weight, labels, token_weights=mask)


def batches() -> Iterable[tuple[jax.Array, jax.Array]]:
    """Tokens `[B, T + 1]` and a mask `[B, T]` of the labels that count: texts end at various places."""
    text = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md")))
    characters = np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    tokens = 128 * characters[:-1:2] + characters[1::2]
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        places = rng.integers(0, len(tokens) - TIME, ROWS)
        ends = rng.integers(TIME // 2, TIME + 1, ROWS)
        mask = np.arange(TIME) < ends[:, None]
        yield jnp.asarray(tokens[places[:, None] + np.arange(TIME + 1)]), jnp.asarray(mask, jnp.float32)


def train(loss_of: Callable[..., jax.Array]) -> tuple[list[float], int]:
    """The losses of the steps, and the bytes that a step needs for what it makes on its way."""
    keys = jax.random.split(jax.random.key(0), 3)
    parameters = {
        "embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "trunk": jax.random.normal(keys[1], (2 * WIDTH, WIDTH)) / np.sqrt(2 * WIDTH),
        "weight": jax.random.normal(keys[2], (VOCABULARY, WIDTH)) / np.sqrt(WIDTH),
    }
    optimizer = optax.adam(1e-2)

    def step(
        parameters: Parameters, state: Any, tokens: jax.Array, mask: jax.Array
    ) -> tuple[Parameters, Any, jax.Array]:
        def loss(parameters: Parameters) -> jax.Array:
            hidden = hidden_states(parameters, tokens[:, :-1])
            return loss_of(hidden, parameters["weight"], tokens[:, 1:], mask)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    state, losses = optimizer.init(parameters), []
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(parameters, state, *next(iter(batches()))).compile()
    for tokens, mask in batches():
        parameters, state, value = compiled(parameters, state, tokens, mask)
        losses.append(float(value))
    plan = compiled.memory_analysis()
    assert plan is not None
    return losses, plan.temp_size_in_bytes


def main() -> None:
    """Trains twice and shows the losses side by side."""
    (before, bytes_before), (after, bytes_after) = train(stored), train(fused)
    print("step  stored logits  linear_cross_entropy")
    for step in range(0, STEPS, 4):
        print(f"{step:4}  {before[step]:13.5f}  {after[step]:20.5f}")
    print(
        f"memory of a step beside parameters and state: {bytes_before / 2**20:.0f} MiB, then {bytes_after / 2**20:.0f}"
    )
    np.testing.assert_allclose(after, before, rtol=1e-4)
    assert after[-1] < 0.9 * after[0]
    assert bytes_after < bytes_before


if __name__ == "__main__":
    main()
