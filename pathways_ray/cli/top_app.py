"""The terminal application of `pathways top`: tables of `observe.tables`, filled by a thread that looks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable, Footer, Header, Static, TabbedContent, TabPane
from textual.worker import get_current_worker

from pathways_ray.cli.output import readable
from pathways_ray.cli.why import parsed
from pathways_ray.client.asking import call, look, text_in
from pathways_ray.errors import PathwaysError
from pathways_ray.observe.diagnosis import findings
from pathways_ray.observe.tables import tables
from pathways_ray.observe.why import WHY

TITLES = ("devices", "tenants", "sessions", "launches", "queue", "programs", "transfers", "memory", "events")

LAUNCH = re.compile(r"\d+(\.\d+)?")

MAX_FINDINGS = 4
"""Findings that stand above the tables."""


class TopApp(App[None]):
    """The tables of one cluster.

    Args:
        every: seconds between two looks.
        looking: makes a look; the one of a controller by default.
        asking: says why a launch is not over, by its number in the cluster, or as "7.12" by session and number there.
    """

    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("p", "pause", "Pause")]
    CSS = "#health { height: auto; padding: 0 1; } #why { height: auto; max-height: 12; padding: 0 1; }"

    def __init__(
        self,
        url: str,
        token: str,
        ca: str,
        every: float,
        looking: Callable[[], dict[str, Any]] | None = None,
        asking: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self.title = f"pathways top {url}"
        self.every = every
        self.paused = False
        self.looking = looking or (lambda: look(url, token, ca))
        self.asking = asking or (lambda launch: _why(url, token, ca, launch))

    def compose(self) -> ComposeResult:
        yield Header()
        yield Static("looks …", id="health")
        with TabbedContent():
            for title in TITLES:
                with TabPane(title, id=f"pane-{title}"):
                    yield DataTable(id=title, cursor_type="row")
        yield Static("", id="why")
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(self.every, self.look_again)
        self.look_again()

    def action_pause(self) -> None:
        """Stops looking, or goes on."""
        self.paused = not self.paused

    @work(thread=True, exclusive=True, group="look")
    def look_again(self) -> None:
        """Looks in a thread, since a controller may be slow; its absence is shown, and looked for again."""
        if self.paused:
            return
        worker = get_current_worker()
        try:
            found = readable(self.looking())
        except PathwaysError as error:
            text = Text(str(readable(str(error))), style="red")
            if not worker.is_cancelled:
                self.call_from_thread(self.query_one("#health", Static).update, text)
            return
        if not worker.is_cancelled:
            self.call_from_thread(self.show, found)

    def show(self, snapshot: dict[str, Any]) -> None:
        """Fills the tables; the place of the cursor stays."""
        found = findings(snapshot)
        health = Text("healthy", style="green") if not found else Text()
        for finding in found[:MAX_FINDINGS]:
            health.append(f"{finding.severity}: {finding.what}\n", "red" if finding.severity == "error" else "yellow")
        self.query_one("#health", Static).update(health)
        for title, table in tables(snapshot).items():
            widget = self.query_one(f"#{title}", DataTable)
            row, top = widget.cursor_row, widget.scroll_y
            if not widget.columns:
                widget.add_columns(*table.columns)
            widget.clear()
            for cells in table.rows:
                widget.add_row(*(Text(cell) for cell in cells))
            widget.move_cursor(row=min(row, max(0, len(table.rows) - 1)), scroll=False)
            widget.scroll_to(y=top, animate=False)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Says why a launch is not over."""
        if event.data_table.id in ("launches", "queue"):
            cell = event.data_table.get_row_at(event.cursor_row)[0 if event.data_table.id == "launches" else 5]
            if LAUNCH.fullmatch(str(cell)):
                self.ask(str(cell))

    @work(thread=True, exclusive=True, group="why")
    def ask(self, launch: str) -> None:
        try:
            text = self.asking(launch)
        except PathwaysError as error:
            text = str(error)
        self.call_from_thread(self.query_one("#why", Static).update, Text(text))


def _why(url: str, token: str, ca: str, launch: str) -> str:
    why = WHY.decode(text_in(call(url, token, parsed(launch), ca=ca), url))
    return "\n".join(str(readable(line)) for line in str(why).splitlines())
