"""Tile shapes and block sizes: what fits registers, shared memory and the scratch budget."""
