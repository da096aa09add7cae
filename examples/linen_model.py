"""Trains a model of Flax Linen with the Linen head: `python examples/linen_model.py`.

A causal attention layer learns the characters of this project's pages. The head shares the embedding's weight
(`LossHead.of`) and returns the loss; in evaluation and generation its `logits` are an ordinary product. It takes
seconds on a CPU, and needs the extra `flax`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_modules.linen import LossHead

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, WIDTH, ROWS, TIME, STEPS = 128, 64, 16, 32, 200


class LanguageModel(nn.Module):
    """One layer of attention, one of a perceptron, and the head."""

    def setup(self) -> None:
        """Makes the layers."""
        self.embed = nn.Embed(VOCABULARY, WIDTH)
        self.positions = nn.Embed(TIME, WIDTH)
        self.attention = nn.MultiHeadDotProductAttention(num_heads=4)
        self.perceptron = nn.Sequential([nn.Dense(4 * WIDTH), nn.gelu, nn.Dense(WIDTH)])
        self.norms = [nn.LayerNorm() for _ in range(3)]
        self.head = LossHead.of(self.embed)

    def hidden_states(self, tokens: jax.Array) -> jax.Array:
        """`[B, T, WIDTH]` of tokens `[B, T]`."""
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = x + self.attention(self.norms[0](x), mask=nn.make_causal_mask(tokens))
        x = x + self.perceptron(self.norms[1](x))
        return self.norms[2](x)

    def __call__(self, tokens: jax.Array) -> Any:
        """The loss of predicting each token of `[B, T + 1]` from those before it."""
        return self.head(self.hidden_states(tokens[:, :-1]), tokens[:, 1:])

    def logits(self, tokens: jax.Array) -> jax.Array:
        """`[B, T, VOCABULARY]`."""
        return self.head.logits(self.hidden_states(tokens))


def batches() -> Iterable[jax.Array]:
    """Pieces of the text, `[B, T + 1]`, from places drawn at random."""
    pages = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md")))
    text = np.frombuffer(pages.encode("ascii", "ignore"), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    for places in rng.integers(0, len(text) - TIME, (STEPS, ROWS)):
        yield jnp.asarray(text[places[:, None] + np.arange(TIME + 1)])


def main() -> None:
    """Trains, and compares the loss with one computed from logits."""
    model = LanguageModel()
    variables = model.init(jax.random.key(0), jnp.zeros((1, TIME + 1), jnp.int32))
    optimizer = optax.adam(3e-3)

    @jax.jit
    def train_step(variables: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(model.apply)(variables, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, loss

    state, losses = optimizer.init(variables), []
    for step, tokens in enumerate(batches()):
        variables, state, loss = train_step(variables, state, tokens)
        losses.append(float(loss))
        if step % 40 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {losses[-1]:.3f}")
    assert losses[-1] < 0.6 * losses[0]

    logits: Any = model.apply(variables, tokens[:, :-1], method="logits")
    of_logits = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    of_head: Any = model.apply(variables, tokens)
    print(f"loss of the last batch: {of_head:.5f} by the head, {of_logits:.5f} from its logits")
    np.testing.assert_allclose(of_head, of_logits, rtol=1e-5)


if __name__ == "__main__":
    main()
