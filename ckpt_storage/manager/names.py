"""The names of the checkpoints of one run: from a step to a folder's name, and back."""

from __future__ import annotations

import contextlib
import operator
import re
from dataclasses import dataclass, field
from typing import SupportsIndex

from ckpt_storage.errors import InvalidInputError

DEFAULT_TEMPLATE = "step-{step:08d}"

_FIELD = re.compile(r"\{step(?::0([1-9][0-9]?)d)?\}")
_MOST_STEP = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class StepNames:
    """A template with one field, `{step}` or `{step:08d}`; every step has exactly one name.

    Raises `InvalidInputError` for a template by which steps cannot be told apart, or whose names
    are not those of one folder.
    """

    template: str = DEFAULT_TEMPLATE
    _before: str = field(init=False, repr=False)
    _after: str = field(init=False, repr=False)
    _digit_count: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = _FIELD.search(self.template)
        before = self.template[: found.start()] if found else ""
        after = self.template[found.end() :] if found else ""
        text = before + after
        if found is None or any(mark in text for mark in "{}/\\\0") or text[:1] == ".":
            raise InvalidInputError(
                f"The template {self.template!r} gives no names of checkpoints.",
                next_step="Give a folder's name with one field for the step, such as "
                f"{DEFAULT_TEMPLATE!r}; not beginning with a dot.",
            )
        if before[-1:].isdigit() or after[:1].isdigit():
            raise InvalidInputError(
                f"In names by {self.template!r} digits stand beside those of the step.",
                next_step=f"Put another character between them, as in {DEFAULT_TEMPLATE!r}.",
            )
        object.__setattr__(self, "_before", before)
        object.__setattr__(self, "_after", after)
        object.__setattr__(self, "_digit_count", int(found[1] or 1))

    def name_of(self, step: SupportsIndex) -> str:
        """Return the name of a step. Raises `InvalidInputError` for what is no step."""
        number = -1
        if not isinstance(step, bool):
            with contextlib.suppress(TypeError):
                number = operator.index(step)
        if not 0 <= number <= _MOST_STEP:
            raise InvalidInputError(
                f"{step!r} is no step.", next_step="Give a whole number from 0 on."
            )
        return f"{self._before}{number:0{self._digit_count}d}{self._after}"

    def step_of(self, name: str) -> int | None:
        """Return the step whose name this is, None for the name of something else."""
        digits = name[len(self._before) : len(name) - len(self._after)]
        if not (digits.isascii() and digits.isdigit()) or len(digits) > len(str(_MOST_STEP)):
            return None
        step = int(digits)
        # Not every spelling of a number is the one that we give.
        return step if step <= _MOST_STEP and self.name_of(step) == name else None
