"""Training a small language model by rewards (GRPO) without logits: `python examples/grpo.py`.

Each iteration samples a group of answers to every prompt by `linear_sample`, rewards them, and updates twice on them,
so that the second update is off-policy and the ratio is clipped. The task is to answer prompt p with tokens whose id is
p modulo the number of prompts; the reward is the share of an answer's places that do. A token of id 0 ends an answer.
It takes seconds on a CPU, and needs optax, which the extra `flax` brings.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_ce import LogProbs, PolicyMetrics, group_advantages, linear_log_probs, linear_sample, policy_loss

VOCABULARY, WIDTH, PROMPTS, GROUP, LENGTH = 512, 32, 4, 32, 8
ITERATIONS, UPDATES, TEMPERATURE, KL = 60, 2, 0.9, 1e-3
END = 0
# The estimate e^d - d - 1 of the KL grows without bound for tokens that the initial model finds unlikely.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


class Model(NamedTuple):
    """Embeddings of prompt and last token `[V, WIDTH]`, hidden layer `[WIDTH, WIDTH]`, and the head's weight."""

    prompt: jax.Array
    token: jax.Array
    trunk: jax.Array
    weight: jax.Array


class Rollout(NamedTuple):
    """Prompts with sampled answers `[B, 1 + LENGTH]`, which tokens count, rewards, and log-probabilities then."""

    tokens: jax.Array
    mask: jax.Array
    rewards: jax.Array
    old: jax.Array
    reference: jax.Array


def hidden_states(model: Model, tokens: jax.Array) -> jax.Array:
    """Of each place but the last, `[B, LENGTH, WIDTH]`."""
    mixed = model.prompt[tokens[:, :1]] + model.token[tokens[:, :-1]]
    return jnp.tanh(mixed @ model.trunk)


def log_probs(model: Model, tokens: jax.Array, mask: jax.Array) -> LogProbs:
    """Of the answers' tokens at the temperature that they are drawn at; those behind an answer's end are ignored."""
    labels = jnp.where(mask, tokens[:, 1:], -100)
    hidden = hidden_states(model, tokens)
    return linear_log_probs(hidden, model.weight, labels, temperature=TEMPERATURE, return_entropy=True)


def sample(model: Model, reference: Model, key: jax.Array) -> Rollout:
    """A group of answers to each prompt, place by place, and what they earn."""
    prompts = jnp.repeat(jnp.arange(PROMPTS), GROUP)
    tokens = jnp.zeros((prompts.size, 1 + LENGTH), jnp.int32).at[:, 0].set(prompts)

    def extend(place: jax.Array, tokens: jax.Array) -> jax.Array:
        hidden = hidden_states(model, tokens)[:, place]
        drawn = linear_sample(jax.random.fold_in(key, place), hidden, model.weight, temperature=TEMPERATURE)
        return tokens.at[:, place + 1].set(drawn.ids)

    tokens = jax.lax.fori_loop(0, LENGTH, extend, tokens)
    answers = tokens[:, 1:]
    ends = (answers == END).astype(jnp.int32)
    mask = jnp.cumsum(ends, axis=1) - ends == 0
    right = mask & (answers % PROMPTS == prompts[:, None]) & (answers != END)
    old, before = (log_probs(m, tokens, mask).log_probs for m in (model, reference))
    return Rollout(tokens, mask, jnp.mean(right.astype(jnp.float32), axis=1), old, before)


def loss(model: Model, rollout: Rollout) -> tuple[jax.Array, PolicyMetrics]:
    """The clipped policy loss of the group's advantages, with a penalty for leaving the initial model."""
    found = log_probs(model, rollout.tokens, rollout.mask)
    return policy_loss(
        found.log_probs,
        group_advantages(rollout.rewards, GROUP),
        rollout.mask,
        old_log_probs=rollout.old,
        ref_log_probs=rollout.reference,
        entropy=found.entropy,
        kl_coefficient=KL,
        aggregation="sequence_mean",
        return_metrics=True,
    )


def main() -> None:
    """Trains, and checks that the rewards have risen from chance."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(VOCABULARY, WIDTH), (VOCABULARY, WIDTH), (WIDTH, WIDTH), (VOCABULARY, WIDTH)]
    model = reference = Model(*(jax.random.normal(k, s) * s[1] ** -0.5 for k, s in zip(keys, shapes, strict=True)))
    state = OPTIMIZER.init(model)

    @jax.jit
    def iterate(model: Model, state: optax.OptState, key: jax.Array) -> tuple[Model, optax.OptState, jax.Array]:
        rollout = sample(model, reference, key)
        for _ in range(UPDATES):
            gradients, _ = jax.grad(loss, has_aux=True)(model, rollout)
            updates, state = OPTIMIZER.update(gradients, state, model)
            model = optax.apply_updates(model, updates)
        return model, state, jnp.mean(rollout.rewards)

    rewards = []
    for number in range(ITERATIONS):
        model, state, reward = iterate(model, state, jax.random.key(number))
        rewards.append(float(reward))
    print(f"mean reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} after {ITERATIONS} iterations")
    assert rewards[0] < 0.35
    assert rewards[-1] > 0.9


if __name__ == "__main__":
    main()
