"""Benchmarks: what is measured, how it is timed, how results are kept and shown."""
