"""Documents of an export folder: their paths, and a strict codec to sealed JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from .documents import Fields, FileRef, format_of, seal, unseal
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


def _are_parts(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, list) for part in parts)


def _encode(kind: str, body: Mapping[str, object], stamp: Mapping[str, Any]) -> bytes:
    return seal({"format": format_of(kind), **body, **stamp})


def _decode(data: bytes, path: str, kind: str, *keys: str) -> tuple[Fields, dict[str, Any]]:
    """Return the fields of a document, and its stamp: the keys other than `keys`."""
    fields = Fields.of(unseal(data, path=path), kind, path)
    known = {"format", *keys}
    return fields, {key: value for key, value in fields.body.items() if key not in known}


def _fingerprint(fields: Fields) -> str:
    return fields.value("fingerprint", str, ok=_is_fingerprint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The export that may use names without a suffix; `stamp` is writer and time of the document.

    The other documents have such a `stamp`, too. Every `decode` raises `IntegrityError` for a
    damaged document and `FormatError` for one of another kind.
    """

    fingerprint: str
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the sealed document."""
        return _encode("names", {"fingerprint": self.fingerprint}, self.stamp)

    @classmethod
    def decode(cls, data: bytes, path: str) -> Self:
        """Return the document that `data` holds."""
        fields, stamp = _decode(data, path, "names", "fingerprint")
        return cls(fingerprint=_fingerprint(fields), stamp=stamp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The run that owns the folder now."""

    run_id: str
    fingerprint: str
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the sealed document."""
        body = {"run_id": self.run_id, "fingerprint": self.fingerprint}
        return _encode("holder", body, self.stamp)

    @classmethod
    def decode(cls, data: bytes, path: str) -> Self:
        """Return the document that `data` holds."""
        fields, stamp = _decode(data, path, "holder", "run_id", "fingerprint")
        run_id = fields.value("run_id", str, "")
        return cls(run_id=run_id, fingerprint=_fingerprint(fields), stamp=stamp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """A complete export; `ties` maps aliases to targets."""

    fingerprint: str
    save_id: str | None
    source_format: str
    source: str = ""
    files: Sequence[FileRef]
    index: FileRef
    ties: Mapping[str, str] = field(default_factory=dict)
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the sealed document."""
        body = {
            "fingerprint": self.fingerprint,
            "save_id": self.save_id,
            "source_format": self.source_format,
            "source": self.source,
            "files": [file.as_json() for file in self.files],
            "index": self.index.as_json(),
            "ties": dict(self.ties),
        }
        return _encode("export", body, self.stamp)

    @classmethod
    def decode(cls, data: bytes, path: str) -> Self:
        """Return the document that `data` holds."""
        keys = ("fingerprint", "save_id", "source_format", "source", "files", "index", "ties")
        fields, stamp = _decode(data, path, "export", *keys)
        has_save_id = "save_id" in fields and fields.body["save_id"] is not None
        return cls(
            fingerprint=_fingerprint(fields),
            save_id=fields.value("save_id", str, ok=is_save_id) if has_save_id else None,
            source_format=fields.value("source_format", str, ""),
            source=fields.value("source", str, ""),
            files=tuple(file.ref() for file in fields.objects("files")),
            index=fields.object("index").ref(),
            ties={alias: str(name) for alias, name in fields.value("ties", dict).items()},
            stamp=stamp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A file with only durable bytes; `fingerprint` names its export.

    With a `token`, the file may still be an upload with this token and `write_id`, which has to be
    completed with `parts`.
    """

    fingerprint: str = ""
    file: FileRef
    token: str = ""
    write_id: str = ""
    parts: Sequence[Sequence[int | str | None]] = ()

    def encode(self) -> bytes:
        """Return the sealed document."""
        body: dict[str, object] = {"fingerprint": self.fingerprint, "file": self.file.as_json()}
        if self.token:
            parts = [list(part) for part in self.parts]
            body |= {"token": self.token, "write_id": self.write_id, "parts": parts}
        return _encode("weight_file", body, {})

    @classmethod
    def decode(cls, data: bytes, path: str) -> Self:
        """Return the document that `data` holds."""
        fields, _ = _decode(data, path, "weight_file")
        return cls(
            fingerprint=_fingerprint(fields),
            file=fields.object("file").ref(),
            token=fields.value("token", str, ""),
            write_id=fields.value("write_id", str, ""),
            parts=fields.value("parts", list, [], ok=_are_parts),
        )


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
