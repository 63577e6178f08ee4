"""Checkpoints of PyTorch Distributed Checkpoint (DCP) on any storage: safe, verified, fast.

Everything public is imported from here, listed in `__all__` and loaded on first use (PEP 562), so
that `import ckpt_storage` stays cheap and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .background.handle import SaveHandle, SaveProgress, SaveState
    from .background.saver import AsyncSaver, save_async
    from .commit.catalog import list_checkpoints, publish
    from .commit.info import CheckpointInfo
    from .dcp.reader import CheckpointStorageReader
    from .dcp.writer import CheckpointStorageWriter
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
    from .export.consolidating import consolidate
    from .export.consolidation.job import ConsolidationReport
    from .export.consolidation.options import ConsolidateOptions
    from .export.converting import ConvertReport, convert
    from .export.copying import CopyReport, copy
    from .inspect.checkpoint import Checkpoint, diff, open_checkpoint
    from .inspect.comparing import CheckpointDiff, ValueDiff
    from .inspect.doctor import Diagnosis, diagnose
    from .inspect.lazytensor import LazyTensor
    from .inspect.statistics import TensorStats
    from .inspect.verify import VerifyReport, verify
    from .loads.loading import load
    from .manager.deletion import delete
    from .manager.manager import CheckpointManager
    from .manager.pruning import PruneReport, prune
    from .manager.restoring import Restored
    from .manager.retention import (
        Candidate,
        KeepBest,
        KeepEvery,
        KeepLatest,
        KeepNewerThan,
        PrunePlan,
        RetentionPolicy,
    )
    from .options import ProgressEvent, RetryPolicy, Timeouts
    from .saves.saving import save
    from .store.registry import register_backend

__all__ = [
    "AsyncSaver",
    "Candidate",
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
    "RetentionPolicy",
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
    "delete",
    "diagnose",
    "diff",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "prune",
    "publish",
    "register_backend",
    "save",
    "save_async",
    "verify",
]

_DEFINED_IN = {
    "AsyncSaver": "background.saver",
    "Candidate": "manager.retention",
    "Checkpoint": "inspect.checkpoint",
    "CheckpointDiff": "inspect.comparing",
    "CheckpointError": "errors",
    "CheckpointExistsError": "errors",
    "CheckpointGoneError": "errors",
    "CheckpointInProgressError": "errors",
    "CheckpointInfo": "commit.info",
    "CheckpointManager": "manager.manager",
    "CheckpointNotFoundError": "errors",
    "CheckpointStorageReader": "dcp.reader",
    "CheckpointStorageWriter": "dcp.writer",
    "CommitConflictError": "errors",
    "CommitUnknownError": "errors",
    "ConsolidateOptions": "export.consolidation.options",
    "ConsolidationError": "errors",
    "ConsolidationReport": "export.consolidation.job",
    "ConvertReport": "export.converting",
    "CopyReport": "export.copying",
    "Diagnosis": "inspect.doctor",
    "FormatError": "errors",
    "IntegrityError": "errors",
    "InvalidInputError": "errors",
    "NotPublishedError": "errors",
    "KeepBest": "manager.retention",
    "KeepEvery": "manager.retention",
    "KeepLatest": "manager.retention",
    "KeepNewerThan": "manager.retention",
    "LazyTensor": "inspect.lazytensor",
    "PhaseTimeoutError": "errors",
    "ProgressEvent": "options",
    "PrunePlan": "manager.retention",
    "PruneReport": "manager.pruning",
    "RankFailedError": "errors",
    "RankMismatchError": "errors",
    "Restored": "manager.restoring",
    "RetentionPolicy": "manager.retention",
    "RetryPolicy": "options",
    "SaveCancelledError": "errors",
    "SaveHandle": "background.handle",
    "SaveProgress": "background.handle",
    "SaveState": "background.handle",
    "StorageError": "errors",
    "TensorStats": "inspect.statistics",
    "Timeouts": "options",
    "UnsafeContentError": "errors",
    "UnsupportedByStoreError": "errors",
    "ValueDiff": "inspect.comparing",
    "VerifyReport": "inspect.verify",
    "consolidate": "export.consolidating",
    "convert": "export.converting",
    "copy": "export.copying",
    "delete": "manager.deletion",
    "diagnose": "inspect.doctor",
    "diff": "inspect.checkpoint",
    "list_checkpoints": "commit.catalog",
    "prune": "manager.pruning",
    "publish": "commit.catalog",
    "register_backend": "store.registry",
    "load": "loads.loading",
    "open_checkpoint": "inspect.checkpoint",
    "save": "saves.saving",
    "save_async": "background.saver",
    "verify": "inspect.verify",
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
