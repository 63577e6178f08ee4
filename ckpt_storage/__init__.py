"""Checkpoints of PyTorch Distributed Checkpoint (DCP) on any storage: safe, verified, fast.

Everything public is imported from here, listed in `__all__` and loaded on first use
(PEP 562), so that `import ckpt_storage` stays cheap and imports no torch.
Knows which module defines which name and nothing else. Callers: users only; inside the
package a module imports from the module that defines a name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .catalog import list_checkpoints, publish
    from .checkpoint import Checkpoint, diff, open_checkpoint
    from .comparing import CheckpointDiff, ValueDiff
    from .consolidating import consolidate
    from .consolidation.options import ConsolidateOptions
    from .consolidation.report import ConsolidationReport
    from .converting import ConvertReport, convert
    from .copying import CopyReport, copy
    from .doctor import Diagnosis, diagnose
    from .errors import (
        CheckpointError,
        CheckpointExistsError,
        CheckpointGoneError,
        CheckpointInProgressError,
        CheckpointNotFoundError,
        CommitConflictError,
        CommitUnknownError,
        ConsolidationError,
        FormatError,
        IntegrityError,
        InvalidInputError,
        NotPublishedError,
        PhaseTimeoutError,
        RankFailedError,
        RankMismatchError,
        SaveCancelledError,
        StorageError,
        UnsafeContentError,
        UnsupportedByStoreError,
    )
    from .handle import SaveHandle, SaveProgress, SaveState
    from .info import CheckpointInfo
    from .lazytensor import LazyTensor
    from .loading import load
    from .manager import CheckpointManager
    from .options import ProgressEvent, RetryPolicy, Timeouts
    from .pruning import PruneReport
    from .reader import CheckpointStorageReader
    from .restoring import Restored
    from .retention import KeepBest, KeepEvery, KeepLatest, KeepNewerThan, PrunePlan
    from .saver import AsyncSaver, save_async
    from .saving import save
    from .statistics import TensorStats
    from .verification import VerifyReport, verify
    from .writer import CheckpointStorageWriter

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointDiff",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointGoneError",
    "CheckpointInProgressError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointStorageReader",
    "CheckpointStorageWriter",
    "CommitConflictError",
    "CommitUnknownError",
    "ConsolidateOptions",
    "ConsolidationError",
    "ConsolidationReport",
    "ConvertReport",
    "CopyReport",
    "Diagnosis",
    "FormatError",
    "IntegrityError",
    "InvalidInputError",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepNewerThan",
    "LazyTensor",
    "NotPublishedError",
    "PhaseTimeoutError",
    "ProgressEvent",
    "PrunePlan",
    "PruneReport",
    "RankFailedError",
    "RankMismatchError",
    "Restored",
    "RetryPolicy",
    "SaveCancelledError",
    "SaveHandle",
    "SaveProgress",
    "SaveState",
    "StorageError",
    "TensorStats",
    "Timeouts",
    "UnsafeContentError",
    "UnsupportedByStoreError",
    "ValueDiff",
    "VerifyReport",
    "consolidate",
    "convert",
    "copy",
    "diagnose",
    "diff",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "publish",
    "save",
    "save_async",
    "verify",
]

_DEFINED_IN = {
    "AsyncSaver": "saver",
    "Checkpoint": "checkpoint",
    "CheckpointDiff": "comparing",
    "CheckpointError": "errors",
    "CheckpointExistsError": "errors",
    "CheckpointGoneError": "errors",
    "CheckpointInProgressError": "errors",
    "CheckpointInfo": "info",
    "CheckpointManager": "manager",
    "CheckpointNotFoundError": "errors",
    "CheckpointStorageReader": "reader",
    "CheckpointStorageWriter": "writer",
    "CommitConflictError": "errors",
    "CommitUnknownError": "errors",
    "ConsolidateOptions": "consolidation.options",
    "ConsolidationError": "errors",
    "ConsolidationReport": "consolidation.report",
    "ConvertReport": "converting",
    "CopyReport": "copying",
    "Diagnosis": "doctor",
    "FormatError": "errors",
    "IntegrityError": "errors",
    "InvalidInputError": "errors",
    "NotPublishedError": "errors",
    "KeepBest": "retention",
    "KeepEvery": "retention",
    "KeepLatest": "retention",
    "KeepNewerThan": "retention",
    "LazyTensor": "lazytensor",
    "PhaseTimeoutError": "errors",
    "ProgressEvent": "options",
    "PrunePlan": "retention",
    "PruneReport": "pruning",
    "RankFailedError": "errors",
    "RankMismatchError": "errors",
    "Restored": "restoring",
    "RetryPolicy": "options",
    "SaveCancelledError": "errors",
    "SaveHandle": "handle",
    "SaveProgress": "handle",
    "SaveState": "handle",
    "StorageError": "errors",
    "TensorStats": "statistics",
    "Timeouts": "options",
    "UnsafeContentError": "errors",
    "UnsupportedByStoreError": "errors",
    "ValueDiff": "comparing",
    "VerifyReport": "verification",
    "consolidate": "consolidating",
    "convert": "converting",
    "copy": "copying",
    "diagnose": "doctor",
    "diff": "checkpoint",
    "list_checkpoints": "catalog",
    "publish": "catalog",
    "load": "loading",
    "open_checkpoint": "checkpoint",
    "save": "saving",
    "save_async": "saver",
    "verify": "verification",
}

if not TYPE_CHECKING:
    # Out of mypy's sight: with a module `__getattr__` it would accept every misspelt name.

    def __getattr__(name: str) -> object:
        """Import the public name `name` on first use and keep it."""
        if name not in _DEFINED_IN:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        value = getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
