"""README and docs: links lead to files, code blocks run, commands are real, the site builds.

Convention for Python in Markdown. A block opened by ```python runs: the blocks of one file
share a namespace, in order, in an empty folder, with warnings as errors. A block opened by
```python no-run: <reason> is compiled only; Markdown renders both alike.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from fork_server import run_script
from integration_tools import ROOT, finish, need

import ckpt_storage
from ckpt_storage import errors

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ],
    key=lambda page: page.as_posix(),
)
OUR_NAMES = (".ci", "ckpt_storage", "docs", "examples", "tests", "pyproject.toml")
"""What a path in a shell block begins with if it is to be a file of this repository."""

_FENCE = re.compile(r"^ *``` *(?P<info>.*?) *\n(?P<code>.*?)^ *``` *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?:\]\(\s*<?|(?:href|src)=[\"'])(?P<target>[^()\s>#\"']+)")
_SCHEME = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*:|//)")
_EXTRAS = re.compile(r"^\.\[(?P<names>[a-z0-9_,-]+)\]$")
_NO_RUN = re.compile(r"python no-run: \S.*")

Block = tuple[str, str, int]
"""One fenced block: what stands after the fence, its text, and the number of its first line."""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        (
            fence["info"],
            textwrap.dedent(fence["code"]),
            text.count("\n", 0, fence.start("code")) + 1,
        )
        for fence in _FENCE.finditer(text)
    ]


def prose_of(page: Path) -> str:
    return re.sub(r"(`+).*?\1", "x", _FENCE.sub("", page.read_text(encoding="utf-8")))


def broken_links(page: Path) -> list[str]:
    """Return the relative links outside code that lead to no file; mkdocs checks headings."""
    targets = [match["target"] for match in _LINK.finditer(prose_of(page))]
    files = {link: (page.parent / link).resolve() for link in targets if not _SCHEME.match(link)}
    return [link for link, file in files.items() if not (file.exists() and ROOT in file.parents)]


def program_of(page: Path) -> str:
    """Return the Python that runs on `page`, each line at the number that it has there."""
    lines: list[str] = []
    for info, code, line in blocks_of(page):
        if info == "python":
            lines.extend([""] * (line - 1 - len(lines)))
            lines.extend(code.splitlines())
    return "".join(f"{line}\n" for line in lines)


def unknown_names(code: str) -> list[str]:
    """Return the words of a shell block that name a file or an extra that is not there."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if code.startswith("$ "):
        code = "\n".join(line[2:] for line in code.splitlines() if line.startswith("$ "))
    unknown = []
    for token in shlex.split(code, comments=True):
        path = token.removeprefix("./").partition("::")[0]
        if path.split("/", maxsplit=1)[0] in OUR_NAMES and not (ROOT / path).exists():
            unknown.append(token)
        extras = _EXTRAS.match(token)
        if extras:
            known = declared["optional-dependencies"]
            unknown.extend(name for name in extras["names"].split(",") if name not in known)
    return unknown


STRICT = """
import runpy, sys, warnings
warnings.simplefilter("error")
alone = "torch.distributed is disabled, unavailable or uninitialized"
warnings.filterwarnings("ignore", alone, UserWarning)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_names_what_is_there(page: Path) -> None:
    """Links lead to files, commands name files and extras; Python runs, or says why not."""
    assert broken_links(page) == []
    assert not re.search(r"^ *(```|~~~)", prose_of(page), re.MULTILINE), "only closed fences"
    for info, code, line in blocks_of(page):
        language = info.partition(" ")[0].lower()
        if language in {"bash", "console", "sh"}:
            assert unknown_names(code) == []
        elif language.startswith("py") and info != "python":
            assert _NO_RUN.fullmatch(info), f"write 'python' or 'python no-run: <reason>': {line}"
            compile("\n" * (line - 1) + code, str(page), "exec")


@pytest.mark.parametrize("page", [page for page in PAGES if program_of(page)], ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The Python of a page runs from top to bottom in an empty folder without a warning."""
    (tmp_path / "code").mkdir()
    (tmp_path / "work").mkdir()
    script, strict = tmp_path / "code" / f"{page.stem}.py", tmp_path / "code" / "strict.py"
    script.write_text(program_of(page), encoding="utf-8")
    strict.write_text(STRICT, encoding="utf-8")
    code, output = run_script(strict, str(script), folder=tmp_path / "work", environment=os.environ)
    assert code == 0, output


def test_ci_installs_and_tests_what_the_readme_says() -> None:
    """`.ci/run` gives pip the arguments of the README's test command."""
    commands = [code for info, code, _ in blocks_of(ROOT / "README.md") if info == "bash"]
    (install,) = re.findall(r"/pip (install .*?) && .venv/bin/pytest\b", "".join(commands))
    assert f'pip" {install}\n' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_table_of_rooms_names_modules() -> None:
    """Each row of the table in *Architecture* names modules that are there."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)` \|.*\| (.*\.py`) \|$", table, re.MULTILINE)
    modules = [f"{room}/{name}" for room, cell in rows for name in re.findall(r"`(.*?)`", cell)]
    assert len(modules) > 12
    assert [name for name in modules if not (ROOT / "ckpt_storage" / name).is_file()] == []


def test_pages_for_developers_name_what_is_in_the_code() -> None:
    """Files and identifiers that *Architecture* and *One save between ranks* name are there."""
    folders = ("ckpt_storage", "tests")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths = "".join(f"/{path.relative_to(ROOT).as_posix()}\n" for path in sources)
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text("utf-8"))}
    missing = [
        name
        for page in ("architecture.md", "save-protocol.md")
        for name in re.findall(r"`([A-Za-z_][\w./]*)`", (ROOT / "docs" / page).read_text("utf-8"))
        if (
            f"/{name}\n" not in paths
            if name.endswith(".py")
            else "/" not in name and name.rpartition(".")[2] not in words
        )
    ]
    assert missing == []


def test_the_commands_of_the_benchmarks_start(tmp_path: Path) -> None:
    """Outside of pytest no path leads to the modules that tests share."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    scripts = sorted(set(re.findall(r"\bpython (tests/benchmarks[\w./]*)", text)))
    assert len(scripts) > 3
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, "PYTHONPATH": str(ROOT)}
    for script in scripts:
        command = [sys.executable, str(ROOT / script), "--help"]
        ended = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, (script, ended.stderr)


DOCS = ROOT / "docs"
CONFIG = DOCS / "site" / "mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mkdocs")
    target, nowhere = tmp_path_factory.mktemp("site"), "http://127.0.0.1:9"
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(CONFIG), "-d", str(target)]
    proxies = {"NO_MKDOCS_2_WARNING": "1", "http_proxy": nowhere, "https_proxy": nowhere}
    code, output = finish(command, tmp_path_factory.mktemp("log"), proxies)
    assert code == 0, output
    return target


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
    shown = {name.rpartition(".")[2] for name in re.findall(r'\bid="(ckpt_storage\.[^"]+)"', page)}
    assert set(ckpt_storage.__all__) <= shown


def test_the_page_of_errors_is_complete() -> None:
    """Every error has a row with its code, its builtin, its cause and a next step."""
    lines = (DOCS / "errors.md").read_text(encoding="utf-8").splitlines()
    cut = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    rows = {cells[0].strip("`"): cells for cells in cut if cells[0].startswith("`")}
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    classes = {cls.__name__: cls for cls in kinds if issubclass(cls, errors.CheckpointError)}
    assert {name for name, cells in rows.items() if len(cells) == 4} == set(classes)
    for name, cls in classes.items():
        _, codes, cause, step = rows[name]
        assert f"`{cls.code}`" in codes, name
        builtins = [base for base in cls.__bases__ if base is not errors.CheckpointError]
        assert [base.__name__ for base in builtins if f"`{base.__name__}`" not in codes] == []
        assert len(cause) > 10, name
        assert step, name


def test_every_kind_of_storage_error_is_on_the_page() -> None:
    """The kinds that `StorageError` documents are all on the page."""
    documented = set(re.findall(r'"([a-z-]+)"', errors.StorageError.__doc__ or ""))
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert len(documented) > 10
    assert [kind for kind in sorted(documented) if f"`{kind}`" not in page] == []
