"""HTML for notebooks, and text made fit to show: escaped, without scripts, at home in both themes.

Colours are the page's own (`currentColor`) or of middle lightness, so that a light and a dark page
show them alike.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

TIMES = " \N{MULTIPLICATION SIGN} "
DASH = "\N{EN DASH}"

_STEP = 1000
_ROUND_FROM = 100
_MOST_RUNS = 3

_STYLE = """
.ckpt{font:13px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;color:inherit;max-width:64rem;
text-align:left}
.ckpt code,.ckpt .m{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px;
background:none;color:inherit;padding:0}
.ckpt .h{font-size:15px;font-weight:600}
.ckpt .q{opacity:.72}
.ckpt .f{display:flex;flex-wrap:wrap;gap:2px 24px;margin:6px 0 10px}
.ckpt .f div{display:flex;flex-direction:column}
.ckpt .f .q{font-size:11px}
.ckpt .r{display:grid;grid-template-columns:
minmax(11rem,1fr) minmax(4rem,7.5rem) minmax(3.5rem,8.5rem) 6.5rem minmax(1rem,6rem) 3.2rem;
column-gap:12px;align-items:center;padding:3px 8px;min-height:20px;
border-top:1px solid rgba(128,128,128,.22)}
.ckpt .r>*{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.ckpt .r .n{text-align:right;font-variant-numeric:tabular-nums}
.ckpt .r.head{border-top:0;font-size:11px}
.ckpt summary.r{cursor:pointer;list-style:none}
.ckpt summary.r::-webkit-details-marker{display:none}
.ckpt summary.r>:first-child::before{content:"\\25B8";display:inline-block;width:1.1em;opacity:.6}
.ckpt details[open]>summary.r>:first-child::before{content:"\\25BE"}
.ckpt summary.r:hover,.ckpt div.r:not(.head):hover{background:rgba(128,128,128,.1)}
.ckpt div.r>:first-child::before{content:"";display:inline-block;width:1.1em}
.ckpt .b{display:block;height:7px;border-radius:3px;background:rgba(128,128,128,.2)}
.ckpt .b i{display:block;height:100%;min-width:1px;border-radius:3px;background:hsl(212 70% 52%)}
.ckpt table{border-collapse:collapse;margin:4px 0;font-size:13px;color:inherit}
.ckpt th,.ckpt td{text-align:left;padding:3px 14px 3px 0;background:none;
border-top:1px solid rgba(128,128,128,.22)}
.ckpt th{border-top:0;font-size:11px;font-weight:400;opacity:.72}
.ckpt td.n{text-align:right;font-variant-numeric:tabular-nums}
.ckpt svg{display:block;color:inherit}
"""


def shown(text: str) -> str:
    """Return `text` with what a terminal or a reader could be misled by spelt out.

    Names come from a checkpoint: control characters and marks that turn the direction of writing
    round are not for whoever looks at it.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaped(text: object) -> str:
    """Return `text` as it may stand anywhere in HTML, attributes included."""
    return html.escape(shown(str(text)), quote=True)


def human_bytes(count: int) -> str:
    """Return a number of bytes for people, in decimal units: 1.26 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < _STEP or unit == "PB":
            break
        value /= _STEP
    if unit == "B":
        return f"{count} B"
    return f"{value:.0f} {unit}" if value >= _ROUND_FROM else f"{value:.3g} {unit}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape for people: its sizes with times signs between, "scalar" if it has none."""
    return TIMES.join(map(str, shape)) or "scalar"


def runs_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers for people, as runs: 0 to 3 and 8 as "0-3, 8", with a dash."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > _MOST_RUNS:
        return f"{numbers[0]}…{numbers[-1]}"
    return ", ".join(str(a) if a == b else f"{a}{DASH}{b}" for a, b in runs)


def page(*parts: str) -> str:
    """Return parts, which are HTML, as what a notebook shows."""
    return f'<div class="ckpt"><style>{_STYLE}</style>{"".join(parts)}</div>'


def card(title: str, facts: Mapping[str, object], *parts: str, note: str = "") -> str:
    """Return a heading with facts below it, then `parts`, which are HTML."""
    cells = "".join(
        f'<div><span class="q">{escaped(name)}</span><span>{escaped(value)}</span></div>'
        for name, value in facts.items()
    )
    below = f'<code class="q">{escaped(note)}</code>' if note else ""
    return (
        f'<div class="h">{escaped(title)}</div>{below}<div class="f">{cells}</div>{"".join(parts)}'
    )


def bar(share: float, title: str) -> str:
    """Return a bar that is filled to `share`, from 0 to 1."""
    width = 100 * min(max(share, 0.0), 1.0)
    return f'<span class="b" title="{escaped(title)}"><i style="width:{width:.1f}%"></i></span>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of plain values; numbers stand at the right."""
    heads = "".join(f"<th>{escaped(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f'<td class="n">{value:.6g}</td>'
    if isinstance(value, int):
        return f'<td class="n">{value:,}</td>'
    return f"<td>{escaped(value)}</td>"
