"""OpenSSH passes the suite of all backends and the journeys of users, mounted or not."""

from __future__ import annotations

from pathlib import Path

from journeys import Journeys
from servers import Running
from suites import SuiteAt

import ckpt_storage


class TestSftpSuite(SuiteAt):
    """The suite, by the client of sshfs, which is asynchronous."""

    many, at = 30, "openssh_root"


class TestSftpJourneys(Journeys):
    """The journeys, by the same client."""

    at = "openssh_root"


class TestMountSuite(SuiteAt):
    """The suite on a folder that the program sshfs mounted."""

    many, at = 30, "sshfs_root"
    # It makes no links that are seen as one file; callers write the bytes.
    refuses_copies = True


class TestMountJourneys(Journeys):
    """The journeys on such a folder."""

    at = "sshfs_root"


def test_a_checkpoint_goes_while_somebody_reads_it(sshfs_root: Running) -> None:
    """FUSE keeps an open file under a hidden name; the deletion succeeds all the same."""
    ckpt_storage.save({"step": 1}, sshfs_root.url)
    (shard,) = Path(sshfs_root.url).glob("saves/*/*.distcp")
    with shard.open("rb") as reading:
        ckpt_storage.delete(sshfs_root.url)
        assert ckpt_storage.list_checkpoints(Path(sshfs_root.url).parent) == []
        assert [path.name[:12] for path in shard.parent.iterdir()] == [".fuse_hidden"]
        assert reading.read(1)
