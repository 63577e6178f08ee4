"""Ray Train over this package's storage: Ray keeps a pointer, the workers save and load.

The checkpoint that Ray gets is a file with the URL. Ray moves no other byte, and its retention
deletes no checkpoint.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import FormatError

__all__ = ["report", "reported_url"]

_POINTER = "ckpt-storage.json"


def report(metrics: Mapping[str, Any], info: CheckpointInfo) -> None:
    """Report the metrics of a step and the saved checkpoint to Ray; every worker calls it.

    `info` is what the save returned. In place of `ray.train.report(metrics, checkpoint=...)`.
    """
    if ray.train.get_context().get_world_rank():
        ray.train.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-storage-") as folder:
        content = json.dumps({"url": info.url, "save_id": info.save_id})
        Path(folder, _POINTER).write_text(content, encoding="utf-8")
        pointer = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(dict(metrics), checkpoint=pointer)


def reported_url(checkpoint: ray.train.Checkpoint) -> str:
    """Return the URL that `report` reported; for `Result.checkpoint`, `ray.train.get_checkpoint()`.

    Raises `FormatError` for a checkpoint that was reported in another way.
    """
    with checkpoint.as_directory() as folder:
        try:
            url = json.loads(Path(folder, _POINTER).read_text(encoding="utf-8"))["url"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{checkpoint.path} does not point to a checkpoint of ours."
            step = "Report it with ckpt_storage.integrations.ray.report."
            raise FormatError(what, path=_POINTER, next_step=step) from error
    return str(url)
