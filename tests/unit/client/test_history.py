"""The history of an elastic step: when snapshots are taken, which are kept, and from which calls are made again."""

from __future__ import annotations

from pathways_ray.client.history import LONG, LONG_S, TOO_LONG, TOO_LONG_S, History, Place


def called(history: History, count: int) -> list[int]:
    """Makes calls, each with a snapshot before it where that is due; returns those that had one."""
    taken = []
    for _ in range(count):
        if history.due:
            taken.append(history.taken())
        history.calls += 1
    return taken


def test_a_snapshot_is_taken_before_the_first_call_and_after_every_few() -> None:
    assert called(History(3), 8) == [0, 3, 6]


def test_calls_are_made_again_from_the_last_whole_snapshot_before_what_is_needed() -> None:
    history = History(3)
    called(history, 8)
    assert history.start(7) is None, "none is known to be whole"
    history.whole(0)
    assert history.start(7) == 0
    history.whole(6)
    assert (history.start(7), history.start(5)) == (6, 0)
    history.lost(6)
    assert history.start(7) == 0


def test_two_whole_snapshots_are_kept_and_the_calls_since_the_older_one() -> None:
    history = History(2)
    called(history, 9)
    assert [history.whole(name) for name in (0, 2)] == [[], []]
    assert history.first == 0
    assert history.whole(6) == [0]
    assert (history.first, sorted(history.snapshots)) == (2, [2, 4, 6, 8]), "4 and 8 are not known to be whole"
    assert history.whole(8) == [2, 4]
    assert history.first == 6


def test_a_snapshot_that_is_used_drops_no_other() -> None:
    history = History(2)
    called(history, 5)
    for name in (0, 2, 4):
        history.usable(name)
    assert [history.start(needed) for needed in (1, 3, 4)] == [0, 2, 4]
    called(history, 2)
    assert history.whole(6) == [0, 2]


def test_a_snapshot_is_due_at_once_when_all_are_lost() -> None:
    history = History(10)
    called(history, 3)
    history.lost(0)
    assert history.due
    assert history.first == 3, "no call before can be made again"


def test_snapshots_go_elsewhere_where_none_was_whole_for_many_calls_and_some_time() -> None:
    history = History(2)
    called(history, 1)
    history.calls = 2 * LONG - 1
    assert [history.place(now) for now in (0.0, 100.0)] == [Place.APART, Place.APART]
    history.calls += 1
    assert [history.place(now) for now in (100.0, 99.9 + LONG_S)] == [Place.APART, Place.APART]
    assert history.place(100.0 + LONG_S) is Place.BESIDE
    assert history.place(100.0 + TOO_LONG_S) is Place.BESIDE, "a slow loop has not made many calls since"
    history.calls = 2 * TOO_LONG
    assert [history.place(now) for now in (100.0 + LONG_S, 100.0 + TOO_LONG_S)] == [Place.BESIDE, Place.NOWHERE]
    for _ in range(2):
        history.whole(history.taken())
        history.calls += 2
    assert history.place(200.0) is Place.APART, "two are whole"
    history.forget()
    assert (history.due, history.first) == (True, history.calls)
