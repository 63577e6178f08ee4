"""Savers and loaders to compare with: stock torch, and the AWS connector where it is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another writer and reader for DCP, made for a folder's path or URL."""

    name: str
    writer: Callable[[str], StorageWriter]
    reader: Callable[[str], StorageReader]


def peers_for(url: str, storage_options: Mapping[str, Any]) -> list[Peer]:
    """Return the peers that reach this storage, installed ones only."""
    if "://" not in url:
        return [
            Peer(name="torch FileSystem", writer=dcp.FileSystemWriter, reader=dcp.FileSystemReader),
            Peer(
                name="torch safetensors",
                writer=partial(dcp.HuggingFaceStorageWriter, save_distributed=True),
                reader=dcp.HuggingFaceStorageReader,
            ),
        ]
    stock = Peer(
        name="torch Fsspec",
        writer=partial(FsspecWriter, **storage_options),
        reader=partial(FsspecReader, **storage_options),
    )
    connector = _aws_connector(storage_options) if url.startswith("s3://") else None
    return [stock, *([connector] if connector else [])]


def _aws_connector(options: Mapping[str, Any]) -> Peer | None:
    try:
        from s3torchconnector import S3ClientConfig  # noqa: PLC0415  # an optional package
        from s3torchconnector._s3client import S3Client  # noqa: PLC0415  # as above
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter  # noqa: PLC0415  # as above
        from s3torchconnector.dcp.s3_file_system import S3FileSystem  # noqa: PLC0415  # as above
    except ImportError as error:
        sys.stderr.write(
            f"The AWS connector is left out: {error}. pip install 's3torchconnector[dcp]'\n"
        )
        return None
    inner: Mapping[str, Any] = options.get("client_kwargs", {})
    region = inner.get("region_name") or "us-east-1"
    # It takes credentials from nowhere else; this process does nothing but measure.
    for name, option in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")):
        if options.get(option):
            os.environ[name] = options[option]
    config = S3ClientConfig(force_path_style=True)
    endpoint = inner.get("endpoint_url") or options.get("endpoint_url")

    def reached(plugin: Any) -> Any:
        # Its classes take no endpoint; their file system does.
        client = S3Client(region, endpoint=endpoint, s3client_config=config)
        plugin.fs = S3FileSystem(region, s3_client=client)
        return plugin

    return Peer(
        name="AWS connector",
        writer=lambda folder: reached(S3StorageWriter(region, folder, s3client_config=config)),
        reader=lambda folder: reached(S3StorageReader(region, folder, s3client_config=config)),
    )
