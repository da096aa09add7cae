"""Measured tile shapes: tables, their choice, and what measures them for `pallas_ce.tune`."""
