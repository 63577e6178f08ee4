"""Test tools for authors of backends: the suite that every store passes, and faults."""
