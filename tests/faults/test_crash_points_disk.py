"""A save to a disk survives every fault at every system call; S3 has a file of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from crash_cases import KINDS, check_every_system_call, quiet_folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_to_a_disk_survives_every_fault_at_every_system_call(
    monkeypatch: pytest.MonkeyPatch, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """Old or new after each, no temporary file after an error, and the next save succeeds."""
    with quiet_folder(monkeypatch) as folder:
        check_every_system_call(monkeypatch, folder, kind, record_property)
