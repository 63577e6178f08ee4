"""Every front door that opens a storage opens it with the data plane that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt_storage
from ckpt_storage.cli.app import app
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import Engine
from ckpt_storage.store.remote import RemoteStore
from ckpt_storage.testing.s3server import S3Server

STATE = {"w": torch.arange(64.0).reshape(8, 8)}
SOURCE = "s3://bucket/run"
ENGINES: tuple[Engine, ...] = ("fsspec", "obstore")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """A server with one checkpoint."""
    with S3Server() as running:
        running.create_bucket("bucket")
        ckpt_storage.save(STATE, SOURCE, storage_options=running.storage_options)
        yield running


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data planes of the stores that the test opens."""
    seen: list[str] = []
    make = RemoteStore.__init__

    def made(self: RemoteStore, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        seen.append(self.engine)

    monkeypatch.setattr(RemoteStore, "__init__", made)
    return seen


def read(server: S3Server, engine: Engine, _: str) -> None:
    """Open, read and check by the same data plane."""
    options = server.storage_options
    with ckpt_storage.open_checkpoint(SOURCE, storage_options=options, engine=engine) as found:
        assert torch.equal(found["w"].torch(), STATE["w"])
        assert found.verify().ok


def verify(server: S3Server, engine: Engine, _: str) -> None:
    """Check every byte."""
    assert ckpt_storage.verify(SOURCE, storage_options=server.storage_options, engine=engine).ok


def consolidate(server: S3Server, engine: Engine, to: str) -> None:
    """Export."""
    ckpt_storage.consolidate(SOURCE, to, storage_options=server.storage_options, engine=engine)


def convert(server: S3Server, engine: Engine, to: str) -> None:
    """Write another format."""
    options = server.storage_options
    ckpt_storage.convert(SOURCE, to, to="dcp", storage_options=options, engine=engine)


def copy(server: S3Server, engine: Engine, to: str) -> None:
    """Copy."""
    ckpt_storage.copy(SOURCE, to, storage_options=server.storage_options, engine=engine)


def chained(server: S3Server, engine: Engine, to: str) -> None:
    """Save and export."""
    options = server.storage_options
    ckpt_storage.save(STATE, to, consolidate=True, storage_options=options, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("call", [read, verify, consolidate, convert, copy, chained])
def test_a_front_door_opens_what_was_asked_for(
    server: S3Server,
    opened: list[str],
    call: Callable[[S3Server, Engine, str], None],
    engine: Engine,
) -> None:
    """All the stores that it opens, those of source and target alike."""
    call(server, engine, f"s3://bucket/{call.__name__}-{engine}")
    assert set(opened) == {engine}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("command", ["verify", "cp", "convert", "consolidate"])
def test_a_command_passes_it_on(
    server: S3Server,
    opened: list[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    engine: Engine,
) -> None:
    """As `--engine`."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(server.storage_options["key"]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(server.storage_options["secret"]))
    arguments = [command, SOURCE, "--engine", engine]
    if command != "verify":
        arguments.append(f"s3://bucket/cli-{command}-{engine}")
    if command == "convert":
        arguments += ["--to", "dcp"]
    endpoint = f"client_kwargs.endpoint_url={server.endpoint_url}"
    ended = CliRunner().invoke(app, [*arguments, "--storage-option", endpoint])
    assert ended.exit_code == 0, ended.output
    assert set(opened) == {engine}


@pytest.mark.parametrize(
    "call",
    [
        ckpt_storage.open_checkpoint,
        ckpt_storage.verify,
        ckpt_storage.consolidate,
        lambda path, **options: ckpt_storage.copy(path, f"{path}-copy", **options),
        lambda path, **options: ckpt_storage.convert(path, f"{path}-dcp", to="dcp", **options),
    ],
    ids=["open_checkpoint", "verify", "consolidate", "copy", "convert"],
)
def test_what_is_no_engine_is_refused(tmp_path: Path, call: Callable[..., object]) -> None:
    """Also where the storage needs none."""
    ckpt_storage.save(STATE, tmp_path / "run")
    with pytest.raises(InvalidInputError, match="'rust'"):
        call(tmp_path / "run", engine="rust")
