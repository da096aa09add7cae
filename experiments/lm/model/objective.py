"""The losses of the same parameters: through the fused head, through stored logits, and the plain one they equal."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.lm.config import TrainConfig
from experiments.lm.data.packing import IGNORE_INDEX, inputs_and_labels
from experiments.lm.model.transformer import LanguageModel
from pallas_ce import LossConfig, build_loss_fn

Objective = Callable[[LanguageModel, jax.Array], jax.Array]


def fused(model: LanguageModel, rows: jax.Array) -> jax.Array:
    """Mean cross entropy of `rows [B, T + 1]` over counted labels, through the model's loss head: no logits stored."""
    inputs, labels = inputs_and_labels(rows, model.body.end_of_text)
    loss = model.head(model.body(inputs), labels)
    assert isinstance(loss, jax.Array)  # It is a pair only with metrics, which are not asked for.
    return loss


def canonical(model: LanguageModel, rows: jax.Array) -> jax.Array:
    """As most training scripts compute it: logits in the compute dtype, their log-softmax in float32."""
    inputs, labels = inputs_and_labels(rows, model.body.end_of_text)
    logits = _logits(model, inputs)
    if logits.shape[-1] > model.head.vocab_size:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < model.head.vocab_size, logits, -jnp.inf)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    counted = labels != IGNORE_INDEX
    picked = jnp.take_along_axis(log_probs, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(counted, picked, 0.0)) / jnp.maximum(jnp.sum(counted), 1)


def on_logits(config: TrainConfig) -> Objective:
    """The configured loss of stored logits `[B, T, V']` in the compute dtype; its gradient takes their place."""
    loss_fn = build_loss_fn(LossConfig(**{name: getattr(config, name) for name in LossConfig.__dataclass_fields__}))

    def objective(model: LanguageModel, rows: jax.Array) -> jax.Array:
        inputs, labels = inputs_and_labels(rows, model.body.end_of_text)
        return loss_fn(_logits(model, inputs), labels, vocab_size=model.head.vocab_size)

    return objective


def objective(config: TrainConfig, head: str) -> Objective:
    """What the loss head of that name minimises."""
    return on_logits(config) if head == "logits" else OBJECTIVES[head]


def _logits(model: LanguageModel, inputs: jax.Array) -> jax.Array:
    hidden = model.body(inputs)
    return hidden @ kernel(model).astype(hidden.dtype)


def kernel(model: LanguageModel) -> jax.Array:
    """The head's parameters as `[H, V']`."""
    own = model.head.kernel
    return model.body.embedding.embedding[...].T if own is None else own[...]


OBJECTIVES: dict[str, Objective] = {"fused": fused, "canonical": canonical}
