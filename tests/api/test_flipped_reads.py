"""One wrong byte in an answer is not damage: it is read again, from the storage itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import flipped_reads as flips
import pytest
import s3_server
import torch
from flipping_server import FlippingServer

from ckpt_storage import IntegrityError, load, save, verify
from ckpt_storage.store import open_store
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.transfer.objects import read_twice


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("flips") / "run"
    flips.save_steps(found)
    return found


@pytest.mark.parametrize("kind", flips.KINDS)
def test_a_wrong_byte_from_a_cache_costs_no_step(root: Path, kind: str) -> None:
    """A restore gives the newest step whatever file one wrong byte comes from."""
    path = flips.newest_file(flips.newest_of(root), kind)
    for position in (0, path.stat().st_size // 2, path.stat().st_size - 1):
        assert flips.restored_step(root, flips.CachedFlip(path, position)) == flips.STEPS[-1]


@pytest.mark.parametrize("kind", flips.KINDS)
def test_verify_reads_a_wrong_byte_again(root: Path, kind: str) -> None:
    """A wrong byte in one answer is no finding."""
    path = flips.newest_file(flips.newest_of(root), kind)
    posix = flips.CachedFlip(path, path.stat().st_size // 2)
    with flips.reading_through(posix):
        assert verify(flips.newest_of(root)).ok
    assert posix.was_read


@pytest.mark.parametrize("kind", flips.KINDS)
def test_a_wrong_byte_on_the_disk_is_found(root: Path, kind: str) -> None:
    """What both reads give is damage."""
    newest = flips.newest_of(root)
    path = flips.newest_file(newest, kind)
    assert flips.damage_is_found(path, path.stat().st_size // 2, newest)


@pytest.mark.parametrize("suffix", [".distcp", "manifest.json", "rank-00000.json", "00000001.json"])
def test_a_wrong_byte_from_a_server_is_read_again(suffix: str) -> None:
    """A load from an object store survives one wrong byte, and not two in a row."""
    with FlippingServer() as server:
        server.create_bucket("bkt")
        options: dict[str, Any] = {"storage_options": server.storage_options}
        save({"w": torch.arange(1000.0)}, "s3://bkt/run", **options)
        server.flip(suffix)
        state = {"w": torch.zeros(1000)}
        load(state, "s3://bkt/run", **options)
        assert torch.equal(state["w"], torch.arange(1000.0))
        assert server.left_count == 0
        server.flip(suffix, 2)
        with pytest.raises(IntegrityError, match="read twice"):
            load(state, "s3://bkt/run", **options)


def test_the_second_read_takes_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that garbles bytes is not asked again."""
    connections: list[object] = []
    accept = s3_server._Listener.process_request  # noqa: SLF001  # connections have no public face

    def count(listener: Any, request: Any, address: Any) -> None:
        connections.append(address)
        accept(listener, request, address)

    monkeypatch.setattr(s3_server._Listener, "process_request", count)  # noqa: SLF001  # as above
    with FlippingServer() as server:
        server.create_bucket("bkt")
        options: dict[str, Any] = {"storage_options": server.storage_options}
        store = open_store("s3://bkt/run", **options)
        store.put("a", b"sound")
        server.flip("a")
        before = len(connections)

        def read() -> bytes:
            data = store.get("a").data
            if data != b"sound":
                raise IntegrityError("a mismatch")
            return data

        assert read_twice(store, "a", read) == b"sound"
        assert len(connections) == before + 1


def test_a_restore_of_an_older_step_is_an_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Falling back is said at level ERROR, with the step that is lost and the reason."""
    flips.save_steps(tmp_path / "run")
    newest = flips.newest_of(tmp_path / "run")
    for shard in newest.glob("saves/*/*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    with caplog.at_level(logging.ERROR, "ckpt_storage"):
        assert flips.restored_step(tmp_path / "run", Posix()) == flips.STEPS[-2]
    (message,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.ERROR
    ]
    assert "LOST" in message
    assert newest.name in message
    assert "does not have the checksum" in message
