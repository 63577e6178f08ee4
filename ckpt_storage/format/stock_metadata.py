"""A decoder of DCP's `.metadata`, torch's pickle, that runs none of it and imports no torch.

It does not check that chunks cover their tensors, or that files exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_storage.errors import FormatError, UnsafeContentError

from .boxes import Box
from .dtypes import DTYPES
from .fields import MAX_DIMS, is_int_list
from .inert_pickle import (
    Allowed,
    ForbiddenGlobalError,
    Global,
    Pairs,
    PickleMalformedError,
    PickleTruncatedError,
    Record,
    build_ordered_dict,
    interpret,
)
from .manifest import TensorRecord
from .names import STOCK_METADATA, checked_path

_MAX_FIELDS = 64

MAX_STOCK_BYTES = 4 << 30
"""The limit for `.metadata`. With 10,000 ranks and 2,000 tensors each, it has 3.4 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockItem:
    """The place of one item: `length` bytes at `offset` of a file below the checkpoint.

    `transforms` names the transforms that a reader has to undo, in this order.
    """

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StockMetadata:
    """The content of a stock `.metadata`.

    A dtype may be missing in `DTYPES`. `paths` maps an FQN to its path in the nested state dict;
    None if the planner data is of another form. `items` are by FQN and chunk offsets, None for a
    blob.
    """

    tensors: Mapping[str, TensorRecord]
    blobs: frozenset[str]
    paths: Mapping[str, tuple[str | int, ...]] | None
    items: Mapping[tuple[str, tuple[int, ...] | None], StockItem]


def decode_stock_metadata(data: bytes) -> StockMetadata:
    """Return the content of a `.metadata` file.

    Accepts only the classes that stock torch pickles there, and imports and calls none of them.
    Bytes after the pickle are allowed. Raises `UnsafeContentError` for another class or function
    and for an item path that leaves the checkpoint's folder, and `FormatError` for a pickle that is
    truncated, of another kind, or too long.
    """
    if len(data) > MAX_STOCK_BYTES:
        raise _unusable(f"is {len(data)} bytes long; {MAX_STOCK_BYTES} is the limit")
    try:
        return _Decoder(len(data)).metadata(interpret(data, _ALLOWED))
    except ForbiddenGlobalError as error:
        raise UnsafeContentError(
            f"{STOCK_METADATA} names '{error}', which stock torch does not write there; "
            "loading it with torch might run code. Nothing was executed.",
            path=STOCK_METADATA,
            next_step="Do not load this checkpoint with torch; find out who wrote it.",
        ) from error
    except PickleTruncatedError as error:
        raise _unusable(f"is cut short: it ends after {len(data)} bytes") from error
    except PickleMalformedError as error:
        raise _unusable(f"is no metadata of torch's DCP ({error})") from error


def _unusable(problem: str) -> FormatError:
    return FormatError(
        f"{STOCK_METADATA} {problem}.",
        path=STOCK_METADATA,
        next_step="Fetch it again or restore it from a copy; else load another checkpoint.",
    )


_META = "torch.distributed.checkpoint.metadata."
_METADATA = f"{_META}Metadata"
_TENSOR = f"{_META}TensorStorageMetadata"
_BYTES = f"{_META}BytesStorageMetadata"
_CHUNK = f"{_META}ChunkStorageMetadata"
_INDEX = f"{_META}MetadataIndex"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

# Files of torch 2.0 to 2.2 name the older place.
_OLD_META = "torch.distributed._shard.sharded_tensor.metadata."
_PROPERTIES = frozenset((f"{_META}TensorProperties", f"{_OLD_META}TensorProperties"))
_ENUMS = frozenset((f"{_META}_MEM_FORMAT_ENCODING", f"{_OLD_META}MEM_FORMAT_ENCODING"))

_DTYPES = {
    f"torch.{name}": name
    for name in (
        *DTYPES,
        *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    )
}


def _build_size(args: tuple[object, ...]) -> object:
    match args:
        case (tuple(values),):
            return _counts(values)
    raise PickleMalformedError("torch.Size has not one tuple as argument")


def _build_enum_member(args: tuple[object, ...]) -> object:
    """Accept the call that Python 3.11.0 to 3.11.3 pickles for an enum member (bpo-44342)."""
    match args:
        case (Global(name=name), str()) if name in _ENUMS:
            return None
    raise ForbiddenGlobalError("builtins.getattr")


_ALLOWED: Allowed = {
    **dict.fromkeys((_METADATA, _TENSOR, _BYTES, _CHUNK, _INDEX, f"{_META}StorageMeta", _INFO)),
    **dict.fromkeys((*_PROPERTIES, *_ENUMS, *_DTYPES)),
    # The checkpoint's id may be a path. Python 3.13 alone calls the module `pathlib._local`.
    **dict.fromkeys(
        f"{module}.{name}"
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    ),
    "torch.serialization._get_layout": None,
    "torch.Size": _build_size,
    "builtins.getattr": _build_enum_member,
    "collections.OrderedDict": build_ordered_dict,
}


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS or not is_int_list(value):
        raise PickleMalformedError("a size, offset or length is no count")
    return tuple(value)


def _text(value: object) -> str:
    if type(value) is not str:
        raise PickleMalformedError("a name is no text")
    return value


def _fields(value: object, name: str) -> dict[str, object]:
    match value:
        # A hostile file may name more attributes than any class has.
        case Record(name=kind, args=(), state=Pairs() as state) if (
            kind == name and len(state) <= _MAX_FIELDS
        ):
            fields = {_text(key): value for key, value in state}
            if len(fields) < len(state):
                raise PickleMalformedError("an attribute name of an object occurs twice")
            return fields
    raise PickleMalformedError(f"it has another value in place of a {name!r}")


def _pairs(value: object) -> Pairs:
    if not isinstance(value, Pairs):
        raise PickleMalformedError("it has another value in place of a dict")
    return value


class _Decoder:
    """Turns inert values into a `StockMetadata`, within a budget against endless repetition."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def _spend(self, amount: int) -> None:
        self._budget -= amount
        if self._budget < 0:
            raise PickleMalformedError("it repeats its contents")

    def metadata(self, value: object) -> StockMetadata:
        fields = _fields(value, _METADATA)
        entries: dict[str, TensorRecord | None] = {}
        for key, described in _pairs(fields.get("state_dict_metadata")):
            self._spend(1)
            if (fqn := _text(key)) in entries:
                raise PickleMalformedError(f"{fqn!r:.200} occurs twice")
            is_blob = isinstance(described, Record) and described.name == _BYTES
            entries[fqn] = None if is_blob else self._tensor(described)
        return StockMetadata(
            tensors={fqn: tensor for fqn, tensor in entries.items() if tensor is not None},
            blobs=frozenset(fqn for fqn, tensor in entries.items() if tensor is None),
            paths=self._object_paths(fields.get("planner_data")),
            items=self._items(fields.get("storage_data")),
        )

    def _tensor(self, value: object) -> TensorRecord:
        fields = _fields(value, _TENSOR)
        match fields.get("properties"):
            # Torch 2.15 adds strides to the five properties. Only the first, the dtype, is used.
            case Record(name=name, args=(), state=(Global(name=dtype), _, _, _, _, *_)) if (
                name in _PROPERTIES and dtype in _DTYPES
            ):
                pass
            case _:
                raise PickleMalformedError("a tensor has no dtype")
        shape = _counts(fields.get("size"))
        described = fields.get("chunks")
        if not isinstance(described, list):
            raise PickleMalformedError("a tensor has no list of chunks")
        self._spend(len(described))
        chunks = tuple(_chunk(chunk, shape) for chunk in described)
        return TensorRecord(dtype=_DTYPES[dtype], shape=shape, boxes=chunks)

    def _items(self, value: object) -> dict[tuple[str, tuple[int, ...] | None], StockItem]:
        items: dict[tuple[str, tuple[int, ...] | None], StockItem] = {}
        # Some writers, such as torch's for safetensors, write no table of items.
        for index, info in Pairs() if value is None else _pairs(value):
            named, place = _fields(index, _INDEX), _fields(info, _INFO)
            at, transforms = named.get("offset"), place.get("transform_descriptors") or ()
            key = (_text(named.get("fqn")), None if at is None else _counts(at))
            if key in items:
                raise PickleMalformedError(f"{key[0]!r:.200} is stored twice")
            if not isinstance(transforms, tuple | list):
                raise PickleMalformedError("the transforms of an item are no list")
            self._spend(1 + len(transforms))
            offset, length = _counts((place.get("offset"), place.get("length")))
            items[key] = StockItem(
                relative_path=checked_path(_text(place.get("relative_path")), where=STOCK_METADATA),
                offset=offset,
                length=length,
                transforms=tuple(map(_text, transforms)),
            )
        return items

    def _object_paths(self, value: object) -> dict[str, tuple[str | int, ...]] | None:
        if not isinstance(value, Pairs):
            return None
        paths: dict[str, tuple[str | int, ...]] = {}
        for fqn, steps in value:
            if type(fqn) is not str or not isinstance(steps, tuple):
                return None
            self._spend(1 + len(steps))
            if not set(map(type, steps)) <= {str, int}:
                return None
            paths[fqn] = steps
        return paths


def _chunk(value: object, shape: tuple[int, ...]) -> Box:
    fields = _fields(value, _CHUNK)
    offsets, sizes = _counts(fields.get("offsets")), _counts(fields.get("sizes"))
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        raise PickleMalformedError("a chunk lies outside its tensor")
    return Box(offsets, sizes)
