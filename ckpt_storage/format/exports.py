"""The documents of an export folder as values: their names, and a strict codec to sealed JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from .documents import Fields, FileRef, format_of, seal, unseal
from .names import INDEX_NAME, is_save_id

DEFAULT_FOLDER = "hf"
"""Where an export goes unless told otherwise, below its checkpoint."""

DOCUMENTS = ".ckpt-storage"
"""Folder of the documents, in the output folder."""

NAMES_PATH = f"{DOCUMENTS}/names.json"
HOLDER_PATH = f"{DOCUMENTS}/job.json"
SINGLE_NAME = "model.safetensors"

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_WEIGHT_FILE = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,}(-[0-9a-f]{8})?)?\.safetensors")
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
    """Return the path of the record that says weight file `number` (from 1) is complete."""
    return f"{records_folder(fingerprint)}/{number:05d}.json"


def is_weight_file(name: str) -> bool:
    """Return whether a file name is one that an export gives."""
    return _WEIGHT_FILE.fullmatch(name) is not None


def is_file_record(path: str) -> bool:
    """Return whether `path` is that of a record of one complete file."""
    return _FILE_RECORD.fullmatch(path) is not None


def is_output_file(path: str) -> bool:
    """Return whether `path`, in an output folder, is that of a weight file or document of ours."""
    return path == INDEX_NAME or is_weight_file(path) or _DOCUMENT.fullmatch(path) is not None


def _to_json(value: object) -> object:
    match value:
        case FileRef():
            return value.as_json()
        case list() | tuple():
            return list(map(_to_json, value))
    return dict(value) if isinstance(value, Mapping) else value


def _is_fingerprint(text: str) -> bool:
    return _FINGERPRINT.fullmatch(text) is not None


def _are_parts(parts: list[Any]) -> bool:
    return all(isinstance(part, list) for part in parts)


def _text(get: Fields, key: str) -> str:
    return get.value(key, str, "")


_FROM_JSON: Mapping[str, Callable[[Fields, str], Any]] = {
    "fingerprint": lambda get, key: get.value(key, str, ok=_is_fingerprint),
    "save_id": lambda get, key: get.value(key, str, ok=is_save_id) if key in get else None,
    "run_id": _text,
    "source_format": _text,
    "source": _text,
    "index": lambda get, key: get.object(key).ref(),
    "files": lambda get, key: tuple(one.ref() for one in get.objects(key)),
    "ties": lambda get, key: {alias: str(name) for alias, name in get.value(key, dict).items()},
    "file": lambda get, key: get.object(key).ref(),
    "token": _text,
    "write_id": _text,
    "parts": lambda get, key: get.value(key, list, [], ok=_are_parts),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A document whose keys are its fields; what else it says, such as who wrote it, is `stamp`."""

    KIND: ClassVar[str]
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the sealed document."""
        values = {name: getattr(self, name) for name in self._keys()}
        said = {name: _to_json(one) for name, one in values.items() if one not in ("", ())}
        return seal({"format": format_of(self.KIND), **said, **self.stamp})

    @classmethod
    def decode(cls, data: bytes, path: str) -> Self:
        """Return what a document says. Raises `IntegrityError`, `FormatError`."""
        get = Fields.of(unseal(data, path=path), cls.KIND, path)
        found = {name: _FROM_JSON[name](get, name) for name in cls._keys()}
        known = {"format", *found}
        found["stamp"] = {key: value for key, value in get.body.items() if key not in known}
        return cls(**found)

    @classmethod
    def _keys(cls) -> list[str]:
        return [one for one in cls.__annotations__ if one in _FROM_JSON]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names(_Document):
    """Which content may use names without a suffix."""

    KIND: ClassVar[str] = "names"
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(_Document):
    """The run that works in the folder now."""

    KIND: ClassVar[str] = "holder"
    run_id: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord(_Document):
    """A complete export."""

    KIND: ClassVar[str] = "export"
    fingerprint: str
    save_id: str | None
    source_format: str
    source: str = ""
    files: Sequence[FileRef]
    index: FileRef
    ties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed(_Document):
    """A file of which every byte is durable; its record says of which output it is.

    With a `token` it may lack its name: that of its upload, which has a `write_id`, and `parts` it
    has to be completed with.
    """

    KIND: ClassVar[str] = "weight_file"
    fingerprint: str = ""
    file: FileRef
    token: str = ""
    write_id: str = ""
    parts: Sequence[Sequence[int | str | None]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTag:
    """What an index of ours says of its export."""

    fingerprint: str
    save_id: str | None
    names: frozenset[str]

    @classmethod
    def of(cls, data: bytes) -> Self | None:
        """Return what `data`, the content of an index, says; None unless it is one of ours."""
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
