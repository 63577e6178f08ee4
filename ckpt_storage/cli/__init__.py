"""The command line `ckpt-storage`: parse, call one function of the library, print, exit code."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line on `sys.argv` and exit with its code."""
    if sys.platform == "win32":
        print("ckpt-storage runs on Linux and macOS. On Windows, use WSL.", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    _open_missing_streams()
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


def _open_missing_streams() -> None:
    """Open what was closed when the process began: files would get the numbers of these streams."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(number)
        except OSError:
            os.dup2(opened, number)
        # Never closed: a stream lives as long as the process.
        stream = open(opened, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115, PTH123
        setattr(sys, name, stream)
