"""Tensors and arrays that share memory, and the order of the two frameworks' work on it."""
