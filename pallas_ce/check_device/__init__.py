"""Checks this library on a user's own device: `python -m pallas_ce.check_device`."""
