"""Torch's storage writer and reader: thin adapters for `dcp.save` and `dcp.load`."""
