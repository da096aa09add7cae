"""The public functions: checks, then one jitted call each."""
