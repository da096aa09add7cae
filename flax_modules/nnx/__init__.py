"""Loss heads for models written in `flax.nnx`."""

from flax_modules.nnx.loss_head import LossHead
from flax_modules.nnx.multi_token import MultiTokenLossHead

__all__ = ["LossHead", "MultiTokenLossHead"]
