"""The public surface: names, docstrings, what an import costs, and errors that survive a pickle."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys

import pytest
from limits import HANG_S

import ckpt_storage
from ckpt_storage import errors

NAMES = """
AsyncSaver Candidate Checkpoint CheckpointDiff CheckpointError CheckpointExistsError
CheckpointGoneError CheckpointInProgressError CheckpointInfo CheckpointManager
CheckpointNotFoundError CheckpointStorageReader CheckpointStorageWriter CommitConflictError
CommitUnknownError ConsolidateOptions ConsolidatedFile ConsolidationError ConsolidationReport
ConvertReport CopyReport Diagnosis FormatError IntegrityError InvalidInputError KeepBest KeepClosest
KeepEvery KeepLatest KeepNewerThan KeepPart LazyTensor NotPublishedError OperationStats PerRank
PhaseTimeoutError ProgressEvent PruneDecision PruneReport RankFailedError RankMismatchError Restored
RetentionPolicy RetryPolicy SaveCancelledError SaveHandle SaveProgress SaveState SkippedCheckpoint
SkippedValue StorageError StorageUsage TensorStats ThinReport Timeouts UnsafeContentError
UnsupportedByStoreError ValueDiff VerifyReport consolidate convert copy delete diagnose diff follow
list_checkpoints load open_checkpoint prune publish register_backend save save_async thin verify
"""
PUBLIC = NAMES.split()

ERRORS: dict[str, tuple[str, type[Exception]]] = {
    "CheckpointError": ("checkpoint", Exception),
    "CheckpointExistsError": ("exists", FileExistsError),
    "CheckpointGoneError": ("gone", FileNotFoundError),
    "CheckpointInProgressError": ("in-progress", Exception),
    "CheckpointNotFoundError": ("not-found", FileNotFoundError),
    "CommitConflictError": ("commit-conflict", Exception),
    "CommitUnknownError": ("commit-unknown", Exception),
    "ConsolidationError": ("consolidation", Exception),
    "FormatError": ("format", ValueError),
    "IntegrityError": ("integrity", Exception),
    "InvalidInputError": ("invalid-input", ValueError),
    "NotPublishedError": ("not-published", Exception),
    "PhaseTimeoutError": ("phase-timeout", TimeoutError),
    "RankFailedError": ("rank-failed", Exception),
    "RankMismatchError": ("rank-mismatch", ValueError),
    "SaveCancelledError": ("cancelled", Exception),
    "StorageError": ("storage", OSError),
    "UnsafeContentError": ("unsafe-content", Exception),
    "UnsupportedByStoreError": ("unsupported-by-store", OSError),
}
"""Every error with its stable code and the builtin that a user would catch."""

HEAVY = ("fsspec", "numpy", "s3fs", "torch")
NEEDS_TORCH = (
    "AsyncSaver",
    "CheckpointManager",
    "CheckpointStorageReader",
    "CheckpointStorageWriter",
    "PerRank",
    "load",
    "save",
    "save_async",
)


def error_classes() -> list[type[errors.CheckpointError]]:
    """Return the whole tree of errors, wherever in the package a class is defined."""
    for module in pkgutil.walk_packages(ckpt_storage.__path__, "ckpt_storage."):
        # Integrations need the frameworks that they integrate; they define no error.
        if not module.name.startswith(("ckpt_storage.testing", "ckpt_storage.integrations")):
            importlib.import_module(module.name)
    found, left = [], [errors.CheckpointError]
    while left:
        found.append(left.pop())
        left.extend(found[-1].__subclasses__())
    ours = {cls for cls in found if cls.__module__.startswith("ckpt_storage.")}
    return sorted(ours, key=lambda cls: cls.__name__)


def sample_arguments(cls: type[errors.CheckpointError]) -> dict[str, object]:
    """Return a value for every keyword argument that the constructors of `cls` take."""
    samples: dict[str, object] = {
        "rank": 3,
        "slot": 7,
        "offset": 9,
        "timeout_s": 1.5,
        "is_silent": True,
    }
    samples |= {"retryable": True, "failures": {1: "died"}, "winner": {"pid": 1}}
    samples |= {"values": {"a": [1]}, "info": ("a", 1)}
    taken = inspect.signature(cls).parameters.values()
    names = [one.name for one in taken if one.kind is one.KEYWORD_ONLY]
    return {name: samples.get(name, "some text") for name in names}


def run_python(code: str) -> str:
    """Return what `code` prints in a fresh interpreter, with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_is_the_agreed_list() -> None:
    """`__all__` and `dir` have the names that users were promised, sorted, and no other."""
    assert ckpt_storage.__all__ == PUBLIC == sorted(PUBLIC)
    shown = run_python("import ckpt_storage; print(*dir(ckpt_storage))")
    assert shown.split() == PUBLIC, "before any of it has been loaded"


def test_every_public_name_resolves() -> None:
    """Each name gives the same class or function every time, named as it is exported."""
    for name in PUBLIC:
        value = getattr(ckpt_storage, name)
        assert value.__name__ == name
        assert value.__module__.startswith("ckpt_storage.")
        assert getattr(ckpt_storage, name) is value


def test_no_module_hides_a_public_name() -> None:
    """No submodule is called like a public name, which importing it would replace."""
    modules = {module.name for module in pkgutil.iter_modules(ckpt_storage.__path__)}
    assert modules & set(PUBLIC) == set()


def test_a_misspelt_name_is_an_attribute_error() -> None:
    """An unknown name fails as it does on any module, for `hasattr` and for `import`."""
    with pytest.raises(AttributeError, match="CheckpointStorageWritter"):
        getattr(ckpt_storage, "CheckpointStorageWritter")  # noqa: B009 - mypy knows better
    assert not hasattr(ckpt_storage, "CheckpointStorageWritter")


def test_import_loads_nothing_heavy() -> None:
    """`import ckpt_storage` leaves torch, numpy, fsspec and its backends alone."""
    code = f"import sys, ckpt_storage; print(*sorted({set(HEAVY)} & set(sys.modules)))"
    assert run_python(code) == ""


def test_only_what_moves_tensors_loads_torch() -> None:
    """Every name that takes no tensors can be imported without torch."""
    names = ", ".join(sorted(set(PUBLIC) - set(NEEDS_TORCH)))
    code = f"import sys; from ckpt_storage import {names}; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_the_error_tree_is_the_agreed_one() -> None:
    """Each error of `errors` is public, has the agreed code and inherits the agreed builtin."""
    # Refinements that a layer makes for itself, such as an abandoned request, keep their code.
    classes = [cls for cls in error_classes() if cls.__module__ == "ckpt_storage.errors"]
    assert [cls.__name__ for cls in classes] == sorted(ERRORS)
    for cls in classes:
        code, builtin = ERRORS[cls.__name__]
        assert getattr(ckpt_storage, cls.__name__) is cls
        assert cls.code == code
        assert issubclass(cls, builtin)
    assert len({code for code, _ in ERRORS.values()}) == len(ERRORS)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_survives_every_copy(name: str) -> None:
    """Type, message, arguments, attributes and notes come back from pickle and copy."""
    cls = getattr(ckpt_storage, name)
    arguments = sample_arguments(cls)
    error = cls("What failed, on rank 3.", **arguments)
    error.__cause__ = OSError(lambda: "cannot be pickled")
    error.add_note("A note.")
    pickled = [pickle.loads(pickle.dumps(error, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)]
    for back in (copy.copy(error), copy.deepcopy(error), *pickled):
        assert type(back) is cls
        assert str(back) == str(error) == "What failed, on rank 3. some text"
        assert back.args == error.args
        assert vars(back) == vars(error)
        assert {key: getattr(back, key) for key in arguments} == arguments
        assert back.__notes__ == ["A note."]
    assert str(cls("Only a message.")) == "Only a message."
