"""What a caller may choose: options of a consolidation, selections of values, sizes as texts."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import MIB, PageCache, check_page_cache

Selection = str | Collection[str] | Callable[[str], bool]
"""FQNs and glob patterns, or a function that says of each FQN whether it is meant."""

DEFAULT_MAX_FILE_BYTES = "5GB"
"""What `save_pretrained` of Hugging Face's libraries takes unless told otherwise."""

MIN_FILE_BYTES = 1000
MIN_MEMORY_LIMIT_BYTES = MIB

CASTABLE = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes that `dtype=` casts, from and to. 8-bit floats mean nothing without their scales."""

_GLOB = re.compile(r"[*?\[]")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(I?))?B?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateOptions:
    """How tensors of a checkpoint become weight files.

    max_file_bytes: tensors of one weight file together have at most this many bytes, unless one
        alone has more: an int, or a text such as "5GB" (decimal) or "5GiB" (binary). Headers do
        not count, as in Hugging Face's libraries.
    fqn_to_index_mapping: instead of a limit, which file (from 1; gaps are closed) each tensor goes
        into, as in torch's `HuggingFaceStorageWriter`. Keys are names as in the weight files; one
        that is none is taken as an FQN. Every tensor that goes out needs one.
    dtype: what to cast to, as a `torch.dtype` or its name. Only tensors of float64, float32,
        float16 and bfloat16 are cast, and only to these; all others go out as they are.
    rename: names in the weight files. A mapping from FQN to name leaves the tensors that it does
        not list their default name. A function gets every FQN, and its answer is the name; it must
        answer alike on all ranks.
    include: which tensors go out, instead of the default choice (see `choose_model`).
    exclude: which of them do not. Both take FQNs and glob patterns (`*`, which matches dots too,
        `?`, `[...]`, letter case counts), one or a collection of them, or a function that gets
        each FQN. An entry that is an FQN is never read as a pattern.
    tied: what happens to aliases of recorded ties: "drop" leaves them out, because `transformers`
        ties them again; "keep" writes their bytes once more. A mapping from alias to target is
        "drop" with more ties than were recorded.
    memory_limit_bytes: ceiling of buffers that hold bytes in flight, per process; None: 256 MiB,
        or this rank's share of the node's (`docs/performance.md`).
    page_cache: "drop" lets the kernel keep no copy of weight files that are on a local disk, "keep"
        leaves them in its cache; None: "keep", or after a save as that has it.
    output: folder or URL of the export that a save makes; None: `hf` below the checkpoint.
        `consolidate` itself takes it as an argument of its own.
    output_storage_options: passed to the file system of `output`.
    """

    max_file_bytes: int | str = DEFAULT_MAX_FILE_BYTES
    fqn_to_index_mapping: Mapping[str, int] | None = None
    dtype: object | None = None
    rename: Mapping[str, str] | Callable[[str], str] | None = None
    include: Selection | None = None
    exclude: Selection | None = None
    tied: Literal["drop", "keep"] | Mapping[str, str] = "drop"
    memory_limit_bytes: int | None = None
    page_cache: PageCache | None = None
    output: str | os.PathLike[str] | None = None
    output_storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        limit_bytes = self.file_limit_bytes
        if limit_bytes < MIN_FILE_BYTES:
            raise InvalidInputError(
                f"max_file_bytes is {self.max_file_bytes!r}, {limit_bytes} bytes.",
                next_step=f'Give {MIN_FILE_BYTES} or more; sizes are texts such as "5GB".',
            )
        _check_index(self.fqn_to_index_mapping)
        if self.fqn_to_index_mapping is not None and self.max_file_bytes != DEFAULT_MAX_FILE_BYTES:
            raise InvalidInputError(
                "Both fqn_to_index_mapping and max_file_bytes say which file a tensor goes into.",
                next_step="Give one of them.",
            )
        _ = self.cast_to
        if not (self.rename is None or callable(self.rename) or _is_text_map(self.rename)):
            raise _wrong("rename", self.rename, "a mapping or a function from FQN to name")
        for option, value in (("include", self.include), ("exclude", self.exclude)):
            check_selection(option, value)
        if self.tied not in ("drop", "keep") and not _is_text_map(self.tied):
            raise _wrong("tied", self.tied, '"drop", "keep", or a mapping from alias to target')
        limit = self.memory_limit_bytes
        if limit is not None:
            check_memory_limit(limit)
        if self.page_cache is not None:
            check_page_cache(self.page_cache)

    @property
    def file_limit_bytes(self) -> int:
        """`max_file_bytes` as a number."""
        return parse_bytes(self.max_file_bytes, option="max_file_bytes")

    @property
    def cast_to(self) -> str | None:
        """`dtype` as a name of `tensorfile.DTYPES`; None: nothing is cast."""
        if self.dtype is None:
            return None
        # Without importing torch: a dtype prints as "torch.bfloat16".
        name = str(self.dtype).removeprefix("torch.")
        if name not in CASTABLE:
            raise InvalidInputError(
                f"dtype is {self.dtype!r:.80}.",
                next_step=f"Give one of {', '.join(sorted(CASTABLE))}. To quantise, use a tool "
                "that also writes the scales.",
            )
        return name


def check_memory_limit(limit: object) -> None:
    """Raise `InvalidInputError` for a ceiling of buffers that nothing can work with."""
    if type(limit) is not int or limit < MIN_MEMORY_LIMIT_BYTES:
        raise InvalidInputError(
            f"memory_limit_bytes is {limit!r}.",
            next_step=f"Give an integer of {MIN_MEMORY_LIMIT_BYTES} or more.",
        )


def parse_bytes(value: int | str, *, option: str) -> int:
    """Return a number of bytes given as an int or as a text such as "5GB" or "1.5 GiB".

    K, M, G, T count in thousands, Ki, Mi, Gi, Ti in 1024; letter case does not matter. Raises
    `InvalidInputError` naming the `option`.
    """
    if type(value) is int:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _wrong(option, value, 'a number of bytes, or a text such as "5GB" or "5GiB"')
    number, unit, binary = match.groups(default="")
    return int(Fraction(number) * (1024 if binary else 1000) ** _POWERS[unit.upper()])


def check_selection(option: str, value: object) -> None:
    """Raise `InvalidInputError` unless `value` is a `Selection` or None."""
    if value is None or callable(value) or isinstance(value, str):
        return
    if isinstance(value, Collection) and all(isinstance(entry, str) for entry in value):
        return
    raise _wrong(option, value, "FQNs or glob patterns, or a function that takes an FQN")


def _check_index(mapping: object) -> None:
    if mapping is None:
        return
    good = isinstance(mapping, Mapping) and all(
        isinstance(key, str) and type(value) is int for key, value in mapping.items()
    )
    if not good or not isinstance(mapping, Mapping) or not mapping:
        text = "a mapping from FQN to the number of its file, from 1 on"
        raise _wrong("fqn_to_index_mapping", mapping, text)
    fqn = min(mapping, key=lambda fqn: (mapping[fqn], fqn))
    if mapping[fqn] < 1:
        raise InvalidInputError(
            f"fqn_to_index_mapping does not number files from 1: {fqn} goes into file "
            f"{mapping[fqn]}.",
            next_step="Number the files from 1 on; gaps are closed.",
        )


def _wrong(option: str, value: object, wanted: str) -> InvalidInputError:
    return InvalidInputError(f"{option} is {value!r:.80}.", next_step=f"Give {wanted}.")


def _is_text_map(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(name, str) for key, name in value.items()
    )


def matching(selection: Selection, names: Collection[str], option: str) -> set[str]:
    """Return those of `names`, all values of a checkpoint, that a selection means.

    An entry is an FQN, or else a glob pattern. Raises `InvalidInputError` for an entry that matches
    nothing: it is likely misspelt.
    """
    if callable(selection):
        return {fqn for fqn in sorted(names) if selection(fqn)}
    found: set[str] = set()
    for entry in [selection] if isinstance(selection, str) else sorted(selection):
        if entry in names:
            found.add(entry)
            continue
        match = re.compile(fnmatch.translate(entry)).match
        matches = {fqn for fqn in names if match(fqn)} if _GLOB.search(entry) else set()
        if not matches:
            below = any(fqn.startswith(f"{entry}.") for fqn in names)
            raise InvalidInputError(
                f"{option} names {entry!r}, which matches no value of the checkpoint.",
                next_step=f'For all below it give "{entry}.*".'
                if below
                else "Give FQNs or glob patterns.",
            )
        found |= matches
    return found


def digest(value: object) -> str:
    """Return a text that is the same for equal options on all ranks; functions are not compared.

    What functions answer is compared as part of the plan.
    """
    if callable(value):
        return "a function"
    if isinstance(value, Mapping):
        value = sorted((str(key), str(one)) for key, one in value.items())
    elif isinstance(value, set | frozenset | list | tuple):
        value = sorted(map(str, value))
    text = repr(value)
    return text if len(text) < 80 else hashlib.sha256(text.encode()).hexdigest()  # noqa: PLR2004
