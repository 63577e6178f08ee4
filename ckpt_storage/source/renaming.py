"""Renaming of the values of a checkpoint, alike in loads and exports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ckpt_storage.errors import InvalidInputError

Rename = Mapping[str, str] | Callable[[str], str]
"""A mapping from the name in the checkpoint to the new one, or a function of every name."""

RENAME_WANTED = "a mapping or a function from FQN to name"


def is_rename(value: object) -> bool:
    """Return whether a value may be `rename=`."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and isinstance(name, str) for key, name in value.items())
    return value is None or callable(value)


def check_rename(value: object) -> None:
    """Raise `InvalidInputError` for what may not be `rename=`."""
    if not is_rename(value):
        raise InvalidInputError(f"rename is {value!r:.80}.", next_step=f"Give {RENAME_WANTED}.")


def new_names(
    fqns: Collection[str],
    rename: Rename | None,
    *,
    default: Callable[[str], str] = str,
    what: str = "value of the checkpoint",
    refused: Collection[str] = (),
) -> dict[str, str]:
    """Return the new name of each of `fqns`, in their order; `what` describes a value in errors.

    `default` makes the names that a mapping does not list. Raises `InvalidInputError` for an entry
    of the mapping that is not in `fqns`, for two equal new names, and for invalid ones: those in
    `refused`, an empty text or another type.
    """
    listed: Mapping[str, str] = {} if rename is None or callable(rename) else rename
    absent = sorted(listed.keys() - set(fqns))
    if absent:
        raise InvalidInputError(
            f"rename names {absent[0]!r}, which is no {what}.",
            next_step="Remove the entry, or give a name as the checkpoint has it.",
        )
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for fqn in fqns:
        name: object = rename(fqn) if callable(rename) else listed.get(fqn, default(fqn))
        if not isinstance(name, str) or not _is_text(name) or name in refused:
            raise InvalidInputError(
                f"{fqn} would be called {name!r:.80}.",
                next_step="Have rename= give it a name that is text"
                f"{''.join(f' and not {each}' for each in refused)}.",
            )
        if taken.setdefault(name, fqn) != fqn:
            raise InvalidInputError(
                f"{taken[name]} and {fqn} would both be called {name!r}.",
                next_step="Give them different names with rename=.",
            )
        names[fqn] = name
    return names


def _is_text(name: str) -> bool:
    return bool(name) and not any("\ud800" <= char <= "\udfff" for char in name)
