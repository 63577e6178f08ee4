"""The formats that `convert` reads and writes, one module each.

Knows nothing itself. Called by `converting`.
"""
