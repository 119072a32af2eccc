"""The bounded record of a process's events, and the lines of it that errors carry."""

from __future__ import annotations

from pathways_ray.story import LAST_ENTRIES, LAUNCH_ENTRIES, Entry, Story


def test_the_lines_of_a_launch_are_its_own_and_those_of_its_hosts_in_order() -> None:
    story = Story("scheduler 0")
    story.note(Entry(1.0, "host up", host=3))
    story.note_launch(Entry(2.0, "dispatched", session=7, launch=12))
    story.note_launch(Entry(2.5, "dispatched", session=7, launch=13))
    story.note(Entry(3.0, "host lost", "it did not answer for 8 s", host=3))
    assert story.lines(4.0, launch=12, hosts=frozenset({3})) == (
        "scheduler 0: 3.000 s before: host up host 3",
        "scheduler 0: 2.000 s before: dispatched session 7 launch 12",
        "scheduler 0: 1.000 s before: host lost host 3: it did not answer for 8 s",
    )


def test_a_stream_of_launches_pushes_no_lifecycle_event_out() -> None:
    story = Story("controller")
    story.note(Entry(0.0, "session opened", session=1))
    for number in range(2 * LAUNCH_ENTRIES):
        story.note_launch(Entry(float(number), "admitted", session=1, launch=number + 1))
    assert len(story.launches) == LAUNCH_ENTRIES
    assert story.lines(1e4, session=1) == ("controller: 10000.000 s before: session opened session 1",)


def test_lines_are_bounded_and_the_latest() -> None:
    story = Story("controller")
    for number in range(50):
        story.note(Entry(float(number), f"event {number}", session=1))
    lines = story.lines(50.0, session=1)
    assert len(lines) == LAST_ENTRIES
    assert "event 49" in lines[-1]


def test_a_cause_is_said_and_the_sink_gets_lifecycle_entries_alone() -> None:
    logged: list[Entry] = []
    story = Story("host 0", logged.append)
    story.note(Entry(1.0, "launch failed", cause="host 1 is lost", launch=4))
    story.note_launch(Entry(1.0, "enqueued", launch=5))
    assert [entry.event for entry in logged] == ["launch failed"]
    assert story.lines(1.0, launch=4) == ("host 0: 0.000 s before: launch failed launch 4 (because host 1 is lost)",)


def test_entries_that_only_name_a_host_are_those_that_anybody_may_read() -> None:
    story = Story("scheduler 0")
    story.note(Entry(1.0, "island restarts", "launch 9 of program 'loop' was too long", launch=9, host=3, private=True))
    story.note(Entry(2.0, "island restarts", "it compiled program 'big' for 130 s", host=3, private=True))
    story.note(Entry(3.0, "host joined", "epoch 2", host=3))
    story.note_launch(Entry(4.0, "failed", "bob's error", launch=12, host=3))
    story.note_launch(Entry(5.0, "failed", "alice's error", launch=13, host=3))
    assert story.lines(6.0, launch=13, hosts=frozenset({3})) == (
        "scheduler 0: 3.000 s before: host joined host 3: epoch 2",
        "scheduler 0: 1.000 s before: failed launch 13 host 3: alice's error",
    )
    assert len(story.lines(6.0, launch=9)) == 1


def test_what_a_user_has_named_neither_steers_a_terminal_nor_makes_a_line_of_its_own() -> None:
    entry = Entry(0.0, "dispatched", "a\x1b]0;b\x07\nscheduler 0: c\u2028\u202e\ud800 é", "d\r\x9b")
    assert entry.text(0.0) == (
        r"0.000 s before: dispatched: a\x1b]0;b\x07\nscheduler 0: c\u2028\u202e\ud800 é (because d\r\x9b)"
    )
