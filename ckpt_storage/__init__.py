"""Checkpoints of PyTorch Distributed Checkpoint (DCP) on any storage: safe, verified, fast.

Everything public is imported from here, listed in `__all__` and loaded on first use
(PEP 562), so that `import ckpt_storage` stays cheap and imports no torch.
Knows which module defines which name and nothing else. Callers: users only; inside the
package a module imports from the module that defines a name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .catalog import CheckpointInfo, VerifyReport, list_checkpoints, verify
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
        PhaseTimeoutError,
        RankFailedError,
        RankMismatchError,
        StorageError,
        UnsafeContentError,
        UnsupportedByStoreError,
    )
    from .options import ProgressEvent, RetryPolicy, Timeouts
    from .reader import CheckpointStorageReader
    from .writer import CheckpointStorageWriter

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointGoneError",
    "CheckpointInProgressError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CheckpointStorageReader",
    "CheckpointStorageWriter",
    "CommitConflictError",
    "CommitUnknownError",
    "ConsolidationError",
    "FormatError",
    "IntegrityError",
    "InvalidInputError",
    "PhaseTimeoutError",
    "ProgressEvent",
    "RankFailedError",
    "RankMismatchError",
    "RetryPolicy",
    "StorageError",
    "Timeouts",
    "UnsafeContentError",
    "UnsupportedByStoreError",
    "VerifyReport",
    "list_checkpoints",
    "verify",
]

__version__ = "0.1.0"

_DEFINED_IN = {
    "CheckpointError": "errors",
    "CheckpointExistsError": "errors",
    "CheckpointGoneError": "errors",
    "CheckpointInProgressError": "errors",
    "CheckpointInfo": "catalog",
    "CheckpointNotFoundError": "errors",
    "CheckpointStorageReader": "reader",
    "CheckpointStorageWriter": "writer",
    "CommitConflictError": "errors",
    "CommitUnknownError": "errors",
    "ConsolidationError": "errors",
    "FormatError": "errors",
    "IntegrityError": "errors",
    "InvalidInputError": "errors",
    "PhaseTimeoutError": "errors",
    "ProgressEvent": "options",
    "RankFailedError": "errors",
    "RankMismatchError": "errors",
    "RetryPolicy": "options",
    "StorageError": "errors",
    "Timeouts": "options",
    "UnsafeContentError": "errors",
    "UnsupportedByStoreError": "errors",
    "VerifyReport": "catalog",
    "list_checkpoints": "catalog",
    "verify": "catalog",
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
