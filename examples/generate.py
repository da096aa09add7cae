"""Generates text token by token with `linear_sample`: `python examples/generate.py`.

A recurrent model learns the characters of this project's pages. Then one compiled loop draws from it, each character
from the last one's hidden state: at a temperature, from the nucleus (`top_p`), or the most likely one. The
log-probabilities that come with the samples are those that the model gives the finished text. It takes seconds on a
CPU, and needs optax, which the extra `flax` brings.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_ce import Samples, linear_cross_entropy, linear_log_probs, linear_sample

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, WIDTH, ROWS, TIME, STEPS = 128, 128, 32, 48, 200


class Model(NamedTuple):
    """Embedding and the head's weight `[V, WIDTH]`, and the recurrence `[2 · WIDTH, 2 · WIDTH]`."""

    embedding: jax.Array
    recurrence: jax.Array
    weight: jax.Array


def advance(model: Model, state: jax.Array, token: jax.Array) -> jax.Array:
    """The hidden state `[B, WIDTH]` after one more token `[B]`: a gated recurrence."""
    both = jnp.concatenate([state, model.embedding[token]], axis=-1) @ model.recurrence
    gate, new = jnp.split(both, 2, axis=-1)
    keep = jax.nn.sigmoid(gate)
    return keep * state + (1 - keep) * jnp.tanh(new)


def hidden_states(model: Model, tokens: jax.Array) -> jax.Array:
    """`[B, T, WIDTH]` of tokens `[B, T]`."""

    def step(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = advance(model, state, token)
        return state, state

    _, states = jax.lax.scan(step, jnp.zeros((len(tokens), WIDTH)), tokens.T)
    return states.swapaxes(0, 1)


@functools.partial(jax.jit, static_argnames=("length", "top_p"))
def generate(
    key: jax.Array, model: Model, first: jax.Array, length: int, temperature: float, top_p: float | None = None
) -> Samples:
    """Returns `length` ids after `first` `[B]`, and the log-probabilities they were drawn with, `[B, length]` each."""

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Samples]:
        state = advance(model, *carry)
        drawn = linear_sample(key, state, model.weight, temperature=temperature, top_p=top_p)
        return (state, drawn.ids), drawn

    _, drawn = jax.lax.scan(step, (jnp.zeros((len(first), WIDTH)), first), jax.random.split(key, length))
    return jax.tree.map(jnp.transpose, drawn)


def batches(text: np.ndarray) -> Iterable[jax.Array]:
    """Pieces of the text, `[B, T + 1]`, from places drawn at random."""
    rng = np.random.default_rng(0)
    for places in rng.integers(0, len(text) - TIME, (STEPS, ROWS)):
        yield jnp.asarray(text[places[:, None] + np.arange(TIME + 1)])


def trained(model: Model, text: np.ndarray) -> Model:
    """The model after `STEPS` steps of Adam."""
    optimizer = optax.adam(5e-3)

    def loss(model: Model, tokens: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden_states(model, tokens[:, :-1]), model.weight, tokens[:, 1:])

    @jax.jit
    def step(model: Model, state: Any, tokens: jax.Array) -> tuple[Model, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(model, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(model, updates), state, value

    state, losses = optimizer.init(model), []
    for tokens in batches(text):
        model, state, value = step(model, state, tokens)
        losses.append(float(value))
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} after {STEPS} steps")
    assert losses[-1] < 0.6 * losses[0]
    return model


def main() -> None:
    """Trains, generates in three ways, and compares the log-probabilities."""
    pages = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md")))
    text = np.frombuffer(pages.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    model = Model(
        jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        jax.random.normal(keys[1], (2 * WIDTH, 2 * WIDTH)) / np.sqrt(2 * WIDTH),
        jax.random.normal(keys[2], (VOCABULARY, WIDTH)) / np.sqrt(WIDTH),
    )
    model = trained(model, text)

    first = jnp.full(2, ord("T"))
    ways: dict[str, dict[str, Any]] = {
        "temperature 0.8": {"temperature": 0.8},
        "temperature 0.8, top_p 0.7": {"temperature": 0.8, "top_p": 0.7},
        "most likely": {"temperature": 0.0},
    }
    for name, options in ways.items():
        drawn = generate(keys[3], model, first, 72, **options)
        for row in np.asarray(drawn.ids):
            print(f"{name + ':':27} {'T' + ''.join(map(chr, row))!r}")
        read = jnp.concatenate([first[:, None], drawn.ids[:, :-1]], axis=1)
        found = linear_log_probs(hidden_states(model, read), model.weight, drawn.ids, temperature=0.8, return_hit=True)
        if name == "temperature 0.8":
            np.testing.assert_allclose(drawn.log_probs, found.log_probs, atol=1e-4)
        elif name == "most likely":
            assert found.hit.all()
        else:  # among fewer, each is more likely
            assert (drawn.log_probs >= found.log_probs - 1e-4).all()
            assert (drawn.log_probs <= found.log_probs - np.log(0.7) + 1e-4).all()


if __name__ == "__main__":
    main()
