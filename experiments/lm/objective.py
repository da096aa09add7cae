"""The two losses that are compared: through the fused head, and through stored logits, on the same parameters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.lm.model import LanguageModel
from experiments.lm.packing import IGNORE_INDEX, inputs_and_labels

Objective = Callable[[LanguageModel, jax.Array], jax.Array]


def fused(model: LanguageModel, rows: jax.Array) -> jax.Array:
    """Mean cross entropy of `rows [B, T + 1]` over counted labels, through the model's loss head: no logits stored."""
    inputs, labels = inputs_and_labels(rows, model.body.end_of_text)
    loss = model.head(model.body(inputs), labels)
    assert isinstance(loss, jax.Array)  # It is a pair only with metrics, which are not asked for.
    return loss


def canonical(model: LanguageModel, rows: jax.Array) -> jax.Array:
    """The same number as most training scripts compute it.

    Logits `[B, T, V']` are stored in the compute dtype, the log-softmax is taken in float32. The head's own `logits`
    are not used: they are float32, so their gradient's products would be float32 too, which nobody trains with.
    """
    inputs, labels = inputs_and_labels(rows, model.body.end_of_text)
    hidden = model.body(inputs)
    logits = hidden @ _kernel(model).astype(hidden.dtype)
    if logits.shape[-1] > model.head.vocab_size:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < model.head.vocab_size, logits, -jnp.inf)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    counted = labels != IGNORE_INDEX
    picked = jnp.take_along_axis(log_probs, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(counted, picked, 0.0)) / jnp.maximum(jnp.sum(counted), 1)


def _kernel(model: LanguageModel) -> jax.Array:
    """The head's parameters as `[H, V']`."""
    if model.head.kernel is not None:
        return model.head.kernel[...]
    return model.body.embedding.embedding[...].T


OBJECTIVES: dict[str, Objective] = {"fused": fused, "canonical": canonical}
