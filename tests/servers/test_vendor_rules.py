"""Rules of Google's and Microsoft's storages in front of their emulators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import pytest
import torch
from remote_tools import POLICY
from servers import Running
from vendor_rules import Layer, azure_immutability, behind, flipping, gcs_retention

import ckpt_storage
from ckpt_storage import StorageError
from ckpt_storage.store import open_store

Behind: TypeAlias = Callable[[Layer], AbstractContextManager[dict[str, Any]]]


@contextmanager
def _behind(root: Running, layer: Layer) -> Iterator[dict[str, Any]]:
    """Give options that reach a root through a layer."""
    options: dict[str, Any] = dict(root.storage_options)
    if "endpoint_url" in options:
        with behind(options["endpoint_url"], layer) as url:
            yield {**options, "endpoint_url": url}
        return
    parts = dict(part.partition("=")[::2] for part in options["connection_string"].split(";"))
    address, _, account = parts["BlobEndpoint"].rpartition("/")
    with behind(address, layer) as url:
        parts["BlobEndpoint"] = f"{url}/{account}"
        text = ";".join(f"{name}={value}" for name, value in parts.items() if name)
        yield {**options, "connection_string": text}


LOCKED = [("gcs_root", gcs_retention), ("azure_root", azure_immutability)]


@pytest.mark.parametrize(("at", "policy"), LOCKED, ids=["gcs", "azure"])
def test_a_bucket_whose_objects_stay_takes_checkpoints(
    request: pytest.FixtureRequest, at: str, policy: Callable[[], Layer]
) -> None:
    """A first save and its load work; a deletion is refused, and the error names the policy."""
    root: Running = request.getfixturevalue(at)
    with _behind(root, policy()) as options:
        how: dict[str, Any] = {"storage_options": options, "retry": POLICY}
        ckpt_storage.save({"x": torch.arange(9)}, root.url, **how)
        state = {"x": torch.zeros(9, dtype=torch.int64)}
        ckpt_storage.load(state, root.url, **how)
        assert torch.equal(state["x"], torch.arange(9))
        with pytest.raises(StorageError, match="retention policy or lock") as caught:
            ckpt_storage.delete(root.url, **how)
        assert caught.value.kind == "permission"


def test_a_blob_whose_bytes_change_on_their_way_is_sent_again(azure_root: Running) -> None:
    """Microsoft, "Put Blob" (Content-MD5): a body of another MD5 fails with 400, Md5Mismatch."""
    data = b"a body that is sent"
    with _behind(azure_root, flipping(data)) as options:
        store = open_store(azure_root.url, storage_options=options, retry=POLICY)
        store.put("x", data)
        assert store.get("x").data == data
        store.close()
