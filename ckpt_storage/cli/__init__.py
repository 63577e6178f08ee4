"""The command line `ckpt-storage`: parse, call one function of the library, print, exit code."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line on `sys.argv` and exit with its code."""
    try:
        from .app import app  # noqa: PLC0415  # needs click
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.stderr.write(
            "ckpt-storage: the command line needs click, which is not installed. "
            "Run: pip install 'ckpt-storage[cli]'\n"
        )
        sys.exit(2)
    app()
