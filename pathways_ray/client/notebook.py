"""HTML for notebooks: what an array, a slice, a program or a cluster is, at a glance.

Pages of a notebook are kept and sent around: nothing here has a token, asks for a value, or loads anything. Names are
those that users chose, and are escaped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pathways_ray.ir.graph import Argument, Branch, Compute, Graph, Regroup, Repeat, Result, Transfer
from pathways_ray.ir.types import SliceType, Spec, spec_text
from pathways_ray.observe.why import bytes_text

MAX_TILES = 256
"""Tiles of an array that are drawn; of one in more pieces only the table is shown."""

MAX_NODES = 64
"""Nodes of a program that are drawn; of a larger one the first."""

MAX_HOSTS = 64

WIDTH, HEIGHT, ROW, COLUMN = 150, 26, 36, 184
"""Sizes of a node, and of its place, in pixels."""

_CELL = "border:1px solid #8886;padding:2px 6px;text-align:center"
_COLOURS = ("#9ecae1", "#a1d99b", "#fdae6b", "#bcbddc", "#fc9272", "#d9d9d9", "#c7e9c0", "#fdd0a2")


def rows_html(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values below a title."""
    lines = "".join(f"<tr><th style='text-align:left'>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in rows)
    return f"<div><b>{escape(title)}</b><table>{lines}</table></div>"


def array_html(kind: Any, nbytes: int, state: str) -> str:
    """An array: its type, where it lies, and which device has which tile of it.

    Args:
        kind: its `ArgumentType`, on a slice.
    """
    where = kind.slice
    rows = [("bytes", bytes_text(nbytes)), ("on", f"{where} of island {where.island}")]
    rows += [("sharding", spec_text(kind.spec)), ("state", state)]
    return rows_html(f"pw.Array {kind}", rows) + tiles_html(where.type, kind.spec, len(kind.aval.shape), where.devices)


def tiles_html(mesh: SliceType, spec: Spec, dimensions: int, devices: Sequence[str]) -> str:
    """A grid of the tiles of an array of one or two dimensions, each with its devices; "" for others."""
    counts = [math.prod(mesh.axis_size(axis) for axis in axes) for axes in spec]
    counts += [1] * (dimensions - len(counts))
    if dimensions not in (1, 2) or math.prod(counts) > MAX_TILES:
        return ""
    held: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for number, device in enumerate(devices):
        held[tile_of(mesh, spec, dimensions, number)].append(device)
    rows, columns = counts if dimensions == 2 else (1, counts[0])
    lines = []
    for row in range(rows):
        cells = []
        for column in range(columns):
            found = held[(row, column) if dimensions == 2 else (column,)]
            colour = _COLOURS[(row * columns + column) % len(_COLOURS)]
            cells.append(f"<td style='{_CELL};background:{colour};color:#000'>{escape(', '.join(found))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table style='border-collapse:collapse'>{''.join(lines)}</table>"


def tile_of(mesh: SliceType, spec: Spec, dimensions: int, number: int) -> tuple[int, ...]:
    """The tile that device `number` of a slice has, by its place along each dimension of the array."""
    place: dict[str, int] = {}
    for axis, size in zip(reversed(mesh.axes), reversed(mesh.shape), strict=True):
        number, place[axis] = divmod(number, size)
    found = []
    for axes in (*spec, *((),) * (dimensions - len(spec))):
        tile = 0
        for axis in axes:
            tile = tile * mesh.axis_size(axis) + place[axis]
        found.append(tile)
    return tuple(found)


def slice_html(where: Any) -> str:
    """A slice: its mesh and its devices."""
    rows = [("island", str(where.island)), ("devices", " ".join(where.devices))]
    return rows_html(repr(where), [*rows, ("state", "released" if where.released else "held")])


def graph_html(graph: Graph) -> str:
    """A program's graph, from left to right; a node says its slice when the pointer is on it."""
    slices = {mesh.id: number for number, mesh in enumerate(graph.slices)}
    column: list[int] = []
    place: list[tuple[int, int]] = []
    height: dict[int, int] = defaultdict(int)
    drawn = []
    for number, node in enumerate(graph.nodes[:MAX_NODES]):
        inputs = () if isinstance(node, Argument) else (node.input,) if isinstance(node, Transfer) else node.inputs
        column.append(max((column[ref.node] + 1 for ref in inputs), default=0))
        x, y = 4 + column[number] * COLUMN, 4 + height[column[number]] * ROW
        height[column[number]] += 1
        place.append((x, y))
        for source in dict.fromkeys(ref.node for ref in inputs):
            a, b = place[source]
            ends = f"M{a + WIDTH},{b + HEIGHT // 2} C{a + WIDTH + 17},{b + HEIGHT // 2} {x - 17},{y + HEIGHT // 2} "
            drawn.append(f"<path d='{ends}{x},{y + HEIGHT // 2}' fill='none' stroke='#888'/>")
        name, about, colour = _drawn(graph, node, slices)
        short = name if len(name) < 20 else f"{name[:18]}…"
        box = f"<rect x='{x}' y='{y}' width='{WIDTH}' height='{HEIGHT}' rx='3' fill='{colour}' stroke='#888'>"
        drawn.append(f"{box}<title>{escape(about)}</title></rect>")
        drawn.append(f"<text x='{x + 6}' y='{y + 17}' font-size='12' fill='#000'>{escape(short)}</text>")
    wide, high = (max(column, default=0) + 1) * COLUMN, max(height.values(), default=1) * ROW + 8
    left = f"<p>and {len(graph.nodes) - MAX_NODES} more nodes</p>" if len(graph.nodes) > MAX_NODES else ""
    title = f"<b>program {escape(graph.name)}</b><br>"
    return f"<div>{title}<svg width='{wide}' height='{high}' role='img'>{''.join(drawn)}</svg>{left}</div>"


def _drawn(graph: Graph, node: Any, slices: Mapping[int, int]) -> tuple[str, str, str]:
    """Name, explanation and colour of a node; the colour is that of its slice."""

    def colour(number: int) -> str:
        return _COLOURS[slices[number] % len(_COLOURS)]

    match node:
        case Argument():
            return f"argument {node.index}", f"{node.type} @ {node.layout}", "#fff"
        case Compute():
            return node.name, f"{graph.slices[slices[node.slice]]} {node.where}".strip(), colour(node.slice)
        case Transfer() | Regroup():
            kind = "transfer" if isinstance(node, Transfer) else "regroup"
            return kind, f"{node.type} -> {node.layout}", colour(node.layout.slice)
        case Branch() | Repeat():
            return node.name, node.where, "#fff"
        case Result():
            return "result", f"{len(node.inputs)} values", "#fff"
    return type(node).__name__, "", "#fff"


def cluster_html(url: str, session: int, status: Mapping[str, Any]) -> str:
    """A cluster: its islands, hosts and devices, and who holds these."""
    lines = []
    hosts = [(island, host) for island in status["islands"] for host in island["hosts"]]
    for island, host in hosts[:MAX_HOSTS]:
        devices = "".join(
            f"<td style='{_CELL};background:{_COLOURS[1] if one['slices'] else 'none'}' "
            f"title='{escape(', '.join(one['slices']) or 'nobody')}'>{escape(one['device'])}</td>"
            for one in host["devices"]
        )
        state = "up" if host["up"] else "down"
        about = f"<td>island {island['island']} ({escape(island['platform'])})</td><td>host {host['host']} {state}</td>"
        lines.append(f"<tr>{about}{devices}</tr>")
    left = f"<p>and {len(hosts) - MAX_HOSTS} more hosts</p>" if len(hosts) > MAX_HOSTS else ""
    return f"<div><b>session {session} of {escape(url)}</b><table>{''.join(lines)}</table>{left}</div>"
