"""The documentation as a site: built strictly and offline, with everything public in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration_tools import ROOT, finish, need

import ckpt_storage
from ckpt_storage import errors

DOCS = ROOT / "docs"
CONFIG = DOCS / "site" / "mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, warnings being errors; no proxy leads out."""
    need("mkdocs")
    target, nowhere = tmp_path_factory.mktemp("site"), "http://127.0.0.1:9"
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(CONFIG), "-d", str(target)]
    proxies = {"NO_MKDOCS_2_WARNING": "1", "http_proxy": nowhere, "https_proxy": nowhere}
    code, output = finish(command, tmp_path_factory.mktemp("log"), proxies, deadline_s=170)
    assert code == 0, output
    return target


def rows_of(page: Path) -> Iterator[list[str]]:
    """Yield the cells of each row of each table of a page."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """No page makes a reader's browser fetch anything from another host."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert (
            re.findall(r"""(?:\bsrc|<link\b[^>]*\bhref)=["']?(?:https?:)?//[^"'\s>]*""", html) == []
        )


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Each name of `__all__` has its place in the rendered reference."""
    page = (site / "reference.html").read_text(encoding="utf-8")
    shown = {one.rpartition(".")[2] for one in re.findall(r'\bid="(ckpt_storage\.[^"]+)"', page)}
    assert set(ckpt_storage.__all__) <= shown


def test_the_page_of_errors_is_complete() -> None:
    """Every error has a row with its code, its builtin, its cause and a next step."""
    rows = {cells[0].strip("`"): cells for cells in rows_of(DOCS / "errors.md") if len(cells) == 4}
    assert sorted(set(rows) - {"error"} - {name for name in rows if set(name) <= {"-"}}) == sorted(
        errors.__all__
    )
    for name in errors.__all__:
        cls = getattr(errors, name)
        _, codes, cause, step = rows[name]
        assert f"`{cls.code}`" in codes, name
        builtins = [base for base in cls.__bases__ if base is not errors.CheckpointError]
        assert [base.__name__ for base in builtins if f"`{base.__name__}`" not in codes] == []
        assert len(cause) > 10, name
        assert step, name


def test_every_kind_of_storage_error_is_told() -> None:
    """The kinds that `StorageError` documents are all on the page."""
    told = set(re.findall(r'"([a-z-]+)"', errors.StorageError.__doc__ or ""))
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert len(told) > 10
    assert [kind for kind in sorted(told) if f"`{kind}`" not in page] == []
