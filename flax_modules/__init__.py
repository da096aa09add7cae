"""Flax modules that own a language model's head and return its loss without storing the logits.

`flax_modules.nnx` is for models written in `flax.nnx`, `flax_modules.linen` for models written in `flax.linen`; both
offer `LossHead` and `MultiTokenLossHead` with the same options, on top of `pallas_ce.linear_cross_entropy`. They
need the extra `flax`.
"""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ModuleNotFoundError("flax_modules needs Flax: pip install '.[flax]' in a clone of pallas-ce", name="flax")
