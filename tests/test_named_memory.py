"""What the tests of memory without a name look with."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

from named_memory import left_of, named_memory
from test_staging_memory import linux


@linux
def test_memory_with_a_name_is_seen() -> None:
    """While it is open, and while it is only mapped; not any more once its name is taken away."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:  # looked at
        file.truncate(mmap.PAGESIZE)
        assert file.name in named_memory(os.getpid())
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    try:
        assert file.name in named_memory(os.getpid())
        assert left_of({file.name}) == {file.name}
    finally:
        Path(file.name).unlink()
    assert not [path for path in named_memory(os.getpid()) if path.startswith(file.name)]
    assert left_of({file.name}) == set()
    mapped.close()
