"""`convert` refuses what `torch.load` refuses: views, storages and records that reach too far."""

from __future__ import annotations

import io
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_storage import errors
from ckpt_storage.export.convert import convert


class View:
    """A tensor as a pickle may describe it: any offset and size over a storage."""

    def __init__(self, base: torch.Tensor, offset: int, size: int, claimed: int = 0) -> None:
        self.base, self.offset, self.size, self.claimed = base, offset, size, claimed

    def __reduce__(self) -> tuple[Any, ...]:
        untyped: Any = torch
        data, dtype = self.base.untyped_storage(), self.base.dtype
        typed = untyped.storage.TypedStorage(wrap_storage=data, dtype=dtype, _internal=True)
        hooks: OrderedDict[int, Any] = OrderedDict()
        parts = (typed, self.offset, (self.size,), (1,), False, hooks)
        return untyped._utils._rebuild_tensor_v2, parts  # noqa: SLF001  # what a pickle names


def saved(path: Path, view: View) -> Path:
    torch.save({"w": view, "behind": torch.full((64,), 7.0)}, path)
    return path


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Write the records of a file anew, after a change, as a zip without checksums' help."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    change(records)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return path


def check_refused(path: Path, target: Path, *, by_torch: bool = True) -> None:
    if by_torch:
        with pytest.raises(Exception):  # noqa: B017, PT011  # torch has several
            torch.load(path)
    with pytest.raises((errors.FormatError, errors.IntegrityError)):
        convert(path, target, to="safetensors")
    assert not list(target.glob("*.safetensors"))


@pytest.mark.parametrize(("offset", "size"), [(0, 9), (4, 5), (8, 1), (1 << 40, 1)])
def test_a_view_beyond_its_storage_is_refused(tmp_path: Path, offset: int, size: int) -> None:
    """Bytes of the neighbouring record are never exported as values of a tensor."""
    path = saved(tmp_path / "model.pt", View(torch.ones(8), offset, size))
    check_refused(path, tmp_path / "out")


def test_a_view_that_ends_with_its_storage_is_converted(tmp_path: Path) -> None:
    """The last elements of a storage are within it."""
    path = saved(tmp_path / "model.pt", View(torch.arange(8.0), 3, 5))
    convert(path, tmp_path / "out.pt", to="ckpt_storage")
    assert torch.equal(torch.load(path)["w"], torch.arange(3.0, 8.0))


def test_a_storage_longer_than_its_record_is_refused(tmp_path: Path) -> None:
    """What the pickle says of a storage's length is held against the record; not by torch 2.9."""
    path = saved(tmp_path / "model.pt", View(torch.ones(8), 0, 8))

    def shorten(records: dict[str, bytes]) -> None:
        name = next(name for name in records if name.endswith("data/0"))
        records[name] = records[name][:-4]

    check_refused(rewritten(path, shorten), tmp_path / "out", by_torch=False)


def test_a_torchscript_archive_is_refused(tmp_path: Path) -> None:
    """A file with `constants.pkl` is code, whatever its `data.pkl` holds."""
    path = saved(tmp_path / "model.pt", View(torch.ones(8), 0, 8))

    def add(records: dict[str, bytes]) -> None:
        folder = next(iter(records)).partition("/")[0]
        records[f"{folder}/constants.pkl"] = b"\x80\x02)."

    check_refused(rewritten(path, add), tmp_path / "out")


@pytest.mark.parametrize(("stored", "size"), [(4 * 300, 4 * 300), (4 * 4, 4 * 8)])
def test_a_record_with_a_wrong_length_is_refused(tmp_path: Path, stored: int, size: int) -> None:
    """One that reaches into the next; one that is not compressed, yet stored in fewer bytes."""
    path = tmp_path / "model.pt"
    torch.save({"w": View(torch.ones(8), 0, 8), "behind": torch.full((64,), 7.0)}, path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        at = archive.start_dir
        info = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
    # No checksums, as torch can be told to write none: they would notice.
    while data[at : at + 4] == b"PK\x01\x02":
        lengths = struct.unpack_from("<3H", data, at + 28)
        struct.pack_into("<I", data, at + 16, 0)
        if data[at + 46 : at + 46 + lengths[0]].decode() == info.filename:
            struct.pack_into("<2I", data, at + 20, stored, size)
        at += 46 + sum(lengths)
    path.write_bytes(data)
    with pytest.raises((errors.FormatError, errors.IntegrityError)):
        convert(path, tmp_path / "out", to="safetensors")
