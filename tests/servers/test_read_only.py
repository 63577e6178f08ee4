"""What takes no writes: zip archives, and a plain HTTP server, where known names are opened.

Ranges are those of RFC 9110, section 14: a server may ignore them and answer 200 with it all.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded
from hostile_names import tree
from safetensors.torch import load_file
from servers import send

import ckpt_storage
from ckpt_storage import (
    CheckpointGoneError,
    CheckpointStorageReader,
    FormatError,
    IntegrityError,
    InvalidInputError,
    RetryPolicy,
    StorageError,
    UnsafeContentError,
    UnsupportedByStoreError,
)

pytest.importorskip("aiohttp")

STATE: dict[str, Any] = {
    "model": {f"layers.{n}.w": seeded(n, 256, 256) for n in range(8)},
    "step": 7,
}
ONCE = RetryPolicy(attempt_count=1)


@dataclass(kw_only=True)
class Web:
    """A folder served over HTTP; `requests` are method, path and Range of each request."""

    url: str = ""
    has_ranges: bool = True
    failure_status: int | None = None
    absent: tuple[int, bytes] = (404, b"no\n")
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Web]:
    """Serve a folder; it lists nothing."""
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            wanted = self.headers.get("Range", "")
            web.requests.append((self.command, self.path, wanted))
            web.heads.append(dict(self.headers.items()))
            file = folder / self.path.strip("/")
            if web.failure_status or not file.is_file():
                status, body = web.absent
                send(self, web.failure_status or status, body, {})
                return
            data, total = file.read_bytes(), file.stat().st_size
            match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted) if web.has_ranges else None
            heads = {"ETag": f'"{total}"'}
            if match is None:
                send(self, 200, data, heads)
                return
            first, last = match.groups()
            start = int(first) if first else max(0, total - int(last))
            stop = min(int(last) + 1, total) if first and last else total
            heads["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
            send(self, 206, data[start:stop], heads)

        do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _answer  # noqa: N815  # the base class's

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Print nothing of clients that have gone."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    """Serve a root with one checkpoint, `run`."""
    ckpt_storage.save(STATE, tmp_path / "www" / "run", sync_files=False)
    with served(tmp_path / "www") as server:
        yield server


def _empty() -> dict[str, Any]:
    return {"model": {name: torch.zeros(256, 256) for name in STATE["model"]}, "step": 0}


def _load(url: str, _: Path) -> object:
    ckpt_storage.load(target := _empty(), url)
    return target


def _dcp_load(url: str, _: Path) -> object:
    dcp.load(target := _empty(), storage_reader=CheckpointStorageReader(url), no_dist=True)
    return target


def _opened(url: str, _: Path) -> object:
    with ckpt_storage.open_checkpoint(url) as opened:
        names = STATE["model"]
        tensors = {name: torch.from_numpy(opened[f"model.{name}"][:]) for name in names}
        return {"model": tensors, "step": opened["step"]}


def _copied(url: str, folder: Path) -> object:
    ckpt_storage.copy(url, folder / "copy")
    return _load(str(folder / "copy"), folder)


def _exported(url: str, folder: Path) -> object:
    ckpt_storage.consolidate(url, folder / "hf")
    return {"model": load_file(folder / "hf" / "model.safetensors"), "step": 7}


def _converted(url: str, folder: Path) -> object:
    ckpt_storage.convert(url, folder / "all.pt", to="torch_save")
    return torch.load(folder / "all.pt", weights_only=True)


@pytest.mark.parametrize("read", [_load, _dcp_load, _opened, _copied, _exported, _converted])
def test_a_checkpoint_is_read_over_http(
    web: Web, tmp_path: Path, read: Callable[[str, Path], object]
) -> None:
    """Every reader gets what was saved, and sends the server no request that would write."""
    assert same(read(f"{web.url}/run", tmp_path), STATE)
    assert {method for method, _, _ in web.requests} <= {"GET", "HEAD"}


def test_a_checkpoint_is_verified_over_http(web: Web) -> None:
    """Every byte of every file is held against its checksum."""
    report = ckpt_storage.verify(f"{web.url}/run")
    assert report.ok, report
    assert report.checked_bytes > 8 * 256 * 256 * 4


def test_a_tensor_costs_one_request(web: Web) -> None:
    """Opening reads documents; the first tensor of a rank its manifest, then each is one range."""
    with ckpt_storage.open_checkpoint(f"{web.url}/run") as opened:
        counts = [len(web.requests)]
        for number in (3, 5):
            values = opened[f"model.layers.{number}.w"][:]
            assert same(torch.from_numpy(values), STATE["model"][f"layers.{number}.w"])
            counts.append(len(web.requests))
    assert counts == [4, 6, 7], web.requests
    assert all(wanted.startswith("bytes=") for _, _, wanted in web.requests[5:])


def test_options_go_with_each_request(web: Web) -> None:
    """A token in `storage_options` is a header of every request, and in no error."""
    options = {"headers": {"Authorization": "Bearer secret-token"}}
    ckpt_storage.load(_empty(), f"{web.url}/run", storage_options=options)
    assert {heads.get("Authorization") for heads in web.heads} == {"Bearer secret-token"}


def test_a_server_without_ranges_is_refused_by_name(web: Web) -> None:
    """It would send a whole file for each tensor; the error says so."""
    web.has_ranges = False
    with pytest.raises(UnsupportedByStoreError, match="server without ranges") as caught:
        ckpt_storage.load(_empty(), f"{web.url}/run", retry=ONCE)
    assert "Range header" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "kind"), [(500, "other"), (503, "throttled"), (401, "credentials")]
)
def test_a_server_that_fails_is_no_absent_checkpoint(web: Web, status: int, kind: str) -> None:
    """Only 404 and 410 mean that nothing is there."""
    web.failure_status = status
    with pytest.raises(StorageError) as caught:
        ckpt_storage.open_checkpoint(f"{web.url}/run", retry=ONCE)
    assert caught.value.kind == kind


def test_a_bucket_that_may_not_be_listed_is_named_as_a_reason(web: Web) -> None:
    """Amazon S3, "GetObject": without s3:ListBucket an absent key is 403 Access Denied, not 404."""
    web.absent = 403, b"<Error><Code>AccessDenied</Code></Error>"
    with pytest.raises(StorageError) as caught:
        ckpt_storage.open_checkpoint(f"{web.url}/nothing", retry=ONCE)
    assert caught.value.kind == "permission"
    assert "answers so for absent files, too" in str(caught.value)
    assert "s3:ListBucket" not in str(caught.value)


@pytest.mark.parametrize("name", ["run", "nothing"])
def test_a_server_with_a_page_for_absent_files_is_refused(web: Web, name: str) -> None:
    """Servers of single-page applications answer 200 for every path; the search for slots ends."""
    web.absent = 200, b"<!doctype html>\n"
    with pytest.raises(FormatError, match="it begins with b'<!doctype html"):
        ckpt_storage.open_checkpoint(f"{web.url}/{name}", retry=ONCE)
    assert len(web.requests) < 100


def test_a_server_that_is_not_there_is_a_lost_connection() -> None:
    """It is no absent checkpoint either."""
    with pytest.raises(StorageError) as caught:
        ckpt_storage.open_checkpoint("http://127.0.0.1:9/run", retry=ONCE)
    assert (caught.value.kind, caught.value.retryable) == ("connection", True)


def test_a_root_cannot_be_listed(web: Web) -> None:
    """HTTP has no listing, so a root is no empty one; neither is a URL without a checkpoint."""
    for call in (ckpt_storage.list_checkpoints, ckpt_storage.open_checkpoint):
        with pytest.raises(UnsupportedByStoreError, match="HTTP has no listing"):
            call(web.url)


@pytest.mark.parametrize("read", [_load, _dcp_load, _opened, _exported, _converted])
def test_a_checkpoint_of_stock_dcp_is_read_over_http(
    tmp_path: Path, read: Callable[[str, Path], object]
) -> None:
    """HTTP has no listing: `.metadata` names the files."""
    dcp.save(STATE, checkpoint_id=tmp_path / "www" / "run", no_dist=True)
    with served(tmp_path / "www") as server:
        assert same(read(f"{server.url}/run", tmp_path), STATE)
        assert {method for method, _, _ in server.requests} <= {"GET", "HEAD"}
        assert ckpt_storage.verify(f"{server.url}/run").ok


@pytest.mark.parametrize("max_file_bytes", ["5GB", "600KB"])
def test_weight_files_are_read_over_http(tmp_path: Path, max_file_bytes: str) -> None:
    """One file has its known name; of several the index, which has one too, names the others."""
    ckpt_storage.save(STATE, tmp_path / "source", sync_files=False)
    ckpt_storage.consolidate(
        tmp_path / "source", tmp_path / "www" / "run", max_file_bytes=max_file_bytes
    )
    with (
        served(tmp_path / "www") as server,
        ckpt_storage.open_checkpoint(f"{server.url}/run") as opened,
    ):
        tensors = {name: opened[name].torch() for name in opened}
    assert same(tensors, STATE["model"])


@pytest.mark.parametrize("name", ["../x", "/x", "http://127.0.0.1:9/x", "a/../../x"])
def test_an_index_over_http_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    """HTTP has no listing; what the index names beside the folder is not requested."""
    (tmp_path / "www" / "run").mkdir(parents=True)
    index = {"weight_map": {"w": name}}
    (tmp_path / "www" / "run" / "model.safetensors.index.json").write_text(json.dumps(index))
    with served(tmp_path / "www") as server, pytest.raises(UnsafeContentError, match="unsafe"):
        ckpt_storage.open_checkpoint(f"{server.url}/run")
    assert all(path.startswith("/run/") for _, path, _ in server.requests)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """A stock checkpoint whose values are gone is damaged, not absent."""
    dcp.save(STATE, checkpoint_id=tmp_path / "www" / "run", no_dist=True)
    for file in (tmp_path / "www" / "run").glob("*.distcp"):
        file.unlink()
    with (
        served(tmp_path / "www") as server,
        pytest.raises(IntegrityError, match=r"__0_0\.distcp, which .* needs, is missing"),
    ):
        ckpt_storage.load(_empty(), f"{server.url}/run")


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_save_over_an_open_one_is_noticed(tmp_path: Path) -> None:
    """Stock DCP writes the same names again: values of two saves must not mix."""
    folder = tmp_path / "www" / "run"
    dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    with (
        served(tmp_path / "www") as server,
        ckpt_storage.open_checkpoint(f"{server.url}/run") as opened,
    ):
        dcp.save({**STATE, "more": torch.zeros(9)}, checkpoint_id=folder, no_dist=True)
        with pytest.raises(CheckpointGoneError, match="was written again"):
            opened["model.layers.3.w"][:]


def test_a_copy_of_another_writers_checkpoint_is_refused_over_http(tmp_path: Path) -> None:
    """It copies all files of a folder, which only a listing names."""
    dcp.save(STATE, checkpoint_id=tmp_path / "www" / "run", no_dist=True)
    with (
        served(tmp_path / "www") as server,
        pytest.raises(UnsupportedByStoreError, match="HTTP has no listing") as caught,
    ):
        ckpt_storage.copy(f"{server.url}/run", tmp_path / "copy")
    assert "copies of checkpoints of other writers" in str(caught.value)


WRITERS: dict[str, Callable[[str], object]] = {
    "save": lambda url: ckpt_storage.save(STATE, url),
    "writer": ckpt_storage.CheckpointStorageWriter,
    "manager": ckpt_storage.CheckpointManager,
    "copy": lambda url: ckpt_storage.copy("run", url),
    "consolidate": ckpt_storage.consolidate,
    "delete": ckpt_storage.delete,
    "prune": lambda url: ckpt_storage.prune(url, keep=ckpt_storage.KeepLatest(1)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_writes_is_refused_before_a_request(web: Web, writer: str) -> None:
    """The error says that the scheme can only be read."""
    with pytest.raises(InvalidInputError, match="http:// can only be read"):
        WRITERS[writer](f"{web.url}/run")
    assert web.requests == []


@pytest.mark.parametrize(
    "url", ["github://run", "tar://run", "simplecache::s3://b/r", "zip://run::file:///x.zip"]
)
def test_other_read_only_schemes_are_refused_by_name(url: str) -> None:
    """They wrap another file system, or need a client that is not tried."""
    with pytest.raises(InvalidInputError, match=r"can only be read|chain of file systems"):
        ckpt_storage.open_checkpoint(url)


@pytest.mark.parametrize("url", ["tar://run", "libarchive://run"])
def test_an_archive_that_is_not_read_in_place_is_to_be_unpacked(tmp_path: Path, url: str) -> None:
    """The next step is what a reader can do, not where to write."""
    options = {"fo": str(tmp_path / "run.tar.gz")}
    with pytest.raises(InvalidInputError, match="can only be read") as failure:
        ckpt_storage.load(_empty(), url, storage_options=options)
    assert str(failure.value.next_step).startswith("Unpack the archive")


@pytest.mark.parametrize("stock", [False, True])
def test_a_checkpoint_is_read_out_of_an_archive(tmp_path: Path, *, stock: bool) -> None:
    """`fo` names the archive; checkpoints of stock DCP are listed there."""
    folder = tmp_path / "www" / "run"
    if stock:
        dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    else:
        ckpt_storage.save(STATE, folder, sync_files=False)
    options = {"fo": shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path / "www")}
    url = "zip://run"
    ckpt_storage.load(target := _empty(), url, storage_options=options)
    assert same(target, STATE)
    assert ckpt_storage.verify(url, storage_options=options).ok
    infos = ckpt_storage.list_checkpoints("zip://", storage_options=options)
    assert [info.name for info in infos] == ["run"]
    with pytest.raises(InvalidInputError, match="zip:// can only be read"):
        ckpt_storage.save(STATE, url, storage_options=options)


@pytest.mark.parametrize("name", ["../x", "./run/../../x", "run/a/../../../x", "run/a\\b"])
def test_no_member_of_an_archive_is_copied_elsewhere(tmp_path: Path, name: str) -> None:
    """Archives keep names as their writers spelt them."""
    inside, target = tmp_path / "www" / "run", tmp_path / "deep" / "copy"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=inside, no_dist=True)
    (tmp_path / "deep").mkdir()
    options = {"fo": shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path / "www")}
    with zipfile.ZipFile(options["fo"], "a") as archive:
        archive.writestr(name, b"evil")
    before = tree(tmp_path)
    with contextlib.suppress(UnsafeContentError):
        ckpt_storage.copy("zip://run", target, storage_options=options)
    after = {path: data for path, data in tree(tmp_path).items() if not path.startswith("deep/")}
    assert after == {path: data for path, data in before.items() if not path.startswith("deep/")}
    assert set(tree(tmp_path / "deep")) <= {"copy", "copy/.metadata", "copy/__0_0.distcp"}
