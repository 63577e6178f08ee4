"""The documentation as a site: built strictly and offline, with everything public in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from integration_tools import ROOT, need

import ckpt_storage
from ckpt_storage import errors

DOCS = ROOT / "docs"
CONFIG = DOCS / "site" / "mkdocs.yml"


class _Fetched(HTMLParser):
    """Collects what a browser would fetch to show a page, and the ids on it."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note `src`, and `href` of what is loaded rather than followed."""
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if value and (name == "src" or (name == "href" and tag == "link")):
                self.urls.append(value)


def build(target: Path, config: Path = CONFIG) -> subprocess.CompletedProcess[str]:
    """Build the site into `target`, warnings being errors; no proxy leads out."""
    nowhere = "http://127.0.0.1:9"
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(target)],
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "http_proxy": nowhere,
            "https_proxy": nowhere,
        },
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    need("mkdocs")
    target = tmp_path_factory.mktemp("site")
    done = build(target)
    assert done.returncode == 0, done.stdout + done.stderr
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
        fetched = _Fetched()
        fetched.feed(page.read_text(encoding="utf-8"))
        assert [url for url in fetched.urls if re.match(r"(https?:)?//", url)] == [], page


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Each name of `__all__` has its place in the rendered reference."""
    fetched = _Fetched()
    fetched.feed((site / "reference.html").read_text(encoding="utf-8"))
    missing = [
        name
        for name in ckpt_storage.__all__
        if not any(re.fullmatch(rf"ckpt_storage\.(.+\.)?{name}", one) for one in fetched.ids)
    ]
    assert missing == []


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
