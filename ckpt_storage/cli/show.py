"""`ckpt-storage show URL [FQN]`: what a checkpoint is, or one tensor of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import output
from .options import common, fqn_argument, json_option, storage_options, url_argument
from .output import SOUND, entries_of, is_tensor, tensor_of

if TYPE_CHECKING:
    from ckpt_storage.inspect.checkpoint import Checkpoint
    from ckpt_storage.inspect.lazytensor import LazyTensor


_MOST_CHUNKS = 40


@click.command(short_help="What a checkpoint or a tensor is.")
@url_argument()
@fqn_argument(required=False)
@click.option("--files", "with_files", is_flag=True, help="Also list files and ranks.")
@click.option("--history", "with_history", is_flag=True, help="Also list the commit slots.")
@json_option
@storage_options()
@common
def show(
    url: str,
    fqn: str | None,
    *,
    with_files: bool,
    with_history: bool,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Show what the checkpoint at URL is; with FQN, how one tensor is stored.

    Reads documents only, no tensor.
    """
    from ckpt_storage.inspect.checkpoint import open_checkpoint  # noqa: PLC0415  # called, not imported

    with open_checkpoint(url, storage_options=storage_options, timeout=timeout) as checkpoint:
        if fqn is not None:
            _show_value(checkpoint, fqn, as_json=as_json)
        else:
            _show_checkpoint(
                checkpoint, with_files=with_files, with_history=with_history, as_json=as_json
            )
    return SOUND


def _show_checkpoint(
    checkpoint: Checkpoint, *, with_files: bool, with_history: bool, as_json: bool
) -> None:
    info, entries = checkpoint.info, entries_of(checkpoint)
    tensor_count = sum(1 for entry in entries if entry.dtype is not None)
    told: dict[str, Any] = {
        "url": checkpoint.url,
        "format": checkpoint.format,
        "save_id": checkpoint.save_id,
        "step": info.step if info.step is not None else checkpoint.step,
        "metrics": info.metrics,
        "created_at": info.created_at,
        "world_size": checkpoint.world_size,
        "tensor_count": tensor_count,
        "object_count": len(entries) - tensor_count,
        "tensor_bytes": checkpoint.nbytes,
    }
    files = checkpoint.files if with_files else ()
    history = checkpoint.history if with_history else ()
    if as_json:
        if with_files:
            told["files"] = [
                {"path": file.path, "bytes": file.size_bytes, "rank": file.rank} for file in files
            ]
        if with_history:
            told["history"] = [
                {
                    "slot": entry.slot,
                    "type": entry.type,
                    "created_at": entry.created_at,
                    "host": entry.host,
                    "pid": entry.pid,
                    "save_id": entry.save_id,
                    "fenced": entry.fenced,
                }
                for entry in history
            ]
        output.emit("show", **told)
        return
    metrics = ", ".join(f"{name} {value:g}" for name, value in info.metrics.items())
    output.facts(
        {
            "url": checkpoint.url,
            "format": checkpoint.format,
            "save id": checkpoint.save_id,
            "step": told["step"],
            "metrics": metrics,
            "created": info.created_at,
            "ranks": checkpoint.world_size,
            "tensors": f"{tensor_count:,}",
            "objects": f"{told['object_count']:,}",
            "bytes": f"{output.size(checkpoint.nbytes)} ({checkpoint.nbytes:,})",
        }
    )
    if with_files:
        output.line()
        output.table(
            ("file", "rank", "bytes"),
            [(file.path, file.rank, f"{file.size_bytes:,}") for file in files],
            right="rank bytes",
        )
    if with_history:
        output.line()
        output.table(
            ("slot", "what", "when", "by", "save id"),
            [
                (
                    entry.slot,
                    entry.type,
                    entry.created_at,
                    f"{entry.host} {entry.pid}",
                    entry.save_id or ", ".join(entry.fenced),
                )
                for entry in history
            ],
            right="slot",
        )


def _show_value(checkpoint: Checkpoint, fqn: str, *, as_json: bool) -> None:
    if is_tensor(checkpoint, fqn):
        _show_tensor(tensor_of(checkpoint, fqn), as_json=as_json)
    elif as_json:
        output.emit("show_value", fqn=fqn, kind="object", tensor=None)
    else:
        output.facts({"name": fqn, "kind": "object, no tensor"})


def _show_tensor(tensor: LazyTensor, *, as_json: bool) -> None:
    sharding = tensor.sharding
    if as_json:
        output.emit(
            "show_value",
            fqn=tensor.fqn,
            kind="tensor",
            tensor={
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "bytes": tensor.nbytes,
                "chunks": [
                    {"offsets": chunk.offsets, "sizes": chunk.sizes, "rank": chunk.rank}
                    for chunk in sharding
                ],
            },
        )
        return
    output.facts(
        {
            "name": tensor.fqn,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": f"{output.size(tensor.nbytes)} ({tensor.nbytes:,})",
            "sharding": sharding,
        }
    )
    if len(sharding) > 1:
        output.line()
        rows = [
            (list(chunk.offsets), list(chunk.sizes), chunk.rank)
            for chunk, _ in zip(sharding, range(_MOST_CHUNKS), strict=False)
        ]
        output.table(("offsets", "sizes", "rank"), rows, right="rank")
        if len(sharding) > _MOST_CHUNKS:
            output.line(f"... and {len(sharding) - _MOST_CHUNKS} more chunks; --json lists all.")
