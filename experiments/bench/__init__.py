"""Benchmarks: measurements, their timing, and how results are kept and shown."""
