"""The documents of an export folder as values: their names, and a strict codec to sealed JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ckpt_storage.errors import FormatError

from .documents import Fields, FileRef, format_of, seal, unseal
from .names import INDEX_NAME, is_save_id

__all__ = [
    "DEFAULT_FOLDER",
    "DOCUMENTS",
    "HOLDER_PATH",
    "INDEX_NAME",
    "NAMES_PATH",
    "SINGLE_NAME",
    "ExportRecord",
    "Holder",
    "IndexTag",
    "Names",
    "Sealed",
    "export_path",
    "is_file_record",
    "is_output_file",
    "is_weight_file",
    "records_folder",
    "records_tag",
    "suffix_of",
    "weight_file_path",
]

DEFAULT_FOLDER = "hf"
"""Where an export goes unless told otherwise, below its checkpoint."""

DOCUMENTS = ".ckpt-storage"
"""Folder of the documents, in the output folder."""

NAMES_PATH = f"{DOCUMENTS}/names.json"
HOLDER_PATH = f"{DOCUMENTS}/job.json"
SINGLE_NAME = "model.safetensors"

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_WEIGHT_FILE = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,}(-[0-9a-f]{8})?)?\.safetensors")
_DOCUMENT = re.compile(
    rf"{re.escape(DOCUMENTS)}/((names|job)\.json"
    r"|[0-9a-f]{16}/([0-9]{5,}|output)\.json)"
)
_FILE_RECORD = re.compile(rf"{re.escape(DOCUMENTS)}/[0-9a-f]{{16}}/[0-9]{{5,}}\.json")
_TAG_DIGITS = 16
_SUFFIX_DIGITS = 8


def records_tag(fingerprint: str) -> str:
    """Return the name of the folder of one export's records."""
    return fingerprint[:_TAG_DIGITS]


def records_folder(fingerprint: str) -> str:
    """Return the folder of the records of one export."""
    return f"{DOCUMENTS}/{records_tag(fingerprint)}"


def export_path(fingerprint: str) -> str:
    """Return the path of the record of a complete export."""
    return f"{records_folder(fingerprint)}/output.json"


def weight_file_path(fingerprint: str, number: int) -> str:
    """Return the path of the record that says weight file `number` (from 1) is complete."""
    return f"{records_folder(fingerprint)}/{number:05d}.json"


def suffix_of(fingerprint: str) -> str:
    """Return what sets names of this content apart from those of another."""
    return fingerprint[:_SUFFIX_DIGITS]


def is_weight_file(name: str) -> bool:
    """Return whether a file name is one that an export gives."""
    return _WEIGHT_FILE.fullmatch(name) is not None


def is_file_record(path: str) -> bool:
    """Return whether `path` is that of a record of one complete file."""
    return _FILE_RECORD.fullmatch(path) is not None


def is_output_file(path: str) -> bool:
    """Return whether `path`, in an output folder, is that of a weight file or document of ours."""
    return path == INDEX_NAME or is_weight_file(path) or _DOCUMENT.fullmatch(path) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Which content may use names without a suffix."""

    fingerprint: str
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the sealed document."""
        return _sealed("names", {"fingerprint": self.fingerprint}, self.stamp)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return what a document says. Raises `IntegrityError`, `FormatError`."""
        get = _opened(data, "names", NAMES_PATH)
        return cls(fingerprint=_fingerprint(get))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The run that works in the folder now."""

    run_id: str
    fingerprint: str
    stamp: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the sealed document."""
        body = {"run_id": self.run_id, "fingerprint": self.fingerprint}
        return _sealed("holder", body, self.stamp)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return what a document says. Raises `IntegrityError`, `FormatError`."""
        get = _opened(data, "holder", HOLDER_PATH)
        return cls(
            run_id=get.string("run_id"),
            fingerprint=_fingerprint(get),
            stamp={"host": str(get.body.get("host", "")), "pid": get.body.get("pid", 0)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A file of which every byte is durable.

    With a `token` it may lack its name: that of its upload, which has a `write_id`, and `parts` it
    has to be completed with.
    """

    file: FileRef
    token: str = ""
    write_id: str = ""
    parts: Sequence[Sequence[int | str | None]] = ()

    def encode(self, fingerprint: str) -> bytes:
        """Return the sealed document of a file of that output."""
        body: dict[str, Any] = {"fingerprint": fingerprint, "file": self.file.as_json()}
        if self.token:
            parts = [list(part) for part in self.parts]
            body |= {"token": self.token, "write_id": self.write_id, "parts": parts}
        return _sealed("weight_file", body, {})

    @classmethod
    def decode(cls, data: bytes, *, path: str, fingerprint: str) -> Self:
        """Return what a document says of a file of that output.

        Raises `IntegrityError`, `FormatError`.
        """
        get = _opened(data, "weight_file", path)
        parts = get.body.get("parts", [])
        if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
            get.fail("has no list of parts")
        if _fingerprint(get) != fingerprint:
            get.fail("is of another output")
        return cls(
            file=get.object("file").ref(),
            token=str(get.body.get("token", "")),
            write_id=str(get.body.get("write_id", "")),
            parts=parts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """A complete export."""

    fingerprint: str
    save_id: str | None
    source_format: str
    files: Sequence[FileRef]
    index: FileRef
    source: str = ""
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
        return _sealed("export", body, self.stamp)

    @classmethod
    def decode(cls, data: bytes, *, path: str) -> Self:
        """Return what a document says. Raises `IntegrityError`, `FormatError`."""
        get = _opened(data, "export", path)
        save_id = get.body.get("save_id")
        if save_id is not None and not (isinstance(save_id, str) and is_save_id(save_id)):
            get.fail(f"has {save_id!r:.80} where a save id should be")
        return cls(
            fingerprint=_fingerprint(get),
            save_id=save_id,
            source_format=get.string("source_format"),
            source=str(get.body.get("source", "")),
            files=tuple(one.ref() for one in get.objects("files")),
            index=get.object("index").ref(),
            ties={str(alias): str(target) for alias, target in get.mapping("ties").items()},
        )


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
        if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
            return None
        return cls(
            fingerprint=fingerprint,
            save_id=save_id if isinstance(save_id, str) else None,
            names=frozenset(map(str, names)),
        )


def _sealed(kind: str, body: Mapping[str, Any], stamp: Mapping[str, Any]) -> bytes:
    return seal({"format": format_of(kind), **body, **stamp})


def _opened(data: bytes, kind: str, path: str) -> Fields:
    return Fields.of(unseal(data, path=path), kind, path)


def _fingerprint(get: Fields) -> str:
    text = get.string("fingerprint")
    if not _FINGERPRINT.fullmatch(text):
        raise FormatError(
            f"{get.where} has {text!r:.80} where a fingerprint should be.",
            path=get.where,
            next_step="Delete the folder of the export and consolidate again.",
        )
    return text
