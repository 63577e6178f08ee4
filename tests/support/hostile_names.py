"""Names that a hostile or broken writer gives to objects, and buckets that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFile
from fsspec.spec import AbstractFileSystem
from s3_server import S3Server

UNSAFE = (
    *("../x", "a/../../x", "a/../x", "a/./b", "./x", "..", ".", "a/.."),
    *("/abs", "//abs", "a//b"),
    *("a\\..\\x", "C:\\x", "C:x", "s3:/b/x", "s3://b/x", "file:///x"),
    *("a\nb", "a\n", "\x7f"),
)
"""Each leads out of the folder on some storage, or is another name there."""

UNSENDABLE = ("\0", "a\0b", "\x1b[2J", "\ud800")
"""As `UNSAFE`; XML cannot spell them."""

PLAIN = (
    *("%2e%2e/x", "%2F..%2Fx", "~/x", "$HOME/x", "...", "..x/y..", "-rf", "x y", "epoch:5/x"),
    *("é/\u2024\u2024/x", "\uff0e\uff0e/x", "a#b", "a?b", "[x]*"),
)
"""Names that no storage resolves: what is percent-encoded stays so, look-alikes are letters."""


class RawBucket(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """An fsspec file system over object keys, which it lists as they are."""

    protocol = "rawbucket"
    cachable = False
    objects: Mapping[str, bytes] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("rawbucket://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  # fsspec's signature
        below, entries = f"{self._strip_protocol(path)}/", dict[str, dict[str, Any]]()
        for key, data in self.objects.items():
            if key.startswith(below):
                child, slash, _rest = key[len(below) :].partition("/")
                name = f"{below}{child}"
                kind = "directory" if slash else "file"
                entries[name] = {"name": name, "size": 0 if slash else len(data), "type": kind}
        if not entries:
            raise FileNotFoundError(path)
        return list(entries.values()) if detail else list(entries)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        if key in self.objects:
            return {"name": key, "size": len(self.objects[key]), "type": "file"}
        if key and "/" not in key:
            return {"name": key, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        return self.objects[self._strip_protocol(path)][start:end]


fsspec.register_implementation("rawbucket", RawBucket, clobber=True)

KINDS = ("memory", "s3", "generic")
Bucket = tuple[str, dict[str, Any]]


@contextmanager
def bucket_of(kind: str, objects: Mapping[str, bytes], server: S3Server) -> Iterator[Bucket]:
    """Give URL and storage options of a folder that holds these objects, whatever their names."""
    if kind == "s3":
        for name, data in objects.items():
            server.put("bkt", f"run/{name}", data)
        yield "s3://bkt/run", server.storage_options
    elif kind == "memory":
        fs = fsspec.filesystem("memory")
        fs.store.clear()
        fs.store.update(
            {f"/run/{name}": MemoryFile(fs, f"/run/{name}", data) for name, data in objects.items()}
        )
        yield "memory://run", {}
        fs.store.clear()
    else:
        RawBucket.objects = {f"bkt/run/{name}": data for name, data in objects.items()}
        yield "rawbucket://bkt/run", {}
        RawBucket.objects = {}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return all paths below a folder, with the bytes of files; links are not followed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.is_symlink()
    }
