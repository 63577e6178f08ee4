"""File systems whose fsync promises nothing are known by their type."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_storage.store.backends.mounts import durability_problem, file_system_type


@pytest.mark.parametrize("kind", ["ext4", "fuse.rclone", "fuse.goofys", "fuse.sshfs", "nfs4"])
def test_a_mount_with_a_write_back_cache_is_known(tmp_path: Path, kind: str) -> None:
    """Also for a folder that is not there yet; other mounts are taken at their word."""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 28 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
        f"36 35 {os.major(device)}:{os.minor(device)} / /mnt/a\\040b rw shared:1 master:2 "
        f"- {kind} remote:bucket rw,user_id=0\n"
    )
    assert file_system_type(str(tmp_path / "not" / "yet"), mounts=mounts) == kind
    problem = durability_problem(str(tmp_path), mounts=mounts)
    assert bool(problem) == (kind in {"fuse.rclone", "fuse.goofys"})
    assert kind in problem or not problem


def test_nothing_is_said_where_mounts_are_not_listed(tmp_path: Path) -> None:
    """On another system, or of a device that no line names."""
    assert file_system_type(str(tmp_path), mounts=tmp_path / "none") == ""
    (tmp_path / "mountinfo").write_text("22 28 0:999999 / /sys rw - sysfs sysfs rw\n")
    assert durability_problem(str(tmp_path), mounts=tmp_path / "mountinfo") == ""
