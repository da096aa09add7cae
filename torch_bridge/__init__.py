"""PyTorch bridge: the losses of `pallas_ce` for PyTorch models, exchanging tensors through DLPack without a copy.

The bridge arrives in a later release. Until then this package is empty: importing it works, with or without PyTorch.
"""
