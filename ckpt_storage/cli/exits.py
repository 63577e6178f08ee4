"""The exit codes of the command line; `docs/cli.md` promises them.

Values only.
"""

from __future__ import annotations

__all__ = ["BROKEN_PIPE", "COULD_NOT_RUN", "FOUND", "INTERRUPTED", "SOUND"]

SOUND = 0
"""Done; and what was looked at is sound, or equal."""

FOUND = 1
"""Damage or a difference was found, or something could not be deleted."""

COULD_NOT_RUN = 2
"""It did not come to an answer: wrong usage, nothing there, the storage failed."""

INTERRUPTED = 130
"""128 and the number of SIGINT, as shells say it."""

BROKEN_PIPE = 141
"""128 and the number of SIGPIPE: whoever read the output has left."""
