"""MaxText's loss by vocabulary tiling, `num_vocab_tiling` of 2 or more in its config."""

from typing import Any

import jax
import jax.numpy as jnp

from flax_modules.integrations import check_version
from flax_modules.nnx import LossHead

# The version whose loss the tests have run.
TESTED = "0.2.5"


def patch_vocab_tiling(**options: Any) -> None:
    """Has MaxText's `train.loss_fn` use a `LossHead` where it would tile the vocabulary.

    Training, evaluation and SFT then do, with `num_vocab_tiling=2` in the config; a larger number is the same. It holds
    for the whole process, in all that is compiled from then on.

    Args:
        **options: of the `LossHead`, as `implementation`, `backward` or `scratch_bytes`; a `precision` takes the place
            of the config's `matmul_precision`.

    Raises:
        ModuleNotFoundError: MaxText is not installed, or a package that it imports.
    """
    check_version("maxtext", TESTED)
    from maxtext.trainers.pre_train import train

    def loss(model: Any, hidden_states: jax.Array, data: dict[str, Any], config: Any, is_train: bool) -> Any:
        decoder, asked = model.decoder, dict(options)
        hidden = decoder.decoder_norm(hidden_states)
        hidden = decoder.dropout(hidden, deterministic=not (is_train and config.enable_dropout))
        if config.parameter_memory_host_offload:
            raise NotImplementedError("parameter_memory_host_offload=True: the head reads parameters on the device")
        if config.logits_via_embedding:
            # Whatever the dtype, MaxText multiplies by a table of bfloat16.
            weight = jnp.asarray(model.token_embedder.embedding[...], jnp.bfloat16)
            of_model: dict[str, Any] = {
                "vocab_axis": 0,
                "logit_scale": hidden.shape[-1] ** -0.5 if config.normalize_embedding_logits else 1.0,
                "logit_softcap": config.final_logits_soft_cap or None,
            }
        else:
            weight, of_model = decoder.logits_dense, {"vocab_axis": 1}
            asked.setdefault("precision", jax.lax.Precision(config.matmul_precision))
        head = LossHead.of(weight, **of_model, z_loss=config.z_loss_multiplier, reduction="sum", **asked)
        labels = jnp.where(data["targets_segmentation"] != 0, data["targets"], -1)  # no label
        # Metrics are not free: the accuracy needs the largest logit.
        found = head(hidden, labels, return_metrics=config.z_loss_multiplier > 0)
        return (found[0], found[1].z_loss) if isinstance(found, tuple) else (found, jnp.zeros(()))

    train.vocab_tiling_nnx_loss = loss
