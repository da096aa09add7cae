"""Measured tile shapes: tables, their choice, and the command that measures."""
