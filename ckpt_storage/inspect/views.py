"""Names, shapes and shardings of a checkpoint: as values, as text and as HTML."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ckpt_storage.format.boxes import Box, Grid, find_grid
from ckpt_storage.format.dtypes import DTYPES

TIMES = " \N{MULTIPLICATION SIGN} "
DASH = "\N{EN DASH}"

NUMBER = re.compile(r"([0-9]{1,18})")
"""Of few digits: Python converts only some thousands."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_ROUND_FROM = 100
_MAX_RUNS = 3
_MIN_ALIKE = 3
_MAX_LEVELS = 40
"""A limit against names that are nested deeper than the stack."""
_MAX_ROWS = 400
_MAX_CHUNKS = 256
_MORE = "… (more names than are shown; narrow it with depth=)"
_GOLDEN_ANGLE = 137.508
"""The step of hues, with which neighbouring ranks have distinct colours."""

_STYLE = """
.ckpt{font:13px/1.45 system-ui,sans-serif;max-width:64rem;text-align:left}
.ckpt b{font-size:15px}
.ckpt i{font-style:normal;opacity:.72}
.ckpt .f{display:flex;flex-wrap:wrap;gap:2px 24px;margin:6px 0 10px}
.ckpt .r{display:grid;column-gap:12px;align-items:center;padding:3px 8px;
grid-template-columns:minmax(7rem,1fr) minmax(4rem,7.5rem) minmax(4rem,8.5rem)
 minmax(4rem,6.5rem) 3.2rem;
border-top:1px solid rgba(128,128,128,.22)}
.ckpt svg{width:30px;height:30px;stroke:currentColor;stroke-width:.75}
.ckpt rect{vector-effect:non-scaling-stroke}
.ckpt .r>*{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.ckpt .g{font-weight:600}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value: a tensor, or an object of unknown size, which has no dtype."""

    fqn: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()

    @property
    def item_bytes(self) -> int:
        """The size of one element; 0 for an object."""
        return 0 if self.dtype is None else DTYPES[self.dtype].item_bytes

    @property
    def size_bytes(self) -> int:
        """The size of all elements; 0 for an object."""
        return math.prod(self.shape) * self.item_bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]" if self.dtype else "object"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk: offsets and sizes in elements, and the rank that wrote it, None if unknown."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The chunks of a tensor of `shape`, and the ranks that wrote them; iterates over `Chunk`s.

    The boxes of a grid are made on access. `owners` is None if they are unknown.
    """

    shape: tuple[int, ...]
    boxes: Sequence[Box]
    owners: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def __iter__(self) -> Iterator[Chunk]:
        for at in range(len(self.boxes)):
            box, rank = self.boxes[at], None if self.owners is None else self.owners[at]
            yield Chunk(offsets=box.offsets, sizes=box.sizes, rank=rank)

    @property
    def counts(self) -> tuple[int, ...] | None:
        """The number of chunks along each dimension; None if the chunks form no grid."""
        boxes = self.boxes
        grid = boxes if isinstance(boxes, Grid) else find_grid(self.shape, boxes)
        return None if grid is None else tuple(map(len, grid.cuts))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote a chunk, ascending; empty if they are unknown."""
        return tuple(sorted(set(self.owners or ())))

    def __str__(self) -> str:
        counts, ranks = self.counts, runs_text(self.ranks)
        if len(self) == 1:
            return f"whole, rank {ranks}" if ranks else "whole"
        cut = f"{len(self)} chunks" if counts is None else shape_text(counts)
        return f"{cut}, ranks {ranks}" if ranks else cut


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file with values: its path below the checkpoint, length and CRC-32C.

    `rank` is the rank that wrote it, None if unknown. `group` is the pattern of the names in it,
    None if it has no group.
    """

    path: str
    size_bytes: int
    rank: int | None = None
    crc32c: int | None = None
    group: str | None = None


def shown(text: str) -> str:
    """Return `text` with control characters and bidirectional marks escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which 9 comes before 10."""
    parts = enumerate(NUMBER.split(name))
    return [(int(part), "") if at % 2 else (-1, part) for at, part in parts]


def human_bytes(count: int) -> str:
    """Return a number of bytes in decimal units: 1.26 GB."""
    power = min((len(str(count)) - 1) // 3, len(_UNITS) - 1)
    value = count / 1000**power
    number = f"{value:.0f}" if value >= _ROUND_FROM else f"{value:.3g}"
    return f"{number} {_UNITS[power]}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape for people: its sizes with times signs between, or "scalar"."""
    return TIMES.join(map(str, shape)) or "scalar"


def runs_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers for people, as runs: 0 to 3 and 8 as "0-3, 8", with a dash."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > _MAX_RUNS:
        return f"{numbers[0]}…{numbers[-1]}"
    return ", ".join(str(a) if a == b else f"{a}{DASH}{b}" for a, b in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One component of names: the value with exactly this name, and the rows below it.

    A row stands for `alike` siblings with equal contents; `entries` are the values of all siblings,
    and `below` are the rows of the first.
    """

    name: str
    entry: Entry | None
    entries: Sequence[Entry]
    below: Sequence[Row]
    alike: int

    def cells(self, copies: int = 1) -> tuple[str, str, str]:
        """Return texts for shape or number of values, dtypes, and size times `copies`."""
        what = f"{len(self.entries):,} values"
        if self.alike > 1:
            what = f"{self.alike}{TIMES}{len(self.entries) // self.alike}"
        elif self.entry and not self.below:
            what = shape_text(self.entry.shape) if self.entry.dtype else "object"
        dtypes = sorted({entry.dtype for entry in self.entries if entry.dtype is not None})
        size = human_bytes(sum(entry.size_bytes for entry in self.entries)) if dtypes else ""
        if size and copies > 1:
            size = f"{copies}{TIMES}{size}"
        return what, ", ".join(dtypes), size


_Named = tuple[Sequence[str], Entry]


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """Return the tree of names, split at dots and sorted, with equal siblings folded."""
    return _rows_at([(entry.fqn.split("."), entry) for entry in entries], 0)


def _rows_at(named: Sequence[_Named], at: int) -> list[Row]:
    """Return the rows of values whose names differ from component `at` on."""
    by_part: dict[str, list[_Named]] = {}
    for parts, entry in named if at < _MAX_LEVELS else ():
        by_part.setdefault(parts[at], []).append((parts, entry))
    series: dict[object, list[str]] = {}
    for part in sorted(by_part, key=natural):
        kinds = ((*parts[at + 1 :], entry.dtype, entry.shape) for parts, entry in by_part[part])
        key = frozenset(kinds) if NUMBER.fullmatch(part) else part
        series.setdefault(key, []).append(part)
    rows = []
    for alike in series.values():
        groups = [alike] if len(alike) >= _MIN_ALIKE else [[part] for part in alike]
        rows += [_row([by_part[part] for part in group], at, group) for group in groups]
    return rows


def _row(members: Sequence[Sequence[_Named]], at: int, parts: Sequence[str]) -> Row:
    """Return the row of equal siblings, merged with a single row below it."""
    name = parts[0] if len(parts) == 1 else f"[{runs_text(list(map(int, parts)))}]"
    first, alike = members[0], len(members)
    entry = next((entry for names, entry in first if len(names) == at + 1), None)
    deeper = [(names, entry) for names, entry in first if len(names) > at + 1]
    below: Sequence[Row] = _rows_at(deeper, at + 1)
    if entry is None and len(below) == 1 and 1 in {alike, below[0].alike}:
        (row,) = below
        name, entry, below = f"{name}.{row.name}", row.entry, row.below
        alike *= row.alike
    entries = [entry for member in members for _, entry in member]
    return Row(name=name, entry=entry, entries=entries, below=below, alike=alike)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """The names of a checkpoint as a tree, printed as text, and shown as a table in notebooks.

    Equal layers are shown once. `depth` limits the levels; None: all levels.
    """

    top: Sequence[Row]
    sharding_of: Callable[[str], Sharding]
    depth: int | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines(_MAX_ROWS, _MORE))

    __repr__ = __str__

    def lines(self, max_count: int, more: str) -> Iterator[str]:
        """Yield up to `max_count` lines of text, and `more` if there are others."""
        for number, (branch, row, copies) in enumerate(self._rows()):
            if number == max_count:
                yield more
                return
            yield f"{branch}{shown(row.name)}  {'  '.join(filter(None, row.cells(copies)))}"

    def page(self, heading: str = "") -> str:
        """Return the HTML for a notebook: a heading, and the rows of the tree."""
        rows = list(islice(self._rows(), _MAX_ROWS + 1))
        lines = [heading, *(self._html(*row) for row in rows[:_MAX_ROWS])]
        lines += [f"<div>{_MORE}</div>"] if len(rows) > _MAX_ROWS else []
        return f'<div class="ckpt"><style>{_STYLE}</style>{"".join(lines)}</div>'

    _repr_html_ = page

    def _html(self, branch: str, row: Row, copies: int) -> str:
        entry = row.entry
        picture = sharding_svg(self.sharding_of(entry.fqn)) if entry and entry.dtype else ""
        title = escaped(entry.fqn if entry and row.alike == 1 else row.name)
        cells = "".join(f"<span>{escaped(text)}</span>" for text in row.cells(copies))
        kind, name = "r g" if row.below else "r", escaped(row.name)
        return (
            f'<div class="{kind}" title="{title}"><span style="padding-left:{len(branch) // 3}em">'
            f"{name}</span>{cells}<span>{picture}</span></div>"
        )

    def _rows(self) -> Iterator[tuple[str, Row, int]]:
        depth = _MAX_LEVELS if self.depth is None else min(self.depth, _MAX_LEVELS)
        return _shown_rows(self.top, depth)


def _shown_rows(
    rows: Sequence[Row], depth: int, indent: str | None = None, copies: int = 1
) -> Iterator[tuple[str, Row, int]]:
    """Yield rows and the rows below: the branches before each, the row, and its copies."""
    for row in rows if depth > 0 else ():
        branch, below = ("└─ ", "   ") if row is rows[-1] else ("├─ ", "│  ")
        # The first level has no branches.
        before, after = ("", "") if indent is None else (indent + branch, indent + below)
        yield before, row, copies
        yield from _shown_rows(row.below, depth - 1, after, copies * row.alike)


def heading(title: str, url: str, facts: Mapping[str, object]) -> str:
    """Return the HTML above the tree of a checkpoint."""
    cells = "".join(
        f"<div><i>{escaped(name)}</i><br/>{escaped(value)}</div>" for name, value in facts.items()
    )
    top = f"<b>{escaped(title)}</b><div><code>{escaped(url)}</code></div>"
    return f'{top}<div class="f">{cells}</div>'


def escaped(text: object) -> str:
    """Return `text` escaped for HTML, attributes included."""
    return html.escape(shown(str(text)), quote=True)


def sharding_svg(sharding: Sharding) -> str:
    """Return a picture of the chunks of a tensor, with a colour for each rank.

    It shows the two dimensions with the most chunks; too many chunks are not drawn.
    """
    # A vector is drawn across.
    shape = (1, 1, *sharding.shape)
    chunks = [
        ((0, 0, *chunk.offsets), (1, 1, *chunk.sizes), chunk.rank)
        for chunk in (sharding if len(sharding) <= _MAX_CHUNKS else ())
    ]
    counts = [len({offsets[dim] for offsets, *_ in chunks}) for dim in range(len(shape))]
    # Without cuts, the last two dimensions are drawn.
    down, across = sorted(sorted(range(len(shape)), key=lambda dim: (-counts[dim], -dim))[:2])
    cells = ""
    for offsets, sizes, rank in chunks:
        cells += f'<rect x="{offsets[across]}" y="{offsets[down]}" width="{sizes[across]}" '
        hue, strength = ((rank or 0) * _GOLDEN_ANGLE + 212) % 360, 8 if rank is None else 58
        cells += f'height="{sizes[down]}" fill="hsl({hue:.0f} {strength}% 55%)"/>'
    return (
        f'<svg role="img" viewBox="0 0 {shape[across]} {shape[down]}" preserveAspectRatio="none">'
        f"<title>{escaped(sharding)}</title><g>{cells}</g></svg>"
    )
