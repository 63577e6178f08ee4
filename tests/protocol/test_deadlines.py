"""The constants of the protocol: those on the page, and the inequalities between them."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import ckpt_storage
from ckpt_storage import Timeouts

PACKAGE = Path(ckpt_storage.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "save-protocol.md"

ROOMS = (
    *("background", "commit", "coordination", "dcp", "export", "loads", "manager", "saves"),
    *("source", "store", "transfer"),
)
"""Rooms that ranks run: not the command line, `doctor` and what users test with."""


def test_the_page_has_the_constants_of_the_code() -> None:
    """Each row of the table names a constant, its value and its module."""
    rows = re.findall(
        r"^\| `(\w+)` \| ([0-9.]+) \| `([a-z_.]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    stale = [
        (name, value)
        for name, value, module in rows
        if getattr(import_module(f"ckpt_storage.{module}"), name) != float(value)
    ]
    assert (len(rows) > 40, stale) == (True, [])


def test_the_page_has_every_constant_of_its_rooms() -> None:
    """Those of all rooms below: names that end in `_S`, but no rates."""
    page = PAGE.read_text("utf-8")
    modules = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text("utf-8")
        for room in ROOMS
        for path in (PACKAGE / room).rglob("*.py")
    }
    missing = [
        f"{module}.{name}"
        for module, source in modules.items()
        for names in re.findall(r"^(_?[A-Z]\w*_S\b[^:=]*)[:=]", source, re.MULTILINE)
        for name in names.replace(" ", "").split(",")
        if not name.endswith("BYTES_PER_S")
        and not re.search(rf"\| `{name}` \| [0-9.]+ \| `{re.escape(module)}` \|", page)
    ]
    assert missing == []


def test_the_inequalities_of_the_page_hold() -> None:
    """They order who gives up first, bound waits, and keep commits out of removed tombstones."""
    operation = import_module("ckpt_storage.coordination.operation")
    rounds = import_module("ckpt_storage.coordination.operation_rounds")
    session = import_module("ckpt_storage.saves.session")
    beat_s = import_module("ckpt_storage.background.worker").BEAT_S
    look_s = import_module("ckpt_storage.background.worker_process").LOOK_S
    max_age_s = import_module("ckpt_storage.commit.attempt")._MAX_AGE_S  # noqa: SLF001
    tombstone_age_s = import_module("ckpt_storage.commit.deletion").TOMBSTONE_AGE_S
    coordinator_s, member_s = operation._COORDINATOR_GRACE_S, operation._MEMBER_GRACE_S  # noqa: SLF001
    assert coordinator_s < member_s
    assert member_s + session._OUTCOME_S < 5  # noqa: SLF001
    assert coordinator_s + session._DISCARD_S < 5  # noqa: SLF001
    assert beat_s + look_s < Timeouts().silence
    assert 2 * Timeouts().plan < 600
    assert 2 * max_age_s < tombstone_age_s
    assert import_module("ckpt_storage.store.calls").CLEAN_UP_S < 5
    assert coordinator_s > rounds._MAX_POLL_S  # noqa: SLF001
    assert Timeouts().request < import_module("ckpt_storage.transfer.ranges")._READ_GRACE_S  # noqa: SLF001
