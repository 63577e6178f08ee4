"""What is shown of a checkpoint: a tree that folds, inert HTML, pictures that add up."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_storage
from ckpt_storage.format.boxes import Box, Grid, GridBoxes
from ckpt_storage.inspect.checkpoint import Checkpoint, diff, open_checkpoint
from ckpt_storage.inspect.facts import Entry, Sharding
from ckpt_storage.inspect.html import TreeView, sharding_svg
from ckpt_storage.inspect.tree import tree_of

EVIL = "<script>alert(1)</script>\"'&amp;.\x1b[31mred\u202eback\n"

HARMLESS = {
    *("div", "style", "span", "code", "details", "summary", "br", "i"),
    *("table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "title", "g", "rect", "path", "text"),
}


class Tags(HTMLParser):
    """Notes tags, attributes and text, and checks that tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, list[str]] = {}
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag not in {"br", "rect", "path"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost tag."""
        if tag not in {"rect", "path"}:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note text."""
        self.text += data


def model(layers: int = 4) -> dict[str, Any]:
    """Return a small language model's state, flat."""
    state: dict[str, Any] = {"embed.weight": torch.ones(50, 8)}
    for i in range(layers):
        state[f"layers.{i}.attention.wq"] = torch.ones(8, 8)
        state[f"layers.{i}.norm"] = torch.ones(8, dtype=torch.bfloat16)
    return state | {"step": 3}


@pytest.fixture
def opened(tmp_path: Path) -> Checkpoint:
    """The model in a checkpoint."""
    ckpt_storage.save(model(), tmp_path / "step-3")
    return open_checkpoint(tmp_path / "step-3")


def test_the_tree_shows_alike_layers_once(opened: Checkpoint) -> None:
    """Numbered siblings of one structure are folded, chains are joined, sizes add up."""
    times, dash = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
    assert str(opened.tree()).splitlines() == [
        f"embed.weight  50 {times} 8  float32  1.6 kB",
        f"layers.[0{dash}3]  4 {times} 2  bfloat16, float32  1.09 kB",
        f"├─ attention.wq  8 {times} 8  float32  4 {times} 256 B",
        f"└─ norm  8  bfloat16  4 {times} 16 B",
        "step  object",
    ]
    assert str(opened.tree(depth=1)).count("\n") == 2
    assert repr(opened.tree()) == str(opened.tree())


def test_layers_that_differ_are_not_folded() -> None:
    """One more value, another shape or type keeps a layer apart; two are no series."""
    entries = [Entry(fqn=f"h.{i}.w", dtype="float32", shape=(4,)) for i in range(12)]
    entries[5] = Entry(fqn="h.5.w", dtype="float32", shape=(5,))
    root = tree_of(reversed(entries))
    assert root.size_bytes == 12 * 16 + 4
    names = list(root.children["h"].children)
    assert names == ["[0\N{EN DASH}4, 6\N{EN DASH}11].w", "5.w"]
    pair = tree_of(Entry(fqn=f"h.{i}.w", dtype="float32", shape=(4,)) for i in range(2))
    assert list(pair.children["h"].children) == ["0.w", "1.w"]


def test_a_name_may_be_a_prefix_of_another() -> None:
    """`a` and `a.b` are both values; neither hides the other."""
    root = tree_of([Entry(fqn="a", dtype="int8"), Entry(fqn="a.b", dtype="int8"), Entry(fqn="")])
    assert {entry.fqn for entry in root.entries()} == {"a", "a.b", ""}


def test_names_nested_without_end_are_shown() -> None:
    """Thousands of levels, branching or not, neither overflow the stack nor fill the page."""
    whole = Sharding(shape=(), boxes=[Box((), ())], owners=[0])
    deep = [Entry(fqn="a" + ".a" * i, dtype="int8") for i in range(1200)]
    chain = [Entry(fqn=".".join("a" * 10_000), dtype="int8")]
    assert len(tree_of(chain).children) == 1
    for root in (tree_of(deep), tree_of(chain)):
        view = TreeView(root=root, sharding_of=lambda _: whole)
        assert str(view).count("\n") <= 40
        assert Tags(view._repr_html_()).tags


def test_a_part_of_thousands_of_digits_is_a_name(tmp_path: Path) -> None:
    """Python makes no number of it; a hostile checkpoint can be shown all the same."""
    digits = "9" * 5000
    root = tree_of(Entry(fqn=f"h.{digits}{i}.w", dtype="int8") for i in range(4))
    assert root.children["h"].value_count == 4
    assert {entry.fqn for entry in root.entries()} == {f"h.{digits}{i}.w" for i in range(4)}
    mixed = tree_of(Entry(fqn=name, dtype="int8") for name in ("#a", "1a", "2a", digits))
    assert mixed.value_count == 4
    ckpt_storage.save({digits: torch.ones(1)}, tmp_path / "c")
    assert digits[:50] in repr(open_checkpoint(tmp_path / "c"))


def test_more_names_than_are_quickly_sorted_are_not_gathered_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A debugger that shows a checkpoint of a million names does not hang; `tree` still works."""
    ckpt_storage.save({f"w{i}": torch.ones(1) for i in range(30)}, tmp_path / "c")
    monkeypatch.setattr("ckpt_storage.inspect.checkpoint._MOST_UNASKED", 20)

    def refuse(*_: object) -> None:
        raise AssertionError("the tree was made")

    with monkeypatch.context() as patch:
        patch.setattr("ckpt_storage.inspect.checkpoint.tree_of", refuse)
        huge = open_checkpoint(tmp_path / "c")
        for text in (repr(huge), huge._repr_html_()):
            assert "tree(depth=2)" in text
            assert "30" in text
    assert "w" in str(huge.tree())
    assert "tree(depth=2)" not in repr(huge)


def test_html_runs_nothing_and_escapes_names(tmp_path: Path) -> None:
    """A hostile name, path or object is text in every view, without control characters."""
    path = tmp_path / "<img src=x onerror=alert(1)>"
    ckpt_storage.save({EVIL: torch.ones(3), "note" + EVIL: EVIL}, path)
    other = tmp_path / "other"
    ckpt_storage.save({EVIL: torch.zeros(4), "note" + EVIL: EVIL * 2}, other)
    opened = open_checkpoint(path)
    name = next(name for name in opened if not name.startswith("note"))
    views = [
        opened._repr_html_(),
        opened.tree()._repr_html_(),
        opened[name]._repr_html_(),
        opened.stats(name)._repr_html_(),
        diff(opened, other)._repr_html_(),
    ]
    for html in views:
        tags = Tags(html)
        assert tags.tags <= HARMLESS
        assert not [key for key in tags.attributes if key.startswith(("on", "href", "src"))]
        assert "alert(1)" in tags.text
        assert all(char.isprintable() or char == "\n" for char in html)
        assert "\u202e" not in html
        assert re.search(r"url\(|@import|javascript:|https?:", html) is None
    for text in (repr(opened), str(opened.tree()), repr(opened[name]), str(diff(opened, other))):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_the_page_shows_facts_prefixes_and_shardings(opened: Checkpoint) -> None:
    """Name, place, format, sizes, every folded prefix, and a picture per tensor."""
    tags = Tags(opened._repr_html_())
    for text in ("step-3", opened.url, "ckpt_storage", "2.69 kB", "embed.weight", "attention.wq"):
        assert text in tags.text
    assert tags.text.count("whole, rank 0") == 3
    assert "width:59.5%" in tags.attributes["style"]


def test_a_huge_checkpoint_is_cut_short() -> None:
    """Views stay small however many names there are, and say that there are more."""
    names = [f"m.{'x' * (i % 7)}{i}.w" for i in range(5000)]
    root = tree_of(Entry(fqn=name, dtype="int8", shape=(i,)) for i, name in enumerate(names))
    whole = Sharding(shape=(1,), boxes=[Box((0,), (1,))], owners=[0])
    view = TreeView(root=root, sharding_of=lambda _: whole)
    assert str(view).count("\n") <= 400
    assert "more names" in str(view)
    html = view._repr_html_()
    assert "more names" in html
    assert len(html) < 400_000


def rectangles(svg: str) -> list[tuple[float, float, float, float]]:
    """Return x, y, width and height of the rectangles of a picture, which is well-formed XML."""
    return [
        tuple(float(item.get(name, 0)) for name in ("x", "y", "width", "height"))  # type: ignore[misc]
        for item in ET.fromstring(svg).iter("rect")  # noqa: S314  # our own
    ]


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((), ()),
        ((10,), ((0, 4, 7),)),
        ((0, 3), ((0,), (0,))),
        ((100, 10), ((0, 25, 50, 75), (0,))),
        ((10, 1000), ((0,), (0, 500))),
        ((4, 6, 8), ((0, 2), (0,), (0, 2, 4))),
    ],
)
def test_pictures_are_tiled_by_chunks(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]
) -> None:
    """The rectangles of a grid's cells fill the picture and do not overlap."""
    count = 1
    for cut in cuts:
        count *= len(cut)
    boxes = GridBoxes(Grid(cuts, tuple(range(count))), shape)
    svg = sharding_svg(Sharding(shape=shape, boxes=boxes, owners=boxes.grid.owners))
    found = rectangles(svg)
    view = [float(n) for n in ET.fromstring(svg).get("viewBox", "").split()]  # noqa: S314  # our own
    assert len(found) == count
    area = sum(width * height for _, _, width, height in found)
    assert area == pytest.approx((view[2] - 2) * (view[3] - 2), rel=0.01)
    for (x, y, width, height), (other_x, other_y, *_) in itertools.permutations(found, 2):
        inside = x <= other_x < x + width - 0.1 and y <= other_y < y + height - 0.1
        assert not inside
