"""The command line `ckpt-storage`: parse, call one function of the library, print, exit code."""

from __future__ import annotations

import sys

__all__ = ["main"]

_NEEDED = frozenset({"click", "rich"})


def main() -> None:
    """Run the command line on `sys.argv` and exit with its code."""
    try:
        import rich  # noqa: F401, PLC0415  # found missing now, not in the middle of a table

        from .app import app  # noqa: PLC0415  # needs click
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _NEEDED:
            raise
        sys.stderr.write(
            f"ckpt-storage: the command line needs {error.name}, which is not installed. "
            "Run: pip install 'ckpt-storage[cli]'\n"
        )
        sys.exit(2)
    app()
