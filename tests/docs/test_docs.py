"""README and docs: every link leads somewhere, every code block runs, every command is real.

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
from collections.abc import Iterator
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

_FENCE = re.compile(r"^ {0,12}(?P<mark>```+|~~~+)\s*(?P<info>.*?)\s*$")
_HEADING = re.compile(r"^#{1,6}\s+(?P<text>.*?)(?:\s+#+)?\s*$")
_INLINE_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?(?P<target>[^()\s>]+)>?[^()]*\)")
_LINK_DEFINITION = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(?P<target>[^\s>]+)>?")
_HTML_TARGET = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"'](?P<target>[^\"']+)[\"']")
_HTML_ANCHOR = re.compile(r"<a\b[^>]*?\b(?:id|name)=[\"'](?P<name>[^\"']+)[\"']")
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


def split_page(text: str) -> tuple[list[tuple[int, str]], list[Block]]:
    """Return the numbered lines outside fences, and the fenced blocks, of Markdown `text`."""
    prose: list[tuple[int, str]] = []
    blocks: list[Block] = []
    inside: list[str] = []
    mark = info = ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if not mark:
            if fence:
                mark, info, inside = fence["mark"], fence["info"], []
            else:
                prose.append((number, line))
        elif fence and fence["mark"].startswith(mark) and not fence["info"]:
            code = textwrap.dedent("".join(f"{item}\n" for item in inside))
            blocks.append(Block(info=info, text=code, line=number - len(inside)))
            mark = ""
        else:
            inside.append(line)
    if mark:
        message = f"a fence that opens with {mark}{info} is never closed"
        raise ValueError(message)
    return prose, blocks


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return split_page(page.read_text(encoding="utf-8"))[1]


def anchors_of(text: str) -> set[str]:
    """Return the fragments that a link may name, made from headings as GitHub makes them."""
    found: set[str] = set()
    for _, line in split_page(text)[0]:
        found.update(match["name"] for match in _HTML_ANCHOR.finditer(line))
        heading = _HEADING.match(line)
        if heading:
            shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"])
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            repeats = [f"{slug}-{count}" for count in range(1, 100)]
            found.add(next(name for name in [slug, *repeats] if name not in found))
    return found


def links_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and target of every link outside code: inline, defined or in HTML."""
    for number, line in split_page(text)[0]:
        shown = re.sub(r"(`+).*?\1", lambda code: "x" * len(code[0]), line)
        for pattern in (_INLINE_LINK, _LINK_DEFINITION, _HTML_TARGET):
            for match in pattern.finditer(shown):
                yield number, match["target"]


def broken_links(page: Path, root: Path) -> list[str]:
    """Return one line for each relative link of `page` that leads nowhere or out of `root`."""
    found = []
    for number, target in links_of(page.read_text(encoding="utf-8")):
        if _SCHEME.match(target):
            continue
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page.resolve()
        where = f"{page.relative_to(root)}:{number}"
        if not file.is_relative_to(root.resolve()):
            found.append(f"{where}: {target} leads out of the repository")
        elif not file.exists():
            found.append(f"{where}: {target} does not exist")
        elif fragment and fragment not in anchors_of(file.read_text(encoding="utf-8")):
            found.append(f"{where}: {target} names no heading")
    return found


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


def run_program(page: Path, folder: Path) -> tuple[int, str]:
    """Run the Python of `page` in `folder`, in a process of its own; return code and output."""
    code = folder / "code"
    work = folder / "work"
    code.mkdir()
    work.mkdir()
    script = code / f"{page.stem}.py"
    script.write_text(program_of(page), encoding="utf-8")
    strict = code / "strict.py"
    strict.write_text(STRICT, encoding="utf-8")
    return run_script(strict, str(script), folder=work, environment=os.environ)


def name_of(page: Path) -> str:
    """Return the test id of a page."""
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_resolves(page: Path) -> None:
    """Each relative link of a page leads to a file of the repository, and to its heading."""
    assert broken_links(page, ROOT) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_runs_or_says_why_not(page: Path) -> None:
    """A Python block is either executed or carries its reason, and compiles all the same."""
    assert wrong_fences(page) == []
    for block in blocks_of(page):
        if block.language == "python" and not block.runs:
            compile("\n" * (block.line - 1) + block.text, str(page), "exec")


@pytest.mark.parametrize("page", [page for page in PAGES if program_of(page)], ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The Python of a page runs from top to bottom in an empty folder without a warning."""
    code, output = run_program(page, tmp_path)
    assert code == 0, output


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_blocks_name_files_that_exist(page: Path) -> None:
    """Files and extras that a command on a page names are there."""
    shell = [block for block in blocks_of(page) if block.language in {"bash", "console", "sh"}]
    assert [name for block in shell for name in unknown_names(block, ROOT)] == []


def test_ci_installs_and_tests_what_the_readme_says() -> None:
    """`.ci/run` gives pip the arguments of the README's test command."""
    commands = [block.text for block in blocks_of(ROOT / "README.md") if block.language == "bash"]
    (install,) = re.findall(r"/pip (install .*?) && .venv/bin/pytest\b", "".join(commands))
    assert f'pip" {install}\n' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
