"""A run of pytest in a fork of a `Nursery`, which has imported all that is slow to import."""

from __future__ import annotations

import os
import sys

import pytest

__all__ = ["run_pytest"]


def run_pytest(folder: str, arguments: list[str]) -> None:
    """Run pytest in `folder`, with the package that is there, and exit with its code."""
    os.dup2(1, 2)  # one output
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    sys.exit(pytest.main(arguments))
