"""A save to a disk or to S3 survives every fault at every system call, or request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from commit_tools import IN_TURN
from crash_cases import KINDS, check_every_request, check_every_system_call, quiet_folder

Note = Callable[[str, object], None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_to_a_disk_survives_every_fault_at_every_system_call(
    monkeypatch: pytest.MonkeyPatch, kind: str, record_property: Note
) -> None:
    """Old or new after each, no temporary file after an error, and the next save succeeds."""
    with quiet_folder(monkeypatch) as folder:
        check_every_system_call(monkeypatch, folder, kind, record_property)


@pytest.mark.parametrize("order", IN_TURN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_to_s3_survives_every_fault_at_every_request(
    monkeypatch: pytest.MonkeyPatch, kind: str, order: str, record_property: Note
) -> None:
    """Old or new after each, no open upload after an error, and the next save succeeds."""
    with quiet_folder(monkeypatch) as folder:
        check_every_request(monkeypatch, folder, kind, order, record_property)
