"""The buffers of a host, and sessions that end while threads of theirs still store."""

from __future__ import annotations

import threading

import pytest

from pathways_ray.executor.data.buffer_store import BufferStore


class EndsMeanwhile(dict[int, dict[int, str]]):
    """Sessions of a store, one of which ends when its buffers are looked for."""

    store: BufferStore

    def get(self, session: int, default: object = None) -> dict[int, str] | None:  # type: ignore[override]
        found = super().get(session)
        if threading.current_thread() is threading.main_thread():
            ends = threading.Thread(target=self.store.drop_session, args=(session,))
            ends.start()
            ends.join()
        return found


def test_nothing_is_kept_of_a_session_that_ends_between_the_steps_of_a_put() -> None:
    """An upload of the data server's thread, and the dispatcher's, which ends the session meanwhile."""
    for known in (False, True):
        store = BufferStore()
        if known:
            store.put(7, 1, "an array")
        store.sessions = EndsMeanwhile(store.sessions)
        store.sessions.store = store
        store.put(7, 2, "a big array")
        assert store.ended(7)
        assert store.count() == 0
        assert not store.sessions


def test_who_stores_a_value_learns_whether_somebody_had_asked_for_it() -> None:
    store, called = BufferStore(), list[str]()
    store.when_present(7, 1, lambda _: called.append("called"))
    assert [store.put(7, number, "an array") for number in (1, 2)] == [True, False]
    assert called == ["called"]


@pytest.mark.parametrize("first", [1, 2])
def test_a_question_for_several_values_has_asked_for_each(first: int) -> None:
    store, others = BufferStore(), [3 - first]

    def come(_: object) -> None:
        if others:
            store.when_present(7, others.pop(), come, others)

    store.when_present(7, first, come, others)
    assert store.put_all(7, (1, 2), ("one", "two"))
    assert store.waiting() == 0
    assert not store.put_all(7, (3,), ("three",))


def test_who_asks_for_one_of_several_values_finds_all_of_them() -> None:
    store, found = BufferStore(), list[object]()
    store.when_present(7, 1, lambda later: found.append([store.get(7, 1), store.get(7, 2), later]))
    assert not store.put_all(7, (1, 2), ("one", "two"), []), "nobody has asked for the second"
    store.when_present(7, 3, found.append)
    store.when_present(7, 4, found.append)
    assert store.put_all(7, range(3, 5), ("three", "four"))
    assert found == [["one", "two", []], None, None]
    assert not store.put_all(8, (), ())
    assert store.held() == {7: (1, 2, 3, 4)}
    store.drop_session(7)
    assert not store.put_all(7, (5, 6), ("five", "six"))
    assert store.count() == 0


class StoresMeanwhile(dict[int, dict[int, str]]):
    """Sessions of a store. Once it is told to, a value is stored right before the look of who asks for it."""

    store: BufferStore
    looks: int | None = None
    returned: bool | None = None

    def get(self, session: int, default: object = None) -> dict[int, str] | None:  # type: ignore[override]
        if self.looks is not None and threading.current_thread() is threading.main_thread():
            self.looks += 1
            if self.looks == 1:
                self.puts = threading.Thread(target=self._put, args=(session,))
                self.puts.start()
                while 1 not in super().get(session, {}):
                    pass
        return super().get(session, default)  # type: ignore[arg-type]

    def _put(self, session: int) -> None:
        self.returned = self.store.put(session, 1, "an array")


def test_all_who_ask_for_a_value_hear_of_it_where_it_is_stored_while_one_more_asks() -> None:
    store, called = BufferStore(), list[str]()
    found = StoresMeanwhile()
    store.sessions, found.store = found, store
    store.when_present(7, 1, lambda _: called.append("the first"))
    found.looks = 0
    store.when_present(7, 1, lambda _: called.append("the second"))
    found.puts.join()
    assert sorted(called) == ["the first", "the second"]
    assert (found.returned, store.waiting(), store._waiters) == (True, 0, {})


class Asker:
    """Who waits for a value. `compared` counts how often one was compared with another."""

    compared = 0

    def __init__(self, number: int, called: list[int]) -> None:
        self.number, self.called = number, called

    def __call__(self, _: object) -> None:
        self.called.append(self.number)

    def __eq__(self, other: object) -> bool:
        Asker.compared += 1
        return self is other

    __hash__ = object.__hash__


def test_who_waits_no_more_is_found_without_a_look_at_the_others() -> None:
    """All that a client asks for may wait for one buffer. Its end takes them back one by one, in the thread that serves
    the other tenants too; who is left is called in turn."""
    store, called = BufferStore(), list[int]()
    askers = [Asker(number, called) for number in range(1000)]
    for asker in askers:
        store.when_present(7, 1, asker)
    Asker.compared = 0
    for asker in reversed(askers[100:]):
        store.forget(7, 1, asker)
        store.forget(7, 1, asker)
    assert (Asker.compared, store.waiting()) == (0, 100)
    store.put(7, 1, "an array")
    assert called == list(range(100))
    store.forget(7, 1, askers[0])
    store.when_present(7, 2, askers[0])
    store.forget(7, 2, askers[0])
    assert store._waiters == {}


def test_looking_into_a_session_that_is_not_there_leaves_nothing() -> None:
    store = BufferStore()
    assert store.of_session(7).get(1) is None
    store.drop(7, (1,))
    assert not store.sessions


class UploadsMeanwhile(dict[int, str]):
    """Buffers of session 7. A client uploads to a number as soon as it is free."""

    store: BufferStore

    def pop(self, number: int, default: str | None = None) -> str | None:  # type: ignore[override]
        found = super().pop(number, default)
        assert self.store.add(7, number, "another array")
        return found


def test_an_upload_that_comes_while_its_number_is_freed_is_new() -> None:
    """Else a launch could begin early with it, of which other hosts of the island lack their part."""
    store, buffers = BufferStore(), UploadsMeanwhile()
    store.add(7, 1, "an array")
    store.launched(7, (1,))
    assert not store.new_uploads(7)
    buffers.update(store.sessions[7])
    store.sessions[7], buffers.store = buffers, store
    store.drop(7, (1,))
    assert store.new_uploads(7) == {1}


def test_an_upload_that_was_dropped_is_new_no_more() -> None:
    """Its number may be that of a result then."""
    store = BufferStore()
    assert store.add(7, 1, "an array")
    store.drop(7, (1,))
    assert not store.new_uploads(7)


def test_nobody_waits_for_buffers_of_a_session_that_has_ended() -> None:
    store = BufferStore()
    for session in (7, 8):
        store.when_present(session, 1, lambda _: None)
    store.drop_session(7)
    assert store.waiting() == 1
