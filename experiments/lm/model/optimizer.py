"""AdamW, or Muon for the matrices of the blocks, with warm-up, cosine decay and clipping by the global norm."""

from typing import Any

import jax
import optax

from experiments.lm.config import TrainConfig


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from above zero, so that the first step is not lost, then half a cosine."""
    warmup_steps = round(config.warmup * config.steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=max(config.steps, warmup_steps + 1),
        end_value=config.learning_rate * config.final_learning_rate,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """As configured; weight decay touches matrices only, not the scales of the norms."""

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    schedule = learning_rate_schedule(config)
    adamw = optax.adamw(schedule, b2=config.beta2, weight_decay=config.weight_decay, mask=matrices)
    chosen = adamw if config.optimizer == "adamw" else _muon(config, schedule, adamw)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), chosen)


def _muon(
    config: TrainConfig, schedule: optax.Schedule, adamw: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks; AdamW for embedding, loss head and norms, as Muon's authors advise.

    Its orthogonal updates are scaled to the size that AdamW's usually have (a root mean square of 0.2), so that one
    learning rate serves both: "Muon is Scalable for LLM Training", section 2.2.
    """
    muon = optax.contrib.muon(
        schedule,
        weight_decay=config.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(_as_matrix, params),
    )
    return optax.partition({"muon": muon, "adamw": adamw}, _which)


def _as_matrix(kernel: jax.Array) -> optax.contrib.MuonDimensionNumbers:
    """Inputs by outputs: a projection to several heads is one matrix."""
    return optax.contrib.MuonDimensionNumbers(reduction_axis=(0,), output_axis=tuple(range(1, kernel.ndim)))


def _which(params: Any) -> Any:
    def name(path: Any, leaf: Any) -> str:
        return "muon" if "blocks" in jax.tree_util.keystr(path) and leaf.ndim > 1 else "adamw"

    return jax.tree_util.tree_map_with_path(name, params)
