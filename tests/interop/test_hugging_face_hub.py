"""The Hub as a storage: `hf://`, by the client of huggingface_hub, beside a server with its routes.

The routes are those of https://huggingface.co/docs/hub/api: `tree` lists a folder, `paths-info`
describes paths, `resolve` sends a file or a range of it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp
from servers import send

import ckpt_storage
from ckpt_storage import RetryPolicy, StorageError
from ckpt_storage.store import open_store

pytest.importorskip("huggingface_hub")

REPO = "datasets/me/run"
STATE: dict[str, Any] = {"a": torch.arange(20_000.0), "b": torch.arange(10.0), "step": 3}


def test_a_hub_that_does_not_answer_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client's errors are of a library that fsspec's other clients do not use."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    store = open_store("hf://datasets/me/run", retry=RetryPolicy(attempt_count=1))
    with pytest.raises(StorageError) as caught:
        store.stat("x")
    assert (caught.value.kind, caught.value.retryable) == ("connection", True)
    store.close()


class Hub(ThreadingHTTPServer):
    """A folder as the dataset `me/run`; `requests` are those for files."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[str] = []
        self.options = {"endpoint": f"http://127.0.0.1:{self.server_address[1]}", "token": False}

    def entry_of(self, path: Path) -> dict[str, object]:
        name = path.relative_to(self.folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        return {"type": "file", "path": name, "oid": "1" * 40, "size": path.stat().st_size}


class Handler(BaseHTTPRequestHandler):
    """The routes of a `Hub`."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def _answer(self) -> None:
        url, folder = urlsplit(unquote(self.path)), self.server.folder
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        tree = re.fullmatch(rf"/api/{REPO}/tree/main/?(.*)", url.path)
        file = re.fullmatch(rf"/{REPO}/resolve/main/(.+)", url.path)
        if file is not None:
            self._send_file(folder / file[1])
        elif tree is not None:
            self._send_tree(folder / tree[1], parse_qs(url.query))
        elif url.path == f"/api/{REPO}/paths-info/main":
            paths = [folder / name for name in parse_qs(body).get("paths", [])]
            self._send_json([self.server.entry_of(path) for path in paths if path.exists()])
        elif url.path in {f"/api/{REPO}", f"/api/{REPO}/revision/main"}:
            self._send_json({"id": "me/run", "_id": "1", "sha": "2" * 40, "tags": []})
        else:
            self._send_absent()

    def _send_tree(self, path: Path, query: dict[str, list[str]]) -> None:
        if not path.is_dir():
            self._send_absent()
            return
        is_recursive = query.get("recursive", ["false"])[0].lower() == "true"
        paths = path.rglob("*") if is_recursive else path.iterdir()
        self._send_json([self.server.entry_of(each) for each in sorted(paths)])

    def _send_file(self, path: Path) -> None:
        wanted = self.headers.get("Range", "")
        self.server.requests.append(f"{self.command} {path.name} {wanted}")
        if not path.is_file():
            self._send_absent()
            return
        data = path.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if match is None:
            send(self, 200, data, {})
            return
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        content_range = f"bytes {start}-{stop - 1}/{len(data)}"
        send(self, 206, data[start:stop], {"Content-Range": content_range})

    def _send_absent(self) -> None:
        send(self, 404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _send_json(self, value: object) -> None:
        send(self, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    do_GET = do_HEAD = do_POST = _answer  # noqa: N815  # the base class's

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Serve a checkpoint of each writer."""
    folder = tmp_path / "hub"
    ckpt_storage.save(STATE, folder / "ours")
    dcp.save(STATE, checkpoint_id=folder / "stock", no_dist=True)
    ckpt_storage.consolidate(folder / "ours", folder / "export", include="*")
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(30)


@pytest.mark.parametrize("writer", ["ours", "stock", "export"])
def test_a_checkpoint_on_the_hub_is_read(hub: Hub, writer: str) -> None:
    """Ours, one of stock DCP, and a folder of safetensors."""
    with ckpt_storage.open_checkpoint(
        f"hf://{REPO}/{writer}", storage_options=hub.options
    ) as checkpoint:
        assert torch.equal(checkpoint["a"].torch(), STATE["a"])
        assert torch.equal(checkpoint["b"].torch(), STATE["b"])
    assert all(request.startswith("GET") for request in hub.requests)


def test_one_tensor_costs_two_requests(hub: Hub) -> None:
    """The manifest of its rank and a range of the rank's file; a further tensor costs one."""
    url = f"hf://{REPO}/ours"
    with ckpt_storage.open_checkpoint(url, storage_options=hub.options) as checkpoint:
        counts = [len(hub.requests)]
        for name in ("a", "b"):
            assert torch.equal(checkpoint[name].torch(), STATE[name])
            counts.append(len(hub.requests))
    assert [counts[1] - counts[0], counts[2] - counts[1]] == [2, 1], hub.requests


def test_checkpoints_on_the_hub_are_listed_and_loaded(hub: Hub) -> None:
    """A root is a folder of the repository."""
    infos = ckpt_storage.list_checkpoints(f"hf://{REPO}", storage_options=hub.options)
    assert "ours" in [info.name for info in infos]
    target: dict[str, Any] = {"a": torch.zeros(20_000), "b": torch.zeros(10), "step": 0}
    ckpt_storage.load(target, f"hf://{REPO}/ours", storage_options=hub.options)
    assert torch.equal(target["a"], STATE["a"])
    assert target["step"] == 3
