"""`pathways top`: the tables follow what it looks at, and a controller that is away ends nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from click.testing import CliRunner
from textual.widgets import DataTable, Static

from pathways_ray.cli import commands, top
from pathways_ray.cli.top_app import TopApp
from pathways_ray.errors import UsageError
from tests.unit.observe.snapshots import snapshot

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


def app(looking: Any, asking: Any = lambda launch: "") -> TopApp:
    return TopApp("grpc://here:1", "token", "", 3600.0, looking, asking)


async def until(pilot: Any, condition: Any) -> None:
    for _ in range(500):
        await pilot.pause(0.01)
        if condition():
            return
    raise AssertionError("it did not come about")


def text_of(made: TopApp, name: str) -> str:
    return str(made.query_one(f"#{name}", Static).render())


def test_tables_are_filled_and_the_cursor_asks_why() -> None:
    asked: list[str] = []

    async def run() -> None:
        made = app(snapshot, lambda launch: asked.append(launch) or "launch 640 runs")
        async with made.run_test() as pilot:
            table = made.query_one("#launches", DataTable)
            await until(pilot, lambda: table.row_count)
            assert str(table.get_row_at(0)[0]) == "640"
            assert text_of(made, "health") == "healthy"
            table.action_select_cursor()
            await until(pilot, lambda: text_of(made, "why") == "launch 640 runs")

    asyncio.run(run())
    assert asked == ["640"]


def test_a_controller_that_is_away_is_shown_and_looked_for_again() -> None:
    answers: list[Any] = [UsageError("no cluster answers"), snapshot(islands=[])]

    def looking() -> dict[str, Any]:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def run() -> None:
        made = app(looking)
        async with made.run_test() as pilot:
            await until(pilot, lambda: text_of(made, "health") != "looks …")
            assert text_of(made, "health") == "no cluster answers"
            made.look_again()
            await until(pilot, lambda: not answers and "no cluster" not in text_of(made, "health"))
            assert text_of(made, "health").startswith("error: no host is up")

    asyncio.run(run())
    assert answers == [], "it was looked for once again"


def test_names_that_would_steer_a_terminal_do_not() -> None:
    found = snapshot()
    found["overview"]["launches"][0]["program"] = "[red]x\x1b[2J"

    async def run() -> None:
        made = app(lambda: found)
        async with made.run_test() as pilot:
            table = made.query_one("#launches", DataTable)
            await until(pilot, lambda: table.row_count)
            assert str(table.get_row_at(0)[3]) == "[red]x?[2J"

    asyncio.run(run())


def test_what_is_no_terminal_gets_no_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "check_token", lambda *_: None)
    found = CliRunner().invoke(commands, ["top", "--url", "grpc://h:1", "--token", "t"], prog_name="pathways")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "draws on a terminal, and its output goes elsewhere" in found.stderr
