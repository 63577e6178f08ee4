"""Documents of an export folder: their paths, and a strict codec to sealed JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from .documents import FileRef, seal, unseal
from .fields import Fields, format_of
from .names import is_save_id

DEFAULT_FOLDER = "hf"
"""Default folder of an export, below its checkpoint."""

DOCUMENTS = ".ckpt-storage"
"""Folder of the documents, below the output folder."""

NAMES_PATH = f"{DOCUMENTS}/names.json"
HOLDER_PATH = f"{DOCUMENTS}/job.json"

MODEL_PATTERN = "model{suffix}.safetensors"
ADAPTER_PATTERN = "adapter_model{suffix}.safetensors"
PATTERNS = (MODEL_PATTERN, ADAPTER_PATTERN, "diffusion_pytorch_model{suffix}.safetensors")
"""Names of weight files in transformers, PEFT and diffusers; `suffix` numbers several files."""

LIBRARY_INDEXES = frozenset(f"{pattern.format(suffix='')}.index.json" for pattern in PATTERNS)
"""Where these libraries look for the index of several weight files; we also write `INDEX_NAME`."""

GUARD_NAME = "zz-export-under-way.safetensors"
_GUARD_TEXT = (
    b"Weight files in this folder are being replaced, or their writer died: export again.\n"
)
GUARD = len(_GUARD_TEXT).to_bytes(8, "little") + _GUARD_TEXT
"""A file that every reader of safetensors refuses, because its header is not JSON.

While it exists, readers that load every `*.safetensors` of a folder fail. Its name has no leading
dot, because their patterns skip such names.
"""

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_SUFFIX = r"(-[0-9]{5,}-of-[0-9]{5,}(-[0-9a-f]{8})?)?"
_WEIGHT_FILE = re.compile(
    "|".join(re.escape(pattern).replace(r"\{suffix\}", _SUFFIX) for pattern in PATTERNS)
)
_FILE_RECORD = re.compile(r"\.ckpt-storage/[0-9a-f]{16}/[0-9]{5,}\.json")
_DOCUMENT = re.compile(r"\.ckpt-storage/(names|job|[0-9a-f]{16}/([0-9]{5,}|output))\.json")
_TAG_DIGITS = 16


def records_folder(fingerprint: str) -> str:
    """Return the folder of the records of one export."""
    return f"{DOCUMENTS}/{fingerprint[:_TAG_DIGITS]}"


def export_path(fingerprint: str) -> str:
    """Return the path of the record of a complete export."""
    return f"{records_folder(fingerprint)}/output.json"


def is_of_export(path: str) -> bool:
    """Return whether a document is that of an export, and not of a run that wrote a folder."""
    return path == NAMES_PATH or path.endswith("/output.json")


def weight_file_path(fingerprint: str, number: int) -> str:
    """Return the path of the record of complete weight file `number` (from 1)."""
    return f"{records_folder(fingerprint)}/{number:05d}.json"


def is_weight_file(name: str) -> bool:
    """Return whether a file name is that of a weight file of an export."""
    return _WEIGHT_FILE.fullmatch(name) is not None


def is_single_file(name: str) -> bool:
    """Return whether a file name is that of an export with one weight file."""
    return f"{name}.index.json" in LIBRARY_INDEXES


def is_file_record(path: str) -> bool:
    """Return whether `path` is that of a record of one complete file."""
    return _FILE_RECORD.fullmatch(path) is not None


def is_output_file(path: str) -> bool:
    """Return whether `path`, in an output folder, is that of a file that exports write there."""
    is_named = path in {*LIBRARY_INDEXES, GUARD_NAME} or is_weight_file(path)
    return is_named or _DOCUMENT.fullmatch(path) is not None


def _is_fingerprint(text: str) -> bool:
    return _FINGERPRINT.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A document of the export with this `fingerprint`; `stamp` is its writer and time."""

    kind: ClassVar[str]
    fingerprint: str = ""
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        return seal({"format": format_of(self.kind), **self._members(), **self.stamp})

    @classmethod
    def decode(cls, data: bytes, path: str) -> Self:
        """Return the document in `data`.

        Raises `IntegrityError` for a damaged document and `FormatError` for one of another kind.
        """
        get = Fields.of(unseal(data, path=path), cls.kind, path)
        fingerprint, values = get.value("fingerprint", str, ok=_is_fingerprint), cls._values(get)
        known = {"format", "fingerprint", *values}
        stamp = {key: value for key, value in get.body.items() if key not in known}
        return cls(fingerprint=fingerprint, stamp=stamp, **values)

    def _members(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    @classmethod
    def _values(cls, get: Fields) -> dict[str, Any]:
        """Return the fields of a derived class. Raises `FormatError`."""
        del get
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names(_Document):
    """The export that may use names without a suffix."""

    kind = "names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(_Document):
    """The run that owns the folder now."""

    kind = "holder"
    run_id: str

    def _members(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "fingerprint": self.fingerprint}

    @classmethod
    def _values(cls, get: Fields) -> dict[str, Any]:
        return {"run_id": get.value("run_id", str, "")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord(_Document):
    """A complete export; `ties` maps aliases to targets."""

    kind = "export"
    save_id: str | None
    source_format: str
    source: str = ""
    files: Sequence[FileRef]
    index: FileRef
    ties: Mapping[str, str] = field(default_factory=dict)

    def _members(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "save_id": self.save_id,
            "source_format": self.source_format,
            "source": self.source,
            "files": [file.as_json() for file in self.files],
            "index": self.index.as_json(),
            "ties": dict(self.ties),
        }

    @classmethod
    def _values(cls, get: Fields) -> dict[str, Any]:
        return {
            "save_id": get.value("save_id", str, ok=is_save_id) if "save_id" in get else None,
            "source_format": get.value("source_format", str, ""),
            "source": get.value("source", str, ""),
            "files": tuple(file.ref() for file in get.objects("files")),
            "index": get.object("index").ref(),
            "ties": {alias: str(name) for alias, name in get.value("ties", dict).items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed(_Document):
    """A file with only durable bytes.

    With a `token`, the file may still be an upload with this token and `write_id`, which has to be
    completed with `parts`.
    """

    kind = "weight_file"
    file: FileRef
    token: str = ""
    write_id: str = ""
    parts: Sequence[Sequence[int | str | None]] = ()

    def _members(self) -> dict[str, Any]:
        parts = [list(part) for part in self.parts]
        upload = {"token": self.token, "write_id": self.write_id, "parts": parts}
        members = {"fingerprint": self.fingerprint, "file": self.file.as_json()}
        return members | (upload if self.token else {})

    @classmethod
    def _values(cls, get: Fields) -> dict[str, Any]:
        return {
            "file": get.object("file").ref(),
            "token": get.value("token", str, ""),
            "write_id": get.value("write_id", str, ""),
            "parts": get.value("parts", list, [], ok=lambda p: all(isinstance(x, list) for x in p)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTag:
    """The export that an index of ours belongs to, and the names of its files."""

    fingerprint: str
    save_id: str | None
    names: frozenset[str]

    @classmethod
    def of(cls, data: bytes) -> Self | None:
        """Return the tag in the content of an index; None for the index of another tool."""
        try:
            body = json.loads(data)
            metadata, names = body["metadata"], body["weight_map"].values()
            fingerprint, save_id = metadata["fingerprint"], metadata["save_id"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(fingerprint, str) or not _is_fingerprint(fingerprint):
            return None
        return cls(
            fingerprint=fingerprint,
            save_id=save_id if isinstance(save_id, str) else None,
            names=frozenset(map(str, names)),
        )
