"""Direct preference optimisation (DPO) of a small language model: `python examples/dpo.py`.

Of two answers to a prompt the chosen one counts on from the prompt's last token, the rejected one is drawn at random.
The reference is the model as it was before, whose log-probabilities are constants, computed once. The answers' lengths
differ: prompts and padding have the label -100. It takes seconds on a CPU, and needs optax, which the extra `flax`
brings.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_ce import PreferenceMetrics, dpo_loss, linear_log_probs, sequence_log_probs

VOCABULARY, WIDTH, PROMPT, ANSWER = 512, 64, 4, 8
PAIRS, EPOCHS = 256, 40


class Model(NamedTuple):
    """Embedding `[V, WIDTH]`, hidden layer `[WIDTH, WIDTH]`, and the head's weight `[V, WIDTH]`."""

    embedding: jax.Array
    trunk: jax.Array
    weight: jax.Array


class Answers(NamedTuple):
    """Prompts with an answer each, `[B, PROMPT + ANSWER]`, and the labels: the answer's tokens, else -100."""

    tokens: jax.Array
    labels: jax.Array


def pairs(rng: np.random.Generator) -> tuple[Answers, Answers]:
    """Chosen and rejected answers of 2 to `ANSWER` tokens."""
    prompts = rng.integers(0, VOCABULARY, (PAIRS, PROMPT))
    chosen = (prompts[:, -1:] + np.arange(1, ANSWER + 1)) % VOCABULARY
    rejected = rng.integers(0, VOCABULARY, (PAIRS, ANSWER))

    def answers(tokens: np.ndarray) -> Answers:
        counts = np.arange(ANSWER) < rng.integers(2, ANSWER + 1, (PAIRS, 1))
        labels = np.where(counts, tokens, -100)
        ignored = np.full((PAIRS, PROMPT), -100)
        return Answers(jnp.asarray(np.hstack([prompts, tokens])), jnp.asarray(np.hstack([ignored, labels])))

    return answers(chosen), answers(rejected)


def log_probs(model: Model, answers: Answers) -> jax.Array:
    """The log-probability of each answer, `[B]`: with `shift=1` each position meets the next one's label."""
    hidden = jnp.tanh(model.embedding[answers.tokens] @ model.trunk)
    return sequence_log_probs(linear_log_probs(hidden, model.weight, answers.labels, shift=1))


def loss(
    model: Model, batch: tuple[Answers, Answers], reference: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, PreferenceMetrics]:
    """The loss of pairs of answers, with the metrics."""
    chosen, rejected = (log_probs(model, answers) for answers in batch)
    value: tuple[jax.Array, PreferenceMetrics] = dpo_loss(chosen, rejected, *reference, beta=0.1, return_metrics=True)
    return value


def main() -> None:
    """Trains on some pairs and shows loss, margin and accuracy of others."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = Model(
        jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        jax.random.normal(keys[1], (WIDTH, WIDTH)) / np.sqrt(WIDTH),
        jax.random.normal(keys[2], (VOCABULARY, WIDTH)) / np.sqrt(WIDTH),
    )
    rng = np.random.default_rng(0)
    training, others = pairs(rng), pairs(rng)
    references = [(log_probs(model, chosen), log_probs(model, rejected)) for chosen, rejected in (training, others)]
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(model: Model, state: Any) -> tuple[Model, Any]:
        gradients, _ = jax.grad(loss, has_aux=True)(model, training, references[0])
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(model, updates), state

    found, state = [], optimizer.init(model)
    for epoch in range(EPOCHS + 1):
        if epoch % 10 == 0:
            value, metrics = loss(model, others, references[1])
            found.append((float(value), float(metrics.margin), float(metrics.accuracy)))
            print("epoch {:2}: loss {:.3f}, margin of the rewards {:6.2f}, accuracy {:.0%}".format(epoch, *found[-1]))
        model, state = step(model, state)
    np.testing.assert_allclose(found[0][:2], (np.log(2), 0), atol=1e-5)  # the model is its own reference yet
    assert found[-1][0] < 0.3
    assert found[-1][2] > 0.9


if __name__ == "__main__":
    main()
