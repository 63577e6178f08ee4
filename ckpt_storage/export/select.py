"""Which values of a checkpoint are exported, under which names, and why others are skipped.

The default selection of `consolidate` follows how training scripts nest the state that they save.
Where the nesting is not known, only the first part of an FQN may name state to skip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.format.names import FILES_PREFIX, parse_per_rank_key
from ckpt_storage.inspect.views import natural
from ckpt_storage.source.model import Source
from ckpt_storage.source.renaming import new_names

from .options import CASTABLE, ConsolidateOptions, Selection, matching
from .plan import Elements, elements_of

Reason = Literal[
    "blob",
    "optimizer",
    "training state",
    "per rank",
    "outside the model",
    "excluded",
    "tied",
    "file",
]
"""Why a value is in no weight file: it is an object, other state than the model's, a rank's own
(`PerRank`), not selected, an alias of a tied tensor, or a file beside the weights."""

KeyPath = tuple[str | int, ...]

WRAPPERS = ("module.", "_orig_mod.")
"""What `DistributedDataParallel` and `torch.compile` put before the names of a module."""

_COMPILED = "_orig_mod."
"""If only a submodule is compiled, this stands within names."""

_RNG = re.compile(r"(cuda_)?rng(_states?)?", re.IGNORECASE)

_MODEL = re.compile(
    r"model(_(state|state_dict|weights))?|module|params|state_dict|weights", re.IGNORECASE
)
"""Keys under which training scripts, Lightning and DeepSpeed keep the model; in any letter case."""

_FOREIGN_STATE: Mapping[Reason, re.Pattern[str]] = {
    "optimizer": re.compile(r"opt(_state)?|optim(izer)?(s|_states?|_state_dict)?", re.IGNORECASE),
    "training state": re.compile(
        r"(cuda_)?rng_state|rng(_states)?|dataloader|(grad_)?scaler|(lr_)?schedulers?"
        r"|train(ing)?_state",
        re.IGNORECASE,
    ),
}
"""Keys of state that is not the model's."""

_SHOWN_COUNT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedValue:
    """A value of the checkpoint that is in no weight file.

    For "tied" `target` is the FQN that is exported instead. `size_bytes` is None for a blob.
    """

    fqn: str
    reason: Reason
    size_bytes: int | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The values that a conversion or a copy writes, and the FQNs of those that it omits.

    `ties` maps alias to target. `dropped` maps FQNs that the format cannot hold to the reason.
    """

    tensors: Mapping[str, TensorRecord]
    blobs: Sequence[str]
    ties: Mapping[str, str]
    dropped: Mapping[str, str]
    excluded: frozenset[str]


def select(
    source: Source, include: Selection | None, exclude: Selection | None, *, to: str, drops: bool
) -> Selected:
    """Return which values are written in a format; with `drops` those that it cannot hold are not.

    Else these raise `InvalidInputError`.
    """
    values = {*source.tensors, *source.blobs}
    chosen = values if include is None else matching(include, values, "include")
    if exclude is not None:
        chosen = chosen - matching(exclude, values, "exclude")
    unsupported: dict[str, str] = {}
    if to in {"safetensors", "dcp_safetensors"}:
        unsupported = dict.fromkeys(source.blobs & chosen, "an object, no tensor")
        for fqn in chosen & source.tensors.keys():
            reserved = "a name that its header needs for itself" if fqn == "__metadata__" else None
            if why := reserved or _no_safetensors(source.tensors[fqn]):
                unsupported[fqn] = why
    if unsupported and not drops:
        shown = [f"{fqn} ({why})" for fqn, why in sorted(unsupported.items())]
        more = len(shown) - _SHOWN_COUNT
        raise InvalidInputError(
            f"{to} cannot hold {', '.join(shown[:_SHOWN_COUNT])}"
            f"{f' and {more} more' if more > 0 else ''}.",
            next_step='Pass unsupported="drop" to leave them out, or name what you want with '
            "include= and exclude=.",
        )
    names = chosen - unsupported.keys()
    if not names:
        raise InvalidInputError(
            "Nothing is left to convert.", next_step="Leave less out with exclude=."
        )
    ties: Mapping[str, str] = getattr(source, "ties", {})
    return Selected(
        tensors={fqn: info for fqn, info in source.tensors.items() if fqn in names},
        blobs=sorted(source.blobs & names),
        ties={a: t for a, t in ties.items() if a in names and t in names},
        dropped=unsupported,
        excluded=frozenset(values - chosen),
    )


def _no_safetensors(info: TensorRecord) -> str | None:
    """Return why safetensors cannot hold a tensor, None if it can."""
    kind = DTYPES.get(info.dtype)
    if kind is None or kind.safetensors is None:
        return f"dtype {info.dtype}"
    if info.dtype == "float4_e2m1fn_x2" and not info.shape:
        return "a single pair of 4-bit numbers"
    return None


def choose_model(
    source: Source, options: ConsolidateOptions
) -> tuple[list[Elements], tuple[SkippedValue, ...]]:
    """Return the tensors to export, sorted by name ("layers.2", "layers.10"), and other values.

    Without `include`: level by level from the top of the nested state dict, containers of optimizer
    and training state are skipped by their key; if exactly one has the key of a model, only its
    tensors are exported; a lone container of any name at the top is entered. Blobs are skipped.

    Names without `rename`: if all exported tensors lie in one container, its key is removed, and
    so are further keys known to hold models: {"model": hf.state_dict()} gives "model.layers.0..."
    for "model.model.layers.0..."; the names of hf.state_dict() itself do not change. `WRAPPERS`
    before all names are removed, and those of compiled submodules anywhere. The alias of a tie is
    exported itself if its target is not.
    """
    tensors, values = source.tensors, source.tensors.keys() | source.blobs
    files = {fqn for fqn, tensor in tensors.items() if is_file_entry(fqn, tensor)}
    paths = {fqn: _path_of(fqn, source.planner_data) for fqn in tensors.keys() - files}
    reasons: dict[str, Reason] = dict.fromkeys(source.blobs, "blob")
    if options.include is None:
        per_rank = {
            fqn for fqn, path in paths.items() if any(map(parse_per_rank_key, map(str, path)))
        }
        reasons |= dict.fromkeys(per_rank, "per rank")
        reasons |= _outside({fqn: path for fqn, path in paths.items() if fqn not in per_rank})
    else:
        others = paths.keys() - matching(options.include, values, "include")
        reasons |= dict.fromkeys(others, "excluded")
    if options.exclude is not None:
        for fqn in matching(options.exclude, values, "exclude"):
            reasons.setdefault(fqn, "excluded")
    for fqn in files:
        reasons.setdefault(fqn, "file")
    exported = sorted(tensors.keys() - reasons.keys())
    if not exported:
        what = f"No tensor is left to export; {len(reasons)} values are left out."
        step = "Name what you want with include=, as FQNs or patterns."
        raise InvalidInputError(what, next_step=step)
    stripped = ""
    if not callable(options.rename):
        container = _container_of([paths[fqn] for fqn in exported])
        stripped = _with_wrappers(container, exported)
    names = new_names(
        exported,
        options.rename,
        default=lambda fqn: fqn.removeprefix(stripped).replace(_COMPILED, ""),
        what="tensor that goes out",
        refused=("__metadata__",),
    )
    tied: dict[str, str] = {}
    if options.tied != "keep":
        wanted = options.tied if isinstance(options.tied, Mapping) else {}
        roots = _all_ties(tensors, getattr(source, "ties", {}), wanted, stripped)
        tied = {alias: target for alias, target in roots.items() if {alias, target} <= names.keys()}
        reasons |= dict.fromkeys(tied, "tied")
    skipped = tuple(
        SkippedValue(
            fqn=fqn,
            reason=reason,
            size_bytes=elements_of(fqn, tensors[fqn]).size_bytes if fqn in tensors else None,
            target=tied.get(fqn),
        )
        for fqn, reason in sorted(reasons.items())
    )
    elements: list[Elements] = []
    casts = _casts(names, options)
    for fqn in (fqn for fqn in exported if fqn not in tied):
        if unsupported := _no_safetensors(tensors[fqn]):
            what = f"{fqn} has {unsupported}, which safetensors does not hold."
            step = f"Leave it out with exclude=[{fqn!r}], or save it otherwise."
            raise InvalidInputError(what, next_step=step)
        dtype = casts.get(fqn, "") if tensors[fqn].dtype in CASTABLE else ""
        elements.append(elements_of(fqn, tensors[fqn], name=names[fqn], dtype=dtype))
    return sorted(elements, key=lambda part: (natural(part.name), part.name)), skipped


def dropped_prefixes(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the prefixes that were removed from FQNs to make the names in weight files."""
    prefixes: set[str] = set()
    for fqn, name in pairs:
        plain = fqn.replace(_COMPILED, "")
        if name != fqn and plain.endswith(name):
            prefixes |= {plain.removesuffix(name), _COMPILED if plain != fqn else ""}
    return tuple(sorted(prefixes - {""}))


def is_file_entry(fqn: str, tensor: TensorRecord) -> bool:
    """Return whether a tensor holds the bytes of a file beside the weights."""
    is_bytes = tensor.dtype == "uint8" and len(tensor.shape) == 1
    return is_bytes and len(fqn) > len(FILES_PREFIX) and fqn.startswith(FILES_PREFIX)


def _casts(names: Mapping[str, str], options: ConsolidateOptions) -> dict[str, str]:
    """Return the dtype to cast to of each FQN: that of the first pattern that matches it."""
    casts: dict[str, str] = {}
    for pattern, dtype in options.casts.items():
        matches = {fqn for fqn, name in names.items() if pattern in (fqn, name)}
        if not matches:
            is_match = partial(fnmatchcase, pat=pattern)
            matches = {fqn for fqn, name in names.items() if is_match(fqn) or is_match(name)}
        if not matches:
            what = f"dtype names {pattern!r}, which matches no tensor that goes out."
            step = "Give FQNs, names in the weight files, or glob patterns."
            raise InvalidInputError(what, next_step=step)
        casts = dict.fromkeys(matches, dtype) | casts
    return casts


def _with_wrappers(stripped: str, fqns: Sequence[str]) -> str:
    """Return the prefix to remove, extended by those of wrappers that all names begin with."""
    while True:
        for wrapper in WRAPPERS:
            if all(fqn.startswith(f"{stripped}{wrapper}") for fqn in fqns):
                stripped += wrapper
                break
        else:
            return stripped


def _container_of(paths: Sequence[KeyPath]) -> str:
    """Return the keys, with their dots, of the container that holds all `paths`; "" if none does.

    The outermost may have any name, further ones must be known to hold models.
    """
    keys, depth = "", 0
    while True:
        heads = {str(path[depth]) if len(path) > depth + 1 else None for path in paths}
        key = heads.pop() if len(heads) == 1 else None
        if key is None or (depth and not _MODEL.fullmatch(key)):
            return keys
        keys, depth = f"{keys}{key}.", depth + 1


def _path_of(fqn: str, known: Mapping[str, KeyPath] | None) -> KeyPath:
    """Return the path of a tensor in the nested state dict, as far as it is known.

    The dotted names of a flat state begin with the name of its optimizer, too.
    """
    path = tuple(known.get(fqn, ())) if known is not None else ()
    if len(path) > 1:
        return path
    head, dot, rest = fqn.partition(".")
    return (head, rest) if dot and _foreign_state(head) else (fqn,)


def _foreign_state(key: str) -> Reason | None:
    """Return which state a container of that key holds, None if it may hold the model."""
    return next((reason for reason, keys in _FOREIGN_STATE.items() if keys.fullmatch(key)), None)


def _outside(paths: Mapping[str, KeyPath]) -> dict[str, Reason]:
    """Return the tensors outside the model, with the reason to skip each."""
    reasons: dict[str, Reason] = {}
    level, depth = sorted(paths), 0
    while True:
        # Only containers are skipped by key: a module may have a parameter named "scaler".
        direct = [fqn for fqn in level if len(paths[fqn]) == depth + 1]
        if depth == 0 and (states := list(filter(_RNG.fullmatch, direct))):
            reasons |= dict.fromkeys(states, "training state")
            direct = [fqn for fqn in direct if fqn not in reasons]
        nested: dict[str, list[str]] = {}
        for fqn in level:
            key = str(paths[fqn][depth])
            if len(paths[fqn]) > depth + 1:
                nested.setdefault(key, []).append(fqn)
        for key in list(nested):
            if reason := _foreign_state(key):
                reasons |= dict.fromkeys(nested.pop(key), reason)
        models = [key for key in nested if _MODEL.fullmatch(key)]
        if not models and not direct and depth == 0:
            models = list(nested)
        if len(models) != 1:
            return reasons
        inside = nested.pop(models[0])
        reasons |= dict.fromkeys(sum(nested.values(), direct), "outside the model")
        level, depth = inside, depth + 1


def _all_ties(
    tensors: Mapping[str, TensorRecord],
    recorded: Mapping[str, str],
    wanted: Mapping[str, str],
    stripped: str,
) -> dict[str, str]:
    """Return alias to target of recorded ties and those of the caller; no chains."""

    def find(name: str) -> str:
        return name if name in tensors else f"{stripped}{name}"

    ties = dict(recorded)
    ends = {find(alias): find(target) for alias, target in wanted.items()}
    for alias, target in sorted(ends.items()):
        root = recorded.get(target, target)
        if root not in tensors or root in ends:
            what = "is tied itself" if root in ends else "is no tensor of the checkpoint"
            raise InvalidInputError(
                f"tied= maps {alias!r} to {target!r}, which {what}.",
                next_step="Give the one tensor that stands for all aliases.",
            )
        a, b = tensors.get(alias, tensors[root]), tensors[root]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise InvalidInputError(
                f"tied= maps {alias} ({a.dtype}, {list(a.shape)}) to {root} ({b.dtype}, "
                f"{list(b.shape)}).",
                next_step="Tied tensors have one dtype and one shape.",
            )
        ties[alias] = root
    return {alias: ties.get(root, root) for alias, root in ties.items()}


def check_ties(source: Source, ties: Mapping[str, str]) -> None:
    """Raise `InvalidInputError` if an alias is not what its target is.

    Compares checksums of chunks if both tensors are cut alike; else the tie is not checked. Reads
    rank manifests, so only one rank does it.
    """
    for alias, target in sorted(ties.items()):
        boxes = list(source.tensors[alias].boxes)
        if boxes != list(source.tensors[target].boxes):
            continue
        places = source.places([(fqn, box.offsets) for fqn in (alias, target) for box in boxes])
        crcs = [
            None if place.crcs is None else (place.block_bytes, *place.crcs) for place in places
        ]
        if None not in crcs and crcs[: len(boxes)] != crcs[len(boxes) :]:
            what = f"{alias} is said to be tied to {target}; their checksums differ."
            step = 'Remove it from tied=, or give tied="keep"; both then go out.'
            raise InvalidInputError(what, next_step=step)
