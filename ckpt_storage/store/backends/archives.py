"""Tar archives, which are read without being unpacked."""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zlib
from typing import Any

import fsspec

from .generic import FsspecBackend

_TarFileSystem: Any = fsspec.get_filesystem_class("tar")

_SHORT_SUFFIXES = {".tgz": "gzip", ".tbz": "bz2", ".tbz2": "bz2", ".txz": "xz"}
"""Compressions by suffixes that fsspec does not know."""

_READ_ERRORS = (tarfile.ReadError, EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
"""What an archive raises that is damaged, or compressed otherwise than its name shows."""


class _Archive(_TarFileSystem):  # type: ignore[misc]  # fsspec has no types
    """An archive whose names may begin with "./", as `tar cf run.tar .` writes them."""

    def __init__(self, fo: Any = "", **options: Any) -> None:
        suffix = str(fo)[str(fo).rfind(".") :].lower()
        if options.get("compression") is None and suffix in _SHORT_SUFFIXES:
            options["compression"] = _SHORT_SUFFIXES[suffix]
        try:
            super().__init__(fo=fo, **options)
        except _READ_ERRORS as error:
            raise ValueError(
                f"{error}: the archive is damaged, no tar archive, or compressed under a name that "
                "does not show it; then pass the option compression, such as 'gzip'"
            ) from error

    def _index(self) -> None:
        sizes: dict[str, int] = {}
        for member in vars(self)["tar"].getmembers():
            member.name = member.name.removeprefix("./")
            if member.islnk():
                # Fsspec of 2024 has 0, the length that the archive records of a link.
                member.size = sizes.get(member.linkname.removeprefix("./"), 0)
            sizes[member.name] = member.size
        super()._index()
        vars(self)["index"].pop(".", None)


class TarBackend(FsspecBackend):
    """A folder in an archive; nothing is written."""

    def _find_class(self, protocol: str) -> Any:
        del protocol
        return _Archive
