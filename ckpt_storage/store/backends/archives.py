"""Tar archives, which are read without being unpacked."""

from __future__ import annotations

from typing import Any

import fsspec

from .generic import FsspecBackend

_TarFileSystem: Any = fsspec.get_filesystem_class("tar")


class _Archive(_TarFileSystem):  # type: ignore[misc]  # fsspec has no types
    """An archive whose names may begin with "./", as `tar cf run.tar .` writes them."""

    def _index(self) -> None:
        super()._index()
        entries: dict[str, Any] = {}
        for name, entry in vars(self)["index"].items():
            entry[0]["name"] = name.removeprefix("./")
            entries[name.removeprefix("./")] = entry
        entries.pop(".", None)
        self.index = entries


class TarBackend(FsspecBackend):
    """A folder in an archive; nothing is written."""

    def _find_class(self, protocol: str) -> Any:
        del protocol
        return _Archive
