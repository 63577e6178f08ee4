"""Arguments of callers: options of a consolidation, selections of values, sizes, locations."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Literal

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.exports import PATTERNS
from ckpt_storage.options import MIB, PageCache, check_choice
from ckpt_storage.source.renaming import RENAME_WANTED, Rename, is_rename
from ckpt_storage.store import Location, endpoint_of

Selection = str | Collection[str] | Callable[[str], bool]
"""FQNs and glob patterns, or a function that returns for each FQN whether it is selected."""

ExtraFiles = str | os.PathLike[str] | Collection[str | os.PathLike[str]] | Mapping[str, Any]
"""Paths or URLs of files, or a mapping from the name in the export to a path, a URL or bytes."""

DEFAULT_MAX_FILE_BYTES = "5GB"
"""What `save_pretrained` of Hugging Face's libraries uses by default."""

_MIN_FILE_BYTES = 1000

CASTABLE = ("bfloat16", "float16", "float32", "float64")
"""Dtypes that `dtype=` casts, from and to. 8-bit floats mean nothing without their scales."""

WANTED = {
    "max_file_bytes": f"{_MIN_FILE_BYTES} or more",
    "fqn_to_index_mapping": "a mapping from FQN to the number of its file, from 1 on",
    "filename_pattern": f"one of {', '.join(PATTERNS)}",
    "dtype": f"one of {', '.join(CASTABLE)}, or a mapping from patterns to these. To quantise, use "
    "a tool that writes the scales too",
    "rename": RENAME_WANTED,
    "include": "FQNs, glob patterns, or a function of each",
    "exclude": "FQNs, glob patterns, or a function of each",
    "tied": '"drop", "keep", or a mapping from alias to target',
    "extra_files": "paths or URLs of files, or a mapping from names to these or to bytes",
}
"""The valid values of the options that decide the content of an export, for error messages."""

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(I?))?B?\s*", re.IGNORECASE)
_DIGEST_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateOptions:
    """How tensors of a checkpoint become weight files.

    max_file_bytes: tensors of a weight file together have at most this many bytes, unless a tensor
        alone has more: an int, or a text such as "5GB" (decimal) or "5GiB" (binary). Headers do
        not count, as in Hugging Face's libraries.
    fqn_to_index_mapping: instead of a limit, which file (from 1; gaps are closed) each tensor goes
        into, as in torch's `HuggingFaceStorageWriter`. Keys are names as in the weight files, or
        FQNs. Every tensor that is exported needs a file.
    filename_pattern: names of the weight files: `model{suffix}.safetensors`, PEFT's
        `adapter_model{suffix}.safetensors` (always one file) or diffusers'
        `diffusion_pytorch_model{suffix}.safetensors`. None: PEFT's if `adapter_config.json` lies
        beside the weights, else the first.
    dtype: what to cast to, as a `torch.dtype` or its name; or a mapping to these from FQNs, names
        in the weight files and glob patterns, such as `{"*.router.*": "float32", "*": "bfloat16"}`,
        of which the first that matches is used. Only tensors of float64, float32, float16 and
        bfloat16 are cast, and only to these; all others are not changed.
    rename: names in the weight files. A mapping from FQN to name leaves the tensors that it does
        not list their default name: their own, without `module.` and `_orig_mod.` of wrappers.
        A function gets every FQN, and its answer is the name; it must answer alike on all ranks.
    include: which tensors to export, instead of the default: the model's.
    exclude: which of them to skip. Both take FQNs and glob patterns (`*`, which matches dots too,
        `?`, `[...]`, letter case counts), one or a collection of them, or a function that gets
        each FQN. An entry that is an FQN is not used as a pattern.
    tied: for aliases of recorded ties: "drop" skips them, because `transformers` ties them again;
        "keep" writes their bytes once more. A mapping from alias to target (FQNs, with or without
        the model's key) is "drop" with more ties than were recorded.
    extra_files: files to write beside the weights, such as config.json and those of a tokenizer:
        paths or URLs, or a mapping from the name in the export to a path, a URL or bytes. The first
        rank reads them. They are replaced before the index is. Entries `files.<name>` of the
        checkpoint, tensors of uint8, are written too, unless `exclude` names them.
    memory_limit_bytes: ceiling of buffers that hold bytes in flight, per process; None: 256 MiB,
        or this rank's share of the node's (`docs/performance.md`).
    page_cache: "drop" lets the kernel keep no copy of weight files that are on a local disk, "keep"
        leaves them in its cache; None: "keep", or after a save as that has it.
    output: folder or URL of the export that a save makes; None: `hf` below the checkpoint.
        `consolidate` itself has an argument for it.
    output_storage_options: passed to the file system of `output`.
    """

    max_file_bytes: int | str = DEFAULT_MAX_FILE_BYTES
    fqn_to_index_mapping: Mapping[str, int] | None = None
    filename_pattern: str | None = None
    dtype: object | None = None
    rename: Rename | None = None
    include: Selection | None = None
    exclude: Selection | None = None
    tied: Literal["drop", "keep"] | Mapping[str, str] = "drop"
    extra_files: ExtraFiles | None = None
    memory_limit_bytes: int | None = None
    page_cache: PageCache | None = None
    output: str | os.PathLike[str] | None = None
    output_storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        index = self.fqn_to_index_mapping
        is_good = {
            "max_file_bytes": self.file_limit_bytes >= _MIN_FILE_BYTES,
            "fqn_to_index_mapping": index is None
            or (bool(index) and _maps(index, int) and min(index.values()) > 0),
            "filename_pattern": self.filename_pattern in (None, *PATTERNS),
            "dtype": all(dtype in CASTABLE for dtype in self.casts.values()),
            "rename": is_rename(self.rename),
            "include": _is_selection(self.include),
            "exclude": _is_selection(self.exclude),
            "tied": self.tied in ("drop", "keep") or _maps(self.tied, str),
            "extra_files": _are_files(self.extra_files),
        }
        for option, wanted in WANTED.items():
            if not is_good[option]:
                raise _wrong(option, getattr(self, option), wanted)
        if index is not None and self.max_file_bytes != DEFAULT_MAX_FILE_BYTES:
            what = "Both fqn_to_index_mapping and max_file_bytes say which file a tensor goes into."
            raise InvalidInputError(what, next_step="Give one of them.")
        if self.memory_limit_bytes is not None:
            check_memory_limit(self.memory_limit_bytes)
        if self.page_cache is not None:
            check_choice("page_cache", self.page_cache, PageCache)

    @property
    def file_limit_bytes(self) -> int:
        """`max_file_bytes` as a number."""
        return parse_bytes(self.max_file_bytes, option="max_file_bytes")

    @property
    def casts(self) -> dict[str, str]:
        """`dtype` as names of `format.names` by pattern; empty: nothing is cast."""
        wanted = self.dtype if isinstance(self.dtype, Mapping) else {"*": self.dtype}
        # Without importing torch: a dtype prints as "torch.bfloat16".
        named = {str(key): str(dtype).removeprefix("torch.") for key, dtype in wanted.items()}
        return {} if self.dtype is None else named


def check_memory_limit(limit: object) -> None:
    """Raise `InvalidInputError` for a limit of buffers that is too low."""
    if type(limit) is not int or limit < MIB:
        raise _wrong("memory_limit_bytes", limit, f"an integer of {MIB} or more")


def parse_bytes(value: int | str, *, option: str) -> int:
    """Return a number of bytes from an int or a text such as "5GB" or "1.5 GiB".

    K, M, G, T count in thousands, Ki, Mi, Gi, Ti in 1024; letter case does not matter. Raises
    `InvalidInputError` naming the `option`.
    """
    if type(value) is int:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _wrong(option, value, 'a number of bytes, or a text such as "5GB" or "5GiB"')
    number, unit, binary = match.groups(default="")
    power = " KMGT".index(unit.upper() or " ")
    return int(Fraction(number) * (1024 if binary else 1000) ** power)


def _is_selection(value: object) -> bool:
    return (
        value is None
        or callable(value)
        or (isinstance(value, Collection) and all(isinstance(entry, str) for entry in value))
    )


def _are_files(value: object) -> bool:
    if isinstance(value, Mapping):
        is_content = all(isinstance(file, str | os.PathLike | bytes) for file in value.values())
        return is_content and all(isinstance(name, str) for name in value)
    is_path = value is None or isinstance(value, str | os.PathLike)
    return is_path or (
        isinstance(value, Collection) and all(isinstance(file, str | os.PathLike) for file in value)
    )


def _maps(value: object, kind: type) -> bool:
    """Return whether a value is a mapping from texts to values of a kind."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and type(entry) is kind for key, entry in value.items()
    )


def _wrong(option: str, value: object, wanted: str) -> InvalidInputError:
    return InvalidInputError(f"{option} is {value!r:.80}.", next_step=f"Give {wanted}.")


def matching(selection: Selection, names: Collection[str], option: str) -> set[str]:
    """Return those of `names`, the values of a checkpoint, that a selection selects.

    An entry is an FQN, or else a glob pattern. Raises `InvalidInputError` for an entry that matches
    nothing: it is likely misspelt.
    """
    if callable(selection):
        return {fqn for fqn in sorted(names) if selection(fqn)}
    matched: set[str] = set()
    for entry in [selection] if isinstance(selection, str) else sorted(selection):
        matches = {entry} if entry in names else {n for n in names if fnmatchcase(n, entry)}
        if not matches:
            below = any(fqn.startswith(f"{entry}.") for fqn in names)
            raise InvalidInputError(
                f"{option} names {entry!r}, which matches no value of the checkpoint.",
                next_step=f'For all below it give "{entry}.*".'
                if below
                else "Give FQNs or glob patterns.",
            )
        matched |= matches
    return matched


def digest(value: object) -> str:
    """Return a text that is the same for equal options; results of functions are in the plan."""
    if callable(value):
        return "a function"
    if isinstance(value, Mapping):
        value = sorted((str(key), str(entry)) for key, entry in value.items())
    elif isinstance(value, set | frozenset | list | tuple):
        value = sorted(map(str, value))
    text = repr(value)
    return text if len(text) < _DIGEST_CHARS else hashlib.sha256(text.encode()).hexdigest()


def location_beside(
    source: Location, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> Location:
    """Return the location of `url`; its options are by default those of a source of its kind."""
    location = Location.of(url, storage_options)
    if storage_options is None and location.protocol == source.protocol:
        return Location.of(url, source.storage_options)
    return location


def split_file(location: Location) -> tuple[Location, str]:
    """Return the folder of a file, and the file's name; "" if it is a root."""
    head, _, name = location.target.rpartition("/")
    is_root = not head or head.endswith(":/")
    target = location.target if is_root and head else head or "/"
    return replace(location, target=target), "" if is_root and head else name


def is_within(outer: Location, inner: Location) -> bool:
    """Return whether, by their names, `inner` is `outer` or lies below it."""

    def spelt(location: Location) -> str:
        # Of the options only these lead to another storage.
        who = (
            location.protocol,
            endpoint_of(location),
            str(location.storage_options.get("profile") or ""),
        )
        return f"{who} {os.path.realpath(location.target) if location.is_local else location.url}"

    return f"{spelt(inner)}/".startswith(f"{spelt(outer).rstrip('/')}/")
