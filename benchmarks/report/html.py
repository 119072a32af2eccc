"""Tables, bars and the page around them, as HTML that needs nothing beside itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.report.aims import Aim

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .6rem 0; font-size: 13px } img { max-width: 100%; display: block }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } .spread { color: #777 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: 13px } dt { color: #777 }
dd { margin: 0; overflow-wrap: anywhere } details { overflow-x: auto } summary { cursor: pointer; font-weight: 600 }
.met { color: #00734f } .missed { color: #b3261e; font-weight: 600 } .slower { color: #a65c00 } .note { color: #777 }
h2 { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem } svg text { font: 12px system-ui, sans-serif }
"""

COLOURS = {"met": "#009E73", "missed": "#D55E00", "slower": "#E69F00", "": "#0072B2"}
SPREAD = {"min", "median", "max"}
DEEPEST = 3  # dictionaries in a record that become columns of their own

Bar = tuple[str, Mapping[str, float], Aim | None, str]


def page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def records(value: Any) -> list[dict[str, Any]]:
    """A list of dictionaries, or nothing."""
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return value
    return []


def number(value: float) -> str:
    """Four digits that count; thousands apart."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or value == 0 or not math.isfinite(value):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def cell(value: Any) -> str:
    """A value of a record. Spreads show their median first; long lists only how long they are."""
    if value is None:
        return "<td></td>"
    if isinstance(value, int | float):
        return f'<td class="number">{number(value)}</td>'
    if isinstance(value, dict) and "median" in value and value.keys() <= SPREAD:
        text = number(value["median"])
        if "min" in value and "max" in value:
            text += f' <span class="spread">{number(value["min"])} to {number(value["max"])}</span>'
        return f'<td class="number">{text}</td>'
    if isinstance(value, list):
        plain = len(value) <= 8 and not any(isinstance(one, list | dict) for one in value)
        return f"<td>{escape(', '.join(map(str, value)) if plain else f'{len(value)} entries')}</td>"
    text = str(value)
    marked = f' class="{text}"' if text in COLOURS and text else ""
    return f"<td{marked}>{escape(text)}</td>"


def flat(record: Mapping[str, Any], depth: int = DEEPEST) -> dict[str, Any]:
    """A record without dictionaries in it but spreads: their entries become columns of their own."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and not ("median" in value and value.keys() <= SPREAD) and depth:
            found.update({f"{key}: {inner}": one for inner, one in flat(value, depth - 1).items()})
        else:
            found[key] = value
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records as rows; a column for everything that any of them has."""
    flattened = [flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flattened for key in row))
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join("<tr>" + "".join(cell(row.get(column)) for column in columns) + "</tr>" for row in flattened)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bars(figures: Sequence[Bar]) -> str:
    """Each figure as a point with its spread on a logarithmic line, a tick where its aim is, and the verdict."""
    values = [v for _, spread, aim, _ in figures for v in (*spread.values(), *([aim.bound] if aim else [])) if v > 0]
    if not values:
        return ""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    left, width, row = 430, 420, 22

    def at(value: float) -> float:
        return left + width * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    bottom = row * len(figures) + 8
    parts = []
    for power in range(low, high + 1):
        x = at(10.0**power)
        parts.append(
            f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}" stroke="{"#999" if power == 0 else "#ddd"}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#777">{10.0**power:g}</text>')
    for place, (name, spread, aim, verdict) in enumerate(figures):
        y, colour = row * place + 14, COLOURS[verdict]
        x = at(spread["median"])
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        if "min" in spread and "max" in spread:
            ends = f'x1="{at(spread["min"]):.1f}" x2="{at(spread["max"]):.1f}"'
            parts.append(f'<line {ends} y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="4.5" fill="{colour}"/>')
        if aim:
            tick = at(aim.bound)
            parts.append(
                f'<line x1="{tick:.1f}" x2="{tick:.1f}" y1="{y - 8}" y2="{y + 8}" stroke="#222" stroke-width="2"/>'
            )
        text = number(spread["median"]) + (f" ({verdict}; aim {aim.bound_text})" if aim else f" {verdict}")
        parts.append(f'<text x="{left + width + 10}" y="{y + 4}" fill="{colour}">{escape(text)}</text>')
    size = f'width="{left + width + 220}" height="{bottom + 20}"'
    return f'<svg {size} role="img" aria-label="figures and their aims">{"".join(parts)}</svg>'
