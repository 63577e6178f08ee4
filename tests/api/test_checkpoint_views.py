"""What is shown of a checkpoint: a tree that folds, inert HTML, pictures that add up."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import torch

import ckpt_storage
from ckpt_storage import Checkpoint, diff, open_checkpoint
from ckpt_storage.format.boxes import Grid
from ckpt_storage.inspect.views import Sharding, sharding_svg

EVIL = "<script>alert(1)</script>\"'&amp;.\x1b[31mred\u202eback\n"

HARMLESS = {"div", "style", "span", "code", "br", "i", "b", "svg", "title", "g", "rect"}


def parsed(html: str) -> tuple[set[str], set[str], str]:
    """Return tags, attributes and text of HTML, which is balanced."""
    root = ET.fromstring(html)  # noqa: S314  # our own
    items = list(root.iter())
    return (
        {one.tag for one in items},
        {k for one in items for k in one.attrib},
        "".join(root.itertext()),
    )


def opened(path: Path, state: dict[str, Any]) -> Checkpoint:
    """Save a state and open it."""
    ckpt_storage.save(state, path)
    return open_checkpoint(path)


def test_the_tree_shows_alike_layers_once(tmp_path: Path) -> None:
    """Numbered siblings of one structure are folded, chains are joined, sizes add up."""
    state: dict[str, Any] = {"embed.weight": torch.ones(50, 8), "step": 3}
    state |= {f"layers.{i}.attention.wq": torch.ones(8, 8) for i in range(4)}
    state |= {f"layers.{i}.norm": torch.ones(8, dtype=torch.bfloat16) for i in range(4)}
    state |= {f"h.{i}.w": torch.ones(5 if i == 5 else 4) for i in range(12)}
    checkpoint = opened(tmp_path / "step-3", state)
    times, dash = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
    assert str(checkpoint.tree()).splitlines() == [
        f"embed.weight  50 {times} 8  float32  1.6 kB",
        "h  12 values  float32  196 B",
        f"├─ [0{dash}4, 6{dash}11].w  11 {times} 1  float32  176 B",
        "└─ 5.w  5  float32  20 B",
        f"layers.[0{dash}3]  4 {times} 2  bfloat16, float32  1.09 kB",
        f"├─ attention.wq  8 {times} 8  float32  4 {times} 256 B",
        f"└─ norm  8  bfloat16  4 {times} 16 B",
        "step  object",
    ]
    assert str(checkpoint.tree(depth=1)).count("\n") == 3
    *_, shown = parsed(checkpoint._repr_html_())
    for text in ("step-3", checkpoint.url, "ckpt_storage", "embed.weight", "attention.wq"):
        assert text in shown
    assert shown.count("whole, rank 0") == 5


def test_hostile_names_are_shown(tmp_path: Path) -> None:
    """Nested without end, with thousands of digits, thousands of them: views stay small."""
    many = {f"m.{'x' * (i % 7)}{i}.w": torch.ones(1) for i in range(1000)}
    deep = {"a" + ".a" * i: torch.ones(1) for i in range(0, 600, 2)}
    digits = {"9" * 500: torch.ones(1), "#a": torch.ones(1), "1a": torch.ones(1)}
    for name, state in (("many", many), ("deep", deep), ("digits", digits)):
        checkpoint = opened(tmp_path / name, state)
        assert str(checkpoint.tree()).count("\n") <= 400
        html = checkpoint._repr_html_()
        assert len(html) < 400_000
        assert parsed(html)[0] <= HARMLESS
        assert ("more names" in html) is (name == "many")
    assert "more names" in str(open_checkpoint(tmp_path / "many").tree())


def test_html_runs_nothing_and_escapes_names(tmp_path: Path) -> None:
    """A hostile name, path or object is text in every view, without control characters."""
    checkpoint = opened(
        tmp_path / "<img src=x onerror=alert(1)>", {EVIL: torch.ones(3), "note" + EVIL: EVIL}
    )
    other = opened(tmp_path / "other", {EVIL: torch.zeros(4), "note" + EVIL: EVIL * 2})
    name = next(name for name in checkpoint if not name.startswith("note"))
    for html in (checkpoint._repr_html_(), checkpoint.tree()._repr_html_()):
        tags, attributes, text = parsed(html)
        assert tags <= HARMLESS
        assert not [key for key in attributes if key.startswith(("on", "href", "src"))]
        assert "alert(1)" in text
        assert all(char.isprintable() or char == "\n" for char in html)
        assert "\u202e" not in html
        assert re.search(r"url\(|@import|javascript:|https?:", html) is None
    found = diff(checkpoint, other)
    shown = (checkpoint, checkpoint.tree(), checkpoint[name], found, checkpoint.stats(name))
    for text in map(repr, shown):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_pictures_are_tiled_by_chunks() -> None:
    """The rectangles of the chunks of a tensor fill its picture."""
    for shape, cuts, count in (
        ((10,), ((0, 4, 7),), 3),
        ((100, 10), ((0, 25, 50, 75), (0,)), 4),
        ((4, 6, 8), ((0, 2), (0,), (0, 2, 4)), 6),
    ):
        boxes = Grid(cuts, shape)
        svg = sharding_svg(Sharding(shape=shape, boxes=boxes, owners=range(count)))
        found = [
            [float(item.get(name, 0)) for name in ("width", "height")]
            for item in ET.fromstring(svg).iter("rect")  # noqa: S314  # our own
        ]
        assert len(found) == count
        width, height = map(int, ET.fromstring(svg).attrib["viewBox"].split()[2:])  # noqa: S314
        assert sum(one * other for one, other in found) == width * height
