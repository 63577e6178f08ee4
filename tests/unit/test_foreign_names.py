"""Every private name of another package that the package uses stands in one table of the docs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from multiprocessing import process, spawn
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "developing.md"
ROW = re.compile(r"^\| `(?P<names>[^|]+)` \| [^|]+ \| [^|]+ \| `(?P<test>[^`|]+)`", re.MULTILINE)


DOCUMENTED = {"_exit", "_replace"}
"""Of `os` and of named tuples."""


def is_private(name: str) -> bool:
    return bool(re.match("_[A-Za-z]", name)) and name not in DOCUMENTED


def trees() -> Iterator[ast.Module]:
    for path in sorted((ROOT / "ckpt_storage").rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def foreign_names() -> set[str]:
    """Return the private names that the package uses and nowhere defines, and what it imports."""
    used, own, imported = set[str](), set[str](), set[str]()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                used.add(name)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.ImportFrom(module=module, level=0, names=names) if not str(module).startswith(
                "ckpt_storage"
            ):
                imported.update([*str(module).split("."), *(alias.name for alias in names)])
    return {name for name in used - own | imported if is_private(name)}


def test_the_table_names_all_private_names_of_others() -> None:
    """No other one is used, and none that stands there is out of use."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    listed = {name for names, _ in rows for name in re.findall(r"\b_[A-Za-z]\w*", names)}
    assert foreign_names() <= listed
    paths = (ROOT / "ckpt_storage").rglob("*.py")
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert [name for name in sorted(listed) if not re.search(rf"\b{name}\b", source)] == []


def test_each_has_a_test_that_notices_its_change() -> None:
    """The test files that the table names are there."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert rows
    for _, test in rows:
        assert (ROOT / test).is_file(), test


def test_a_process_that_is_starting_spawns_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without a main guard gets Python's own error, by the mark that a worker sets."""
    monkeypatch.setattr(process.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match="bootstrapping phase"):
        spawn.get_preparation_data("worker")
