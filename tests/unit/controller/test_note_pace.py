"""The pace of notes in the controller's story: what one tenant causes does not push out what others did."""

from __future__ import annotations

from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.events import CallManager, ClientMessages, StreamOpened
from pathways_ray.story import LIFECYCLE_ENTRIES, MAX_KNOWN, NOTE_S, NOTES_AT_ONCE, Entry, NotePace
from pathways_ray.transport.messages import Register, ReleaseSlice
from tests.unit.controller.core_harness import CoreHarness, of

TENANTS = {1: "alice", 2: "alice", 3: "bob"}


def entry(session: int, at: float = 0.0) -> Entry:
    return Entry(at, "session opened", session=session)


def test_notes_of_a_tenant_beyond_its_pace_are_left_out_and_counted() -> None:
    """
    1. All sessions of a tenant count together; others, and what concerns no session that is known, do not.
    2. Later there is room again: how many were left out comes first, and takes the place of a note.
    """
    pace = NotePace(lambda session: TENANTS.get(session, ""))
    assert all(pace.paced(entry(1 + k % 2)) for k in range(NOTES_AT_ONCE))
    assert [pace.paced(entry(1)), pace.paced(entry(2))] == [(), ()]
    for other in (entry(3), entry(0), entry(4)):
        assert pace.paced(other) == (other,)
    assert pace.paced(entry(1, NOTE_S)) == ()
    again = entry(1, 2 * NOTE_S)
    assert pace.paced(again) == (Entry(again.at, "notes left out", "3 of tenant alice", session=1), again)
    assert pace.paced(again) == ()
    much_later = entry(1, 1e6)
    assert len(pace.paced(much_later)) == 2
    assert sum(len(pace.paced(much_later)) for _ in range(2 * NOTES_AT_ONCE)) == NOTES_AT_ONCE - 2


def test_tenants_that_have_been_quiet_are_forgotten() -> None:
    pace = NotePace(lambda session: f"session {session}")
    for session in range(1, 4 * MAX_KNOWN):
        assert pace.paced(entry(session, session * NOTE_S))
    assert len(pace.spent) <= MAX_KNOWN


def test_programs_that_are_refused_push_nothing_out_of_the_story() -> None:
    """Thousands of them: what another tenant did, and its account, stay. All are counted."""
    core = CoreHarness(hosts=True)
    core.open_session(name="bob's")
    core.open_session(name="alice's")
    core.handle(StreamOpened(2))
    story = core.core.launches.story
    story.note(Entry(0.0, "usage", "bob", "12.000"))
    logged: list[Entry] = []
    story.sink = logged.append
    for _ in range(2 * LIFECYCLE_ENTRIES):
        core.handle(ClientMessages(2, Carrier.STREAM, 1, [Register(1, b"\x90", {})]))
    assert story.counts["program refused"] == 2 * LIFECYCLE_ENTRIES
    assert {"usage", "session opened"} <= {entry.event for entry in story.lifecycle}
    assert len(logged) < 2 * NOTES_AT_ONCE


def test_a_slice_that_is_not_there_is_not_noted_as_released() -> None:
    core = CoreHarness(hosts=True)
    core.open_session()
    core.handle(StreamOpened(1))
    asked = of(CallManager, core.request(1, ReleaseSlice(1, 10**9)))
    assert asked[0].method == "release_slice"
    assert "slice released" not in core.core.launches.story.counts
