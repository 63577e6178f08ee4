"""How the folders of checkpoints are named after their steps."""

from __future__ import annotations

import contextlib
import operator
import re
from typing import SupportsIndex

from ckpt_storage.errors import InvalidInputError

DEFAULT_TEMPLATE = "step-{step:08d}"

_TEMPLATE = re.compile(r"([^{}/\\\0]*)\{step(?::0([1-9][0-9]?)d)?\}([^{}/\\\0]*)")
_MAX_STEP = (1 << 63) - 1


class StepNames:
    """A template with one field, `{step}` or `{step:08d}`; every step has exactly one name.

    Raises `InvalidInputError` for a template whose names are ambiguous, or no folder names.
    """

    def __init__(self, template: str = DEFAULT_TEMPLATE) -> None:
        match = _TEMPLATE.fullmatch(template)
        before, digits, after = match.groups() if match else (".", None, "")
        if before[:1] == "." or before[-1:].isdigit() or after[:1].isdigit():
            raise InvalidInputError(
                f"The template {template!r} gives no names of checkpoints.",
                next_step="Give a folder's name with one field for the step and no digit beside "
                f"it, such as {DEFAULT_TEMPLATE!r}; not beginning with a dot.",
            )
        self._before, self._after, self._digit_count = before, after, int(digits or 1)
        self._pattern = re.compile(rf"{re.escape(before)}([0-9]{{1,99}}){re.escape(after)}")

    def name_of(self, step: SupportsIndex) -> str:
        """Return the name of a step. Raises `InvalidInputError` for a value that is no step."""
        number = -1
        if not isinstance(step, bool):
            with contextlib.suppress(TypeError):
                number = operator.index(step)
        if not 0 <= number <= _MAX_STEP:
            raise InvalidInputError(
                f"{step!r} is no step.", next_step="Give a whole number from 0 on."
            )
        return f"{self._before}{number:0{self._digit_count}d}{self._after}"

    def step_of(self, name: str) -> int | None:
        """Return the step that has this name, None for other names."""
        match = self._pattern.fullmatch(name)
        step = int(match[1]) if match else -1
        # A number has other spellings, with other zeros.
        return step if 0 <= step <= _MAX_STEP and self.name_of(step) == name else None
