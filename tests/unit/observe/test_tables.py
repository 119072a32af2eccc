"""Tables of a snapshot: rows of text, bounded."""

from __future__ import annotations

from pathways_ray.observe.tables import MAX_ROWS, on_devices, tables
from tests.unit.observe.snapshots import host, island, snapshot


def test_the_tables_of_a_snapshot() -> None:
    found = tables(snapshot())
    assert found["devices"].rows[0] == ("0 up", "0", "0.0", "up", "640 step", "session 1: left")
    assert found["tenants"].rows[0] == ("alice", "1", "0", "50%", "1.2", "1", "1", "1", "2.0 KiB")
    assert found["launches"].rows == [("640", "bob", "2.3", "step", "in flight", "0")]
    assert found["queue"].rows == [("0", "1", "alice", "1", "2", "641", "double", "0.5 s")]
    assert found["programs"].rows[0][:2] == ("step", "2")
    assert found["transfers"].rows == [("1", "0", "2.0 MiB"), ("0", "1", "4.0 KiB")]
    assert found["memory"].rows == [("0.0", "100 bytes", "40 bytes", "bob 40 bytes")]
    assert found["events"].rows == [("2.0 s ago", "session opened", "tenant bob", "", "2", "")]
    for table in found.values():
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_nothing_to_see_is_empty_tables() -> None:
    assert all(not table.rows for table in tables({"status": None, "islands": {}, "overview": {}}).values())


def test_a_host_that_is_down_has_a_row() -> None:
    rows = tables(snapshot(islands=[island(0, host(0, up=False), state="away")]))["devices"].rows
    assert rows == [("0 away", "0", "-", "down", "", "")]


def test_long_tables_are_bounded_and_say_so() -> None:
    rows = tables(snapshot(islands=[island(0, host(0, devices=1000))]))["devices"].rows
    assert len(rows) == MAX_ROWS + 1
    assert rows[-1][0] == f"{1000 - MAX_ROWS} more"


def test_the_first_launch_of_a_device_is_on_it() -> None:
    assert on_devices(snapshot()) == {"0.0": "640 step", "0.1": "640 step"}


def test_what_waits_is_suspended_or_drained_shows() -> None:
    session = {"session": 3, "name": "a", "tenant": "alice", "programs": 1, "buffers": 0, "bytes": 2048}
    sessions = [{**session, "in_flight": 0, "waiting": 4, "suspended": True}]
    drained = {**island(0, host(0, devices=1), state="draining"), "reason": "its node ends"}
    found = snapshot(sessions=sessions, islands=[drained])
    found["overview"]["launches"][0].update(sequence=0, state="waiting for memory")
    made = tables(found)
    assert made["sessions"].rows == [("3", "a", "alice", "suspended", "1", "0", "2.0 KiB", "0", "4")]
    assert made["devices"].rows[0][0] == "0 draining: its node ends"
    assert made["launches"].rows[0][0] == "2.3", "it has no number in the cluster yet"
