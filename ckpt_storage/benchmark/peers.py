"""Savers and loaders to compare with: stock torch and the AWS connector, where they can serve.

Knows how others are called, and torch's planner with no storage behind it. Called by `scenarios`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from ckpt_storage.store import Location

from .plugins import PluginClock
from .workload import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another writer and reader for DCP, made for a folder's path or URL."""

    name: str
    writer: Callable[[str], StorageWriter]
    reader: Callable[[str], StorageReader]

    def save(self, state: State, folder: Location, clock: PluginClock | None = None) -> None:
        """Save; all ranks. `clock`, if any, is told how long the plug-in takes."""
        writer = self.writer(folder.target)
        dcp.save(dict(state), storage_writer=writer if clock is None else clock.of(writer))

    def load(self, state: State, folder: Location, clock: PluginClock | None = None) -> None:
        """Load in place; all ranks. `clock` as for `save`."""
        reader = self.reader(folder.target)
        dcp.load(dict(state), storage_reader=reader if clock is None else clock.of(reader))

    def load_alone(self, targets: dict[str, torch.Tensor], folder: Location) -> None:
        """Load whole tensors on this rank alone."""
        dcp.load(dict(targets), storage_reader=self.reader(folder.target), no_dist=True)

    def write_file(self, folder: Location, name: str, data: bytes) -> None:
        """Write one file by the file system of the peer's writer."""
        writer: Any = self.writer(folder.target)
        with writer.fs.create_stream(f"{folder.target}/{name}", "wb") as stream:
            stream.write(data)


def peers_for(location: Location) -> list[Peer]:
    """Return the peers that reach this storage, installed ones only."""
    if location.is_local:
        return [_TORCH_FILES, _TORCH_SAFETENSORS]
    connector = _aws_connector(location) if location.protocol == "s3" else None
    return [_torch_fsspec(location), *([connector] if connector else [])]


def left_out(location: Location) -> list[str]:
    """Return which peers of this storage are not measured, and for want of what."""
    found = []
    if location.protocol == "s3" and _aws_connector(location) is None:
        found.append("the AWS connector: s3torchconnector cannot be imported")
    if not has_safetensors():
        found.append("exports by peers: safetensors is not installed")
    return found


def has_safetensors() -> bool:
    """Return whether weight files can be made as everyone else makes them."""
    return importlib.util.find_spec("safetensors") is not None


_TORCH_FILES = Peer(
    name="torch FileSystem", writer=dcp.FileSystemWriter, reader=dcp.FileSystemReader
)

_TORCH_SAFETENSORS = Peer(
    name="torch safetensors",
    writer=partial(dcp.HuggingFaceStorageWriter, save_distributed=True),
    reader=dcp.HuggingFaceStorageReader,
)


def _torch_fsspec(location: Location) -> Peer:
    from torch.distributed.checkpoint._fsspec_filesystem import (  # noqa: PLC0415  # its only place
        FsspecReader,
        FsspecWriter,
    )

    options = dict(location.storage_options)
    return Peer(
        name="torch Fsspec",
        writer=partial(FsspecWriter, **options),
        reader=partial(FsspecReader, **options),
    )


def _aws_connector(location: Location) -> Peer | None:
    try:
        from s3torchconnector import S3ClientConfig  # noqa: PLC0415  # an optional package
        from s3torchconnector._s3client import S3Client  # noqa: PLC0415  # an optional package
        from s3torchconnector.dcp import (  # noqa: PLC0415  # an optional package
            S3StorageReader,
            S3StorageWriter,
        )
        from s3torchconnector.dcp.s3_file_system import (  # noqa: PLC0415  # an optional package
            S3FileSystem,
        )
    except ImportError:
        return None
    options = location.storage_options
    inner: Mapping[str, Any] = options.get("client_kwargs", {})
    region = inner.get("region_name") or "us-east-1"
    # It takes credentials from nowhere else; this process does nothing but measure.
    for name, option in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")):
        if options.get(option):
            os.environ[name] = options[option]
    config = S3ClientConfig(force_path_style=True)
    endpoint = inner.get("endpoint_url") or options.get("endpoint_url")

    def reached(plugin: Any) -> Any:  # noqa: ANN401  # a writer or reader of the connector
        # Its classes take no endpoint; their file system does.
        client = S3Client(region, endpoint=endpoint, s3client_config=config)
        plugin.fs = S3FileSystem(region, s3_client=client)
        return plugin

    return Peer(
        name="AWS connector",
        writer=lambda folder: reached(S3StorageWriter(region, folder, s3client_config=config)),
        reader=lambda folder: reached(S3StorageReader(region, folder, s3client_config=config)),
    )


class NullWriter(StorageWriter):
    """Stores nothing: what `dcp.save` costs with it is torch's planner and its collectives."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, FBT001  # torch's signature
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans."""
        return plans

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Take the data from the planner, as any writer must."""
        for item in plan.items:
            planner.resolve_data(item)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Take any."""
        return bool(checkpoint_id)


class NullReader(StorageReader):
    """Reads nothing: what `dcp.load` costs with it is torch's planner and its collectives.

    `metadata` is what another reader found.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def read_metadata(self) -> Metadata:
        """Return what was given."""
        return self._metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001  # torch's signature
        *args: Any,  # noqa: ANN401  # torch's signature
        **kwargs: Any,  # noqa: ANN401  # torch's signature
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Resolve and commit every target, as any reader must."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO())
            else:
                planner.commit_tensor(item, planner.resolve_tensor(item).detach())
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Take any."""
        return bool(checkpoint_id)


class PlainReader(NullReader):
    """Reads by `read`, which fills all targets of the rank, whatever the plan says.

    So `dcp.load` takes as long with it as with the least that any plug-in could do. `metadata` is
    what another reader found, in memory already.
    """

    def __init__(self, metadata: Metadata, read: Callable[[], object]) -> None:
        super().__init__(metadata)
        self._read = read

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read, and resolve and commit every target."""
        self._read()
        return super().read_data(plan, planner)


def stock_metadata(metadata: Metadata) -> Metadata:
    """Return metadata as torch's own readers make it, with all chunks in lists."""
    tensors = {
        fqn: dataclasses.replace(entry, chunks=list(entry.chunks))
        if isinstance(entry, TensorStorageMetadata)
        else entry
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    return dataclasses.replace(metadata, state_dict_metadata=tensors)
