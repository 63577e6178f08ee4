"""The `.metadata` of stock torch: everything in it is found."""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_samples import made_metadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.stock_metadata import StockMetadata, decode_stock_metadata

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def saved_by_torch(state: dict[str, Any], folder: Path) -> bytes:
    """Return the `.metadata` that stock torch writes for a state dict."""
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return (folder / ".metadata").read_bytes()


def assert_tells_all(found: StockMetadata, expected: Metadata) -> None:
    """Compare what was decoded with the objects that torch's own pickle.load returns."""
    told = expected.state_dict_metadata
    blobs = {fqn for fqn, value in told.items() if isinstance(value, BytesStorageMetadata)}
    assert found.blobs == blobs
    assert found.tensors.keys() == told.keys() - blobs
    for fqn, tensor in found.tensors.items():
        described: Any = told[fqn]
        assert f"torch.{tensor.dtype}" == str(described.properties.dtype)
        assert tensor.shape == tuple(described.size)
        assert list(tensor.boxes) == [(tuple(c.offsets), tuple(c.sizes)) for c in described.chunks]
    items = {}
    for index, info in (expected.storage_data or {}).items():
        key = (index.fqn, None if index.offset is None else tuple(index.offset))
        transforms = tuple(info.transform_descriptors or ())
        items[key] = (info.relative_path, info.offset, info.length, transforms)
    assert {key: astuple(item) for key, item in found.items.items()} == items
    assert found.paths == expected.planner_data


def with_old_properties() -> Metadata:
    """Return metadata with the properties of tensors that torch 2.0 to 2.2 wrote."""
    metadata = made_metadata()
    for described in metadata.state_dict_metadata.values():
        if isinstance(described, TensorStorageMetadata):
            old = OldTensorProperties(dtype=described.properties.dtype)
            described.properties = old  # type: ignore[assignment]
    return metadata


class TestStockFiles:
    """What torch writes is decoded as torch itself reads it."""

    def test_all_dtypes_and_nested_state(self, tmp_path: Path) -> None:
        """Tensors of every dtype, nested containers and blobs are all found."""
        # Torch's own planner fails on the bits dtypes (`torch._utils._element_size`).
        names = [name for name in DTYPES if not name.startswith("bits")]
        tensors = {
            name: torch.zeros(32, dtype=torch.uint8).view(getattr(torch, name)) for name in names
        }
        state = {
            "model": {**tensors, "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.0)},
            "step": 3,
            "optim": [torch.ones(2), {"lr": 0.1, 7: torch.zeros(1)}, ("a", None)],
        }
        data = saved_by_torch(state, tmp_path / "ckpt")
        found = decode_stock_metadata(data)
        expected = pickle.loads(data)
        assert_tells_all(found, expected)
        assert {found.tensors[f"model.{name}"].dtype for name in names} == set(names)
        assert "step" in found.blobs

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_every_binary_protocol(self, protocol: int) -> None:
        """Many chunks, large counts, transforms and ids are found in pickles of all protocols."""
        metadata = made_metadata(rank_count=300)
        found = decode_stock_metadata(pickle.dumps(metadata, protocol))
        assert_tells_all(found, metadata)

    def test_torch_2_0(self) -> None:
        """Old files have other classes for properties and no version or storage metadata."""
        metadata = with_old_properties()
        for name in ("version", "storage_meta"):
            del metadata.__dict__[name]
        for info in metadata.storage_data.values():
            info.__dict__.pop("transform_descriptors")
        found = decode_stock_metadata(pickle.dumps(metadata))
        assert_tells_all(found, metadata)

    @pytest.mark.parametrize("make", [made_metadata, with_old_properties])
    def test_enums_pickled_by_name(self, make: Callable[[], Metadata]) -> None:
        """Files of Python 3.11.0 to 3.11.3, which pickled enums through getattr, are read."""
        metadata = make()

        class ByName(pickle.Pickler):
            def reducer_override(self, obj: object) -> Any:
                if isinstance(obj, enum.Enum):
                    return getattr, (type(obj), obj.name)
                return NotImplemented

        stream = io.BytesIO()
        ByName(stream).dump(metadata)
        assert b"getattr" in stream.getvalue()
        assert_tells_all(decode_stock_metadata(stream.getvalue()), metadata)

    @pytest.mark.parametrize(
        "given_id",
        ["s3://bucket/run", pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath(r"C:\a\b"), None],
    )
    def test_checkpoint_ids(self, given_id: Any) -> None:
        """The id may be text, a path of either system, or nothing."""
        data = pickle.dumps(made_metadata(storage_meta=StorageMeta(given_id)), 2)
        for spelt in (data, data.replace(b"cpathlib\n", b"cpathlib._local\n")):
            assert decode_stock_metadata(spelt).tensors

    @pytest.mark.parametrize("planner_data", [None, 7, [1], {"a": "b"}, {"a": (1.5,)}, {3: ("a",)}])
    def test_other_planners(self, planner_data: object) -> None:
        """What is no map from FQNs to paths of keys counts as absent."""
        metadata = made_metadata(planner_data=planner_data)
        assert decode_stock_metadata(pickle.dumps(metadata)).paths is None

    @pytest.mark.parametrize("kind", [dict, OrderedDict])
    def test_unusual_containers(self, kind: Callable[..., Any]) -> None:
        """An OrderedDict is as good as a dict, a list of sizes as a torch.Size; sets are inert."""
        metadata = made_metadata(planner_data=kind({"a": ("a",)}))
        metadata.state_dict_metadata["scalar"].size = []  # type: ignore[union-attr]
        metadata.mystery = [{1, 2}, frozenset({3}), b"x", 1.5, -(1 << 70)]  # type: ignore[attr-defined]
        found = decode_stock_metadata(pickle.dumps(metadata))
        assert found.paths == {"a": ("a",)}
        assert found.tensors["scalar"].shape == ()

    def test_bytes_behind_the_pickle_are_allowed(self) -> None:
        """A footer does not disturb."""
        data = pickle.dumps(made_metadata())
        assert decode_stock_metadata(data + b"footer \x80\x04.") == decode_stock_metadata(data)
