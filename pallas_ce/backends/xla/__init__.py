"""The portable backend: tiles over rows and vocabulary in plain JAX, compiled by XLA for any device."""

from pallas_ce.backends.xla.backend import XlaBackend

BACKEND = XlaBackend()
