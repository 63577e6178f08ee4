"""What is no storage, or does not answer: said so, in the words that the user can act on."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
from remote_tools import ONCE

import ckpt_storage
from ckpt_storage import InvalidInputError, StorageError
from ckpt_storage.store import Location, open_store


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s4://bucket/run", "Did you mean s3://?"),
        ("webdev://host/run", "Did you mean webdav://?"),
        ("gss://bucket/run", "Did you mean gs://?"),
        ("bgs://bucket/run", None),
        ("foo://bucket/run", None),
        ("mine://bucket/run", None),
    ],
)
def test_only_a_scheme_that_is_near_is_suggested(url: str, hint: str | None) -> None:
    """A scheme with another first letter is hardly what was meant."""
    with pytest.raises(InvalidInputError) as caught:
        Location.of(url)
    step = caught.value.next_step or ""
    assert (hint in step) if hint else ("Did you mean" not in step)
    assert "register_backend" in step


@pytest.mark.parametrize(
    "text",
    [
        "data:,x",  # RFC 2397, section 3: data:[<mediatype>][;base64],<data>
        "data:text/plain;base64,eA==",
        "http:/host/run",  # what pathlib makes of http://host/run
        "hf:/datasets/me/run",
        "webdav:/host/run",
        "zip:/run.zip",
    ],
)
def test_a_url_without_its_slashes_makes_no_folder(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is saved below the working folder when a URL was meant."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError):
        ckpt_storage.save({"step": 1}, text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["run:1", "run:1/step", "data:1/step", "10:30/step"])
def test_a_folder_may_have_a_colon(text: str) -> None:
    """A local name that no URL has stays one."""
    assert Location.of(text).is_local


def test_a_server_that_is_down_is_a_lost_connection() -> None:
    """Also where the client connects as it is made, as that of FTP does; the call is repeated."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store = open_store(f"ftp://127.0.0.1:{port}/run", retry=ONCE)
    with contextlib.closing(store), pytest.raises(StorageError) as caught:
        store.stat("x")
    assert (caught.value.kind, caught.value.retryable) == ("connection", True)
    assert "127.0.0.1" in str(caught.value)
