"""Loads: plans, targets, shared reads, and `load`."""
