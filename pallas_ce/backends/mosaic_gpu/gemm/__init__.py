"""The matrix product that every kernel is built on: pipeline of loads, walk over tiles, register layouts."""
