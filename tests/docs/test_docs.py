"""README and docs: every link leads to a file, every code block runs, every command is real.

Convention for Python in Markdown. A block opened by ```python runs: the blocks of one file
share a namespace, in order, in an empty folder, with warnings as errors. A block opened by
```python no-run: <reason> is compiled only; Markdown renders both alike.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm import run_script

ROOT = Path(__file__).parents[2]
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

_FENCE = re.compile(r"^ *``` *(?P<info>.*?) *\n(?P<text>.*?)^ *``` *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?:\]\(\s*<?|(?:href|src)=[\"'])(?P<target>[^()\s>#\"']+)")
_SCHEME = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*:|//)")
_EXTRAS = re.compile(r"^\.\[(?P<names>[a-z0-9_,-]+)\]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: what stands after the fence, its text, and the number of its first line."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        """The first word of the info string, in lower case; "" if there is none."""
        return self.info.partition(" ")[0].lower()

    @property
    def runs(self) -> bool:
        """Whether this is Python to be executed."""
        return self.info == "python"


def split_page(text: str) -> tuple[str, list[Block]]:
    """Return what stands outside fences, and the fenced blocks, of Markdown `text`."""
    blocks = [
        Block(
            info=found["info"],
            text=textwrap.dedent(found["text"]),
            line=text.count("\n", 0, found.start("text")) + 1,
        )
        for found in _FENCE.finditer(text)
    ]
    prose = _FENCE.sub("", text)
    assert not re.search(r"^ *(```|~~~)", prose, re.MULTILINE), "only closed fences of three"
    return prose, blocks


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return split_page(page.read_text(encoding="utf-8"))[1]


def broken_links(page: Path) -> list[str]:
    """Return the relative links outside code that lead to no file; mkdocs checks headings."""
    prose = re.sub(r"(`+).*?\1", "x", split_page(page.read_text(encoding="utf-8"))[0])
    targets = [match["target"] for match in _LINK.finditer(prose)]
    files = {one: (page.parent / one).resolve() for one in targets if not _SCHEME.match(one)}
    return [one for one, file in files.items() if not (file.exists() and ROOT in file.parents)]


def wrong_fences(page: Path) -> list[str]:
    """Return one line for each Python block that neither runs nor says why it does not."""
    return [
        f"{page.name}:{block.line}: {block.info!r}; write 'python' or 'python no-run: <reason>'"
        for block in blocks_of(page)
        if block.language in {"py", "python", "python3"}
        and not block.runs
        and not re.fullmatch(r"python no-run: \S.*", block.info)
    ]


def program_of(page: Path) -> str:
    """Return the Python that runs on `page`, each line at the number that it has there."""
    lines: list[str] = []
    for block in blocks_of(page):
        if block.runs:
            lines.extend([""] * (block.line - 1 - len(lines)))
            lines.extend(block.text.splitlines())
    return "".join(f"{line}\n" for line in lines)


def unknown_names(block: Block, root: Path) -> list[str]:
    """Return the words of a shell block that name a file or an extra that is not there."""
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = block.text
    if block.language == "console":
        typed = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
        text = "\n".join(typed)
    found = []
    for word in shlex.split(text, comments=True):
        path = word.removeprefix("./").partition("::")[0]
        if path.split("/", maxsplit=1)[0] in OUR_NAMES and not (root / path).exists():
            found.append(word)
        extras = _EXTRAS.match(word)
        if extras:
            known = declared["optional-dependencies"]
            found.extend(name for name in extras["names"].split(",") if name not in known)
    return found


STRICT = """
import runpy, sys, warnings
warnings.simplefilter("error")
alone = "torch.distributed is disabled, unavailable or uninitialized"
warnings.filterwarnings("ignore", alone, UserWarning)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def name_of(page: Path) -> str:
    """Return the test id of a page."""
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_names_what_is_there(page: Path) -> None:
    """Links lead to files; commands name files and extras; Python compiles.

    A Python block is either executed or says why it is not.
    """
    assert broken_links(page) == []
    assert wrong_fences(page) == []
    for block in blocks_of(page):
        if block.language == "python" and not block.runs:
            compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    shell = [block for block in blocks_of(page) if block.language in {"bash", "console", "sh"}]
    assert [name for block in shell for name in unknown_names(block, ROOT)] == []


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
    commands = [block.text for block in blocks_of(ROOT / "README.md") if block.language == "bash"]
    (install,) = re.findall(r"/pip (install .*?) && .venv/bin/pytest\b", "".join(commands))
    assert f'pip" {install}\n' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
