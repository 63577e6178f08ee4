"""A mount by rclone with a write-back cache: a single writer, and neither durable nor ordered."""

from __future__ import annotations

import logging

import pytest
from journeys import Journeys
from servers import Running
from suites import ProbedSuite, ReplacesInSteps

import ckpt_storage


class TestMountSuite(ProbedSuite, ReplacesInSteps):
    """The suite; the mount lacks exclusive creation, and renames by a copy and a deletion."""

    many, at = 30, "mount_root"
    # It makes no links that are seen as one file; callers write the bytes.
    refuses_copies = True


class TestMountJourneys(Journeys):
    """The journeys."""

    at = "mount_root"


def test_a_save_warns_that_it_may_be_lost(
    mount_root: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a process, by the type of the file system; saves elsewhere do not."""
    monkeypatch.setattr("ckpt_storage.commit.attempt._WARNED", set())
    caplog.set_level(logging.WARNING, "ckpt_storage")
    for step in (1, 2):
        ckpt_storage.save({"step": step}, f"{mount_root.url}/step-{step}")
    found = [text for text in caplog.messages if "not durable" in text]
    assert len(found) == 1
    assert "fuse.rclone" in found[0]


def test_a_doctor_says_that_saves_may_be_lost(mount_root: Running) -> None:
    """It has a row of its own, and an advice."""
    found = ckpt_storage.diagnose(mount_root.url)
    (row,) = [probe for probe in found.probes if probe.name == "durable"]
    assert (row.outcome, "not ordered" in row.detail) == ("no", True)
    assert any("native URL" in advice for advice in found.advice)
