"""Hosts of the acceptance core."""
