"""The checksums of a file of `torch.save`, and tensors that are held to them while they stream.

Imports no torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from ckpt_storage.errors import CheckpointError, FormatError, IntegrityError
from ckpt_storage.format.regions import Box
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import Place
from ckpt_storage.source.readplan import bytes_request
from ckpt_storage.store.base import Store
from ckpt_storage.store.deadline import Deadline

from .stream import Readable, TensorStream, payload_bytes

__all__ = ["Record", "RecordStream", "ZipRecords"]

_TENSORS = "data"
_CENTRAL_BYTES = 46
_RESTORE = "Restore the file from a copy."


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of the file that have one checksum: a storage, of which tensors are views."""

    start: int
    size_bytes: int
    crc32: int


class ZipRecords:
    """The records of one file, as its directory tells them; those of tensors are not read.

    Raises `FormatError` for what is no zip, `IntegrityError` for a record that is no tensor's and
    does not have its checksum: the pickle is checked before anything is made of it.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._infos: list[zipfile.ZipInfo] = []
        self._path = path
        try:
            with zipfile.ZipFile(file) as archive:
                self._names = dict(_name_positions(archive))
                found = sorted(archive.infolist(), key=lambda info: info.header_offset)
                for info in found:
                    self._check_stored(info)
                # torch can be told to write none: then it writes zeros.
                if any(info.CRC for info in found):
                    self._infos = found
                for info in self._infos:
                    if info.filename.split("/")[1:2] != [_TENSORS]:
                        self._check(archive, info)
        except CheckpointError:
            raise
        except Exception as error:
            raise FormatError(
                f"{path} cannot be read ({type(error).__name__}): it is damaged, cut short, or no "
                "file of torch.save.",
                path=path,
                next_step=_RESTORE,
            ) from error
        self._offsets = [info.header_offset for info in self._infos]

    def _check_stored(self, info: zipfile.ZipInfo) -> None:
        """Refuse a compressed record: torch.save makes none, and it may be a zip bomb."""
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise FormatError(
                f"{self._path} holds the compressed record {info.filename:.80}, as no file of "
                "torch.save does.",
                path=self._path,
                next_step="If you trust who made it, load it with torch.load and save it anew.",
            )

    def _check(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        try:
            archive.read(info)
        except zipfile.BadZipFile as error:
            raise IntegrityError(
                f"{self._path} is damaged: its record {info.filename} does not have the checksum "
                "it was written with.",
                path=self._path,
                offset=info.header_offset,
                next_step=_RESTORE,
            ) from error

    def name_position(self, name: str) -> int | None:
        """Return where the last byte of a record's name is in the directory; None if absent."""
        return self._names.get(name)

    def at(self, start: int) -> Record | None:
        """Return the record whose bytes begin at `start`; None where there is no checksum."""
        number = bisect.bisect_left(self._offsets, start) - 1
        if number < 0 or self._infos[number].compress_type != zipfile.ZIP_STORED:
            return None
        info = self._infos[number]
        return Record(start, info.file_size, info.CRC)


def _name_positions(archive: zipfile.ZipFile) -> Iterator[tuple[str, int]]:
    """Yield each record's name below the archive's root, and where its last byte is."""
    at = archive.start_dir
    for info in archive.infolist():
        stop = at + _CENTRAL_BYTES + len(info.orig_filename.encode())
        yield info.orig_filename.partition("/")[2], stop - 1
        at = stop + len(info.extra) + len(info.comment)


class RecordStream(TensorStream):
    """Reads the tensors of one file of `torch.save`, each held to the checksum of its record.

    A tensor that is all of its record is checked on its way: damage is told once its last bytes
    were taken. Of one that is a part the whole record is read before, once.
    """

    def __init__(
        self,
        source: Readable,
        store: Store,
        records: Mapping[str, Record],
        *,
        options: TransferOptions,
        deadline: Deadline,
        window_bytes: int,
    ) -> None:
        super().__init__(
            source, store, options=options, deadline=deadline, window_bytes=window_bytes
        )
        self._records = records
        self._sound: set[Record] = set()

    def box(self, fqn: str, box: Box) -> Iterator[memoryview]:
        """Yield the bytes of a box of a tensor in C order."""
        record = self._records.get(fqn)
        windows = super().box(fqn, box)
        if record is None or record in self._sound:
            yield from windows
            return
        info = self._source.tensors[fqn]
        place = self._source.place(fqn, (0,) * len(info.shape))
        covers = (place.start, payload_bytes(info)) == (record.start, record.size_bytes)
        if not covers or box.sizes != info.shape:
            self._check(place, record)
            yield from windows
            return
        crc = 0
        for window in windows:
            crc = zlib.crc32(window, crc)
            yield window
        self._hold(place, record, crc)

    def _check(self, place: Place, record: Record) -> None:
        crc, end = 0, record.start + record.size_bytes
        for start in range(record.start, end, self._window_bytes):
            buffer = bytearray(min(self._window_bytes, end - start))
            part = dataclasses.replace(place, start=start, size_bytes=len(buffer))
            self._run([bytes_request(part, buffer)])
            crc = zlib.crc32(buffer, crc)
        self._hold(place, record, crc)

    def _hold(self, place: Place, record: Record, crc: int) -> None:
        if crc != record.crc32:
            raise IntegrityError(
                f"{place.path} is damaged: the {record.size_bytes} bytes at byte "
                f"{record.start}, which hold {place.fqn}, do not have the checksum that they were "
                "written with.",
                path=place.path,
                fqn=place.fqn,
                offset=record.start,
                next_step=_RESTORE,
            )
        self._sound.add(record)
