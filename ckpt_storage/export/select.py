"""Which values of a checkpoint go out, under which names, and what is left out and why.

Pure. The default choice of `consolidate` follows how training scripts nest what they save: by the
path of each value in the nested state dict. Where nothing is known of the nesting, FQNs are taken
whole, except that their first part may name state to leave out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.source.model import Source, TensorInfo

from .options import CASTABLE, ConsolidateOptions, Selection, matching

_DIGITS = re.compile(r"([0-9]+)")
Reason = Literal["blob", "optimizer", "training state", "outside the model", "excluded", "tied"]
KeyPath = tuple[str | int, ...]

_MODEL = re.compile(
    r"model(_(state|state_dict|weights))?|module|params|state_dict|weights", re.IGNORECASE
)
"""Keys under which training scripts, Lightning and DeepSpeed keep the model; in any letter case."""

_OPTIMIZER = re.compile(r"opt(_state)?|optim(izer)?(s|_states?|_state_dict)?", re.IGNORECASE)

_TRAINING = re.compile(
    r"(cuda_)?rng_state|rng(_states)?|dataloader|(grad_)?scaler|(lr_)?schedulers?"
    r"|train(ing)?_state",
    re.IGNORECASE,
)

_BECAUSE: Mapping[Reason, str] = {
    "blob": "it is no tensor",
    "optimizer": "it is optimizer state",
    "training state": "it is state of the training loop",
    "excluded": "`exclude` names it",
}


class HasValues(Protocol):
    """What has named values: a source."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by FQN."""

    @property
    def blobs(self) -> frozenset[str]:
        """FQNs of the values that are no tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The values that a conversion takes over, and FQNs of those that it does not.

    `dropped` maps what the format cannot hold to why.
    """

    names: frozenset[str]
    dropped: Mapping[str, str]
    excluded: frozenset[str]


def select(
    source: HasValues,
    *,
    include: Selection | None,
    exclude: Selection | None,
    safetensors: bool,
    on_unsupported: Literal["error", "drop"],
    format_name: str,
) -> Selected:
    """Return which values go over to a format, which is one of safetensors or holds everything.

    Raises `InvalidInputError` for what the format cannot hold, unless that is to be dropped, for an
    entry that matches nothing, and where nothing is left.
    """
    values = {*source.tensors, *source.blobs}
    chosen = values if include is None else matching(include, values, "include")
    if exclude is not None:
        chosen = chosen - matching(exclude, values, "exclude")
    lacking: dict[str, str] = {}
    if safetensors:
        lacking = dict.fromkeys(source.blobs & chosen, "an object, no tensor")
        for fqn in chosen & source.tensors.keys():
            is_reserved = fqn == "__metadata__"
            reason = "a name that its header needs for itself" if is_reserved else None
            reason = reason or _no_safetensors(source.tensors[fqn])
            if reason:
                lacking[fqn] = reason
    if lacking and on_unsupported == "error":
        shown = ", ".join(f"{fqn} ({why})" for fqn, why in sorted(lacking.items())[:5])
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""  # noqa: PLR2004  # as shown
        raise InvalidInputError(
            f"{format_name} cannot hold {shown}{more}.",
            next_step='Pass unsupported="drop" to leave them out, or name what you want with '
            "include= and exclude=.",
        )
    names = frozenset(chosen - lacking.keys())
    if not names:
        raise InvalidInputError(
            "Nothing is left to convert.", next_step="Leave less out with exclude=."
        )
    return Selected(names=names, dropped=lacking, excluded=frozenset(values - chosen))


def _no_safetensors(info: TensorInfo) -> str | None:
    """Return why safetensors cannot hold a tensor, None if it can."""
    kind = DTYPES.get(info.dtype)
    if kind is None or kind.safetensors is None:
        return f"dtype {info.dtype}"
    if info.dtype == "float4_e2m1fn_x2" and not info.shape:
        return "a single pair of 4-bit numbers"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A value of the checkpoint that is in no weight file.

    `because` says it for people; for reason "tied" `target` is the FQN that stands for it.
    `size_bytes` is None for a blob, and for an alias that was not stored.
    """

    fqn: str
    reason: Reason
    because: str
    size_bytes: int | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A tensor that goes out: its name and dtype there, and where its elements come from."""

    name: str
    fqn: str
    source_dtype: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes in the weight file."""
        return prod(self.shape) * DTYPES[self.dtype].item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What goes out, in natural order of names ("layers.2" before "layers.10"), and what does not.

    `stripped` is what was taken off the front of FQNs, "" if nothing. `names` maps FQNs to names,
    those of dropped aliases included.
    """

    tensors: tuple[Chosen, ...]
    skipped: tuple[Skipped, ...]
    stripped: str
    names: Mapping[str, str]


def choose_model(
    source: Source, options: ConsolidateOptions, ties: Mapping[str, str] | None = None
) -> Choice:
    """Return which tensors go out and what they are called.

    Without `include`: level by level from the top of the nested state dict, containers of optimizer
    and training state are left out by their key; if just one has the key of a model, only what lies
    in it goes out; a lone container of any name at the top is looked into. Blobs never go out.

    Names without `rename`: where all chosen tensors lie in one container, its key is taken off,
    and so are further ones known to hold models: {"model": hf.state_dict()} gives
    "model.layers.0..." out of "model.model.layers.0..."; hf.state_dict() itself is left as it is.

    `ties` maps alias to target, both FQNs, as recorded by the save; an alias need not be stored.
    An alias goes out in its own right while its target does not. Raises `InvalidInputError`.
    """
    tensors = source.tensors
    roots = _tie_roots(source, ties or {}, "A recorded tie")
    paths = _paths(source, roots)
    skipped: dict[str, Skipped] = {}

    def skip(fqn: str, reason: Reason, because: str = "", target: str | None = None) -> None:
        info = tensors.get(fqn)
        skipped[fqn] = Skipped(
            fqn=fqn,
            reason=reason,
            because=because or _BECAUSE[reason],
            size_bytes=None if info is None else payload_bytes(info),
            target=target,
        )

    chosen = _selected(source, paths, options, skip)
    for fqn in source.blobs:
        skip(fqn, "blob")
    if not chosen:
        raise InvalidInputError(
            f"No tensor is left to export; {len(skipped)} values are left out.",
            next_step="Name what you want with include=, as FQNs or patterns.",
        )
    stripped = "" if callable(options.rename) else container_of([paths[fqn] for fqn in chosen])
    names = _names(sorted(chosen), stripped, options)
    if isinstance(options.tied, Mapping):
        by_name = {name: fqn for fqn, name in names.items()}

        def find(name: str) -> str:
            fqn = by_name.get(name, name)
            whole = f"{stripped}{fqn}"
            return whole if fqn not in tensors and whole in tensors else fqn

        told = {find(alias): find(target) for alias, target in sorted(options.tied.items())}
        roots = _tie_roots(source, {**(ties or {}), **told}, "tied=")
    if options.tied != "keep":
        for alias, target in roots.items():
            if target in chosen and alias not in skipped:
                skip(alias, "tied", f"it is tied to {target}", target)
        chosen -= skipped.keys()
    picked = [
        _chosen(fqn, fqn if fqn in tensors else roots[fqn], names[fqn], source, options)
        for fqn in sorted(chosen)
    ]
    return Choice(
        tensors=tuple(sorted(picked, key=lambda tensor: natural_key(tensor.name))),
        skipped=tuple(skipped[fqn] for fqn in sorted(skipped)),
        stripped=stripped,
        names=names,
    )


def payload_bytes(info: TensorInfo) -> int:
    """Return how many bytes the elements of a tensor have."""
    return prod(info.shape) * DTYPES[info.dtype].item_bytes


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return what sorts names with the numbers in them as numbers."""
    parts = _DIGITS.split(name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], name


def container_of(paths: Sequence[KeyPath]) -> str:
    """Return the keys, with their dots, of the container that holds all `paths`; "" if none does.

    The outermost one may have any name, further ones must be known to hold models: a module's own
    nested dictionaries are no containers.
    """
    keys: list[str] = []
    while True:
        depth = len(keys)
        heads = {str(path[depth]) if len(path) > depth + 1 else None for path in paths}
        key = heads.pop() if len(heads) == 1 else None
        if key is None or (depth and not _MODEL.fullmatch(key)):
            return "".join(f"{key}." for key in keys)
        keys.append(key)


def _paths(source: Source, roots: Mapping[str, str]) -> dict[str, KeyPath]:
    """Return the path in the nested state dict of every tensor and alias, as far as it is known.

    An alias that was not stored lies in the container of its target if its FQN begins so.
    """
    known = source.planner_data
    paths: dict[str, KeyPath] = {}
    for fqn in source.tensors:
        head, dot, rest = fqn.partition(".")
        is_apart = _OPTIMIZER.fullmatch(head) or _TRAINING.fullmatch(head)
        if known is not None:
            paths[fqn] = tuple(known.get(fqn, ())) or (fqn,)
        else:
            paths[fqn] = (head, rest) if dot and is_apart else (fqn,)
    for alias in roots.keys() - paths.keys():
        outer = paths[roots[alias]][:-1]
        prefix = "".join(f"{key}." for key in outer)
        paths[alias] = (*outer, alias[len(prefix) :]) if alias.startswith(prefix) else (alias,)
    return paths


Skip = Callable[..., None]


def _selected(
    source: Source, paths: Mapping[str, KeyPath], options: ConsolidateOptions, skip: Skip
) -> set[str]:
    """Return the FQNs that are meant to go out, aliases among them, and skip other tensors."""
    values = paths.keys() | source.blobs
    if options.include is None:
        chosen = _default_choice(paths, skip)
    else:
        chosen = matching(options.include, values, "include") & paths.keys()
        for fqn in paths.keys() - chosen:
            skip(fqn, "excluded", "`include` does not name it")
    if options.exclude is not None:
        for fqn in matching(options.exclude, values, "exclude") & chosen:
            skip(fqn, "excluded")
            chosen.discard(fqn)
    return chosen


def _default_choice(paths: Mapping[str, KeyPath], skip: Skip) -> set[str]:
    level, depth = sorted(paths), 0
    while True:
        nested: dict[str, list[str]] = {}
        direct: list[str] = []
        for fqn in level:
            path = paths[fqn]
            key = str(path[depth])
            # A tensor itself is never judged by its name: a module may have a parameter "scaler".
            if len(path) == depth + 1:
                direct.append(fqn)
            elif _OPTIMIZER.fullmatch(key):
                skip(fqn, "optimizer")
            elif _TRAINING.fullmatch(key):
                skip(fqn, "training state")
            else:
                nested.setdefault(key, []).append(fqn)
        models = [key for key in nested if _MODEL.fullmatch(key)]
        if len(models) == 1:
            chosen = models[0]
        elif not direct and len(nested) == 1 and depth == 0:
            chosen = next(iter(nested))
        else:
            return {*direct, *(fqn for fqns in nested.values() for fqn in fqns)}
        others = [fqn for key, fqns in nested.items() if key != chosen for fqn in fqns]
        for fqn in [*direct, *others]:
            skip(fqn, "outside the model", f"it lies outside {chosen!r}, which holds the model")
        level, depth = nested[chosen], depth + 1


def _names(fqns: Sequence[str], stripped: str, options: ConsolidateOptions) -> dict[str, str]:
    """Return the name of every tensor; raises for what cannot be one and for duplicates."""
    rename = options.rename
    if isinstance(rename, Mapping):
        absent = sorted(rename.keys() - set(fqns))
        if absent:
            raise InvalidInputError(
                f"rename names {absent[0]!r}, which is no tensor that goes out.",
                next_step="Remove the entry, or have the tensor go out with include=.",
            )
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for fqn in fqns:
        name: object = fqn.removeprefix(stripped)
        if callable(rename):
            name = rename(fqn)
        elif rename is not None:
            name = rename.get(fqn, name)
        if not isinstance(name, str) or not name or name == "__metadata__" or not _is_text(name):
            raise InvalidInputError(
                f"{fqn} would be called {name!r:.80} in its weight file.",
                next_step="Have rename= give it a name that is text and not __metadata__.",
            )
        if name in taken:
            raise InvalidInputError(
                f"{taken[name]} and {fqn} would both be called {name!r} in the weight files.",
                next_step="Give them different names with rename=, or exclude one.",
            )
        taken[name] = fqn
        names[fqn] = name
    return names


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _chosen(
    fqn: str, stored: str, name: str, source: Source, options: ConsolidateOptions
) -> Chosen:
    info = source.tensors[stored]
    lacking = _no_safetensors(info)
    if lacking:
        raise InvalidInputError(
            f"{fqn} has {lacking}, which safetensors does not hold.",
            next_step=f"Leave it out with exclude=[{fqn!r}], or save it otherwise.",
        )
    dtype = info.dtype
    if options.cast_to is not None and dtype in CASTABLE:
        dtype = options.cast_to
    return Chosen(name=name, fqn=stored, source_dtype=info.dtype, dtype=dtype, shape=info.shape)


def _tie_roots(source: Source, ties: Mapping[str, str], who: str) -> dict[str, str]:
    """Return the target of every alias, chains followed to their end."""
    tensors = source.tensors
    roots: dict[str, str] = {}
    for alias, target in sorted(ties.items()):
        root, seen = target, {alias}
        while root in ties and root not in seen:
            seen.add(root)
            root = ties[root]
        if root in seen:
            raise InvalidInputError(
                f"{who} ties {alias} to itself.",
                next_step="Give one target for all aliases of a tensor.",
            )
        if root not in tensors:
            raise InvalidInputError(
                f"{who} maps {alias!r} to {root!r}, which is no tensor of the checkpoint.",
                next_step="Name a tensor that is there; ckpt-storage show lists them.",
            )
        a, b = tensors.get(alias, tensors[root]), tensors[root]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise InvalidInputError(
                f"{who} maps {alias} ({a.dtype}, {list(a.shape)}) to {root} ({b.dtype}, "
                f"{list(b.shape)}).",
                next_step="Tied tensors have one dtype and one shape.",
            )
        roots[alias] = root
    return roots


def check_ties(source: Source, ties: Mapping[str, str]) -> None:
    """Raise `InvalidInputError` if an alias that was stored is not what its target is.

    Goes by the checksums of chunks, which tell only where both are cut alike; else the tie is taken
    on trust. Fetches the rank manifests of the tensors concerned, so one rank does it for all.
    """
    for alias, target in sorted(ties.items()):
        if alias in source.tensors and _have_same_bytes(source, alias, target) is False:
            raise InvalidInputError(
                f"{alias} is said to be tied to {target}; their checksums differ.",
                next_step='Remove it from tied=, or give tied="keep"; both then go out.',
            )


def _have_same_bytes(source: Source, left: str, right: str) -> bool | None:
    a, b = source.tensors[left], source.tensors[right]
    if list(a.boxes) != list(b.boxes):
        return None
    source.require([(fqn, box.offsets) for box in a.boxes for fqn in (left, right)])
    for box in a.boxes:
        places = [source.place(fqn, box.offsets) for fqn in (left, right)]
        crcs = [None if p.crcs is None else (p.block_bytes, tuple(p.crcs)) for p in places]
        if None in crcs:
            return None
        if crcs[0] != crcs[1]:
            return False
    return True
