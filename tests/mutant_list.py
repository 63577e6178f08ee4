"""The mutants that `mutants.py` runs: one changed line each, of every room."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A text of a module that occurs once in it, what replaces it, and the tests that must fail."""

    path: str
    old: str
    new: str
    tests: list[str]

    @property
    def room(self) -> str:
        """The folder of the package that the module is in."""
        return self.path.partition("/")[0]


MUTANTS: list[Mutant] = []
