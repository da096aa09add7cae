"""Loss heads for models written in `flax.linen`."""

from flax_modules.linen.loss_head import LossHead
from flax_modules.linen.multi_token import MultiTokenLossHead

__all__ = ["LossHead", "MultiTokenLossHead"]
