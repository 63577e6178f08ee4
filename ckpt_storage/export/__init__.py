"""Consolidation, conversion and copies."""
