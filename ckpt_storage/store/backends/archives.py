"""Tar archives, which are read without being unpacked."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.tar import TarFileSystem

from .generic import FsspecBackend


class _Archive(TarFileSystem):
    """An archive whose names may begin with "./", as `tar cf run.tar .` writes them."""

    def _index(self) -> None:
        super()._index()
        by_name: dict[str, Any] = {}
        for name, entry in self.index.items():
            entry[0]["name"] = name.removeprefix("./")
            by_name[name.removeprefix("./")] = entry
        self.index = {name: entry for name, entry in by_name.items() if name != "."}


class TarBackend(FsspecBackend):
    """A folder in an archive; nothing is written."""

    def _find_class(self, protocol: str) -> Any:  # the class of a file system
        del protocol
        return _Archive
