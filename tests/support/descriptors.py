"""Which files a process has open: what a test that leaves none open looks at.

What was open before may be closed meanwhile: idle connections of earlier tests in the same process
end at any time. So what is open is a set, and afterwards a part of it: `open_files() <= before`.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path("/proc/self/fd")


def open_files() -> set[int]:
    """Return the descriptors of this process."""
    listed = os.listdir(_FOLDER)  # noqa: PTH208  # complete, and closed, before one is looked at
    return {int(number) for number in listed if os.path.lexists(_FOLDER / number)}
