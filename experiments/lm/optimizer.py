"""AdamW with linear warm-up, cosine decay and clipping by the global norm."""

import jax
import optax

from experiments.lm.config import TrainConfig


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """The learning rate as a function of the number of steps already taken.

    It rises linearly to the peak over the warm-up share of the steps, starting above zero so that the first step is
    not lost, and falls along half a cosine to its final share of the peak.
    """
    warmup_steps = round(config.warmup * config.steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=max(config.steps, warmup_steps + 1),
        end_value=config.learning_rate * config.final_learning_rate,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW as configured; weight decay touches matrices only, not the scales of the norms."""
    adamw = optax.adamw(
        learning_rate_schedule(config),
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
