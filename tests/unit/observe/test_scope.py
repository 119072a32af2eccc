"""The scope of a tenant: names, programs and numbers of others are not in what it gets."""

from __future__ import annotations

from pathways_ray.observe import views
from pathways_ray.observe.scope import OTHER, for_tenant
from pathways_ray.observe.views import Dispatched, IslandView, Queue, Stopped, StoppedOn


def test_a_tenant_sees_that_others_have_launches_and_not_which() -> None:
    sent = (Dispatched(640, 2, "bob", "secret", 1.0, (0,), ("0.0",)), Dispatched(641, 1, "alice", "mine", 1.0, (0,)))
    view = IslandView(
        0,
        (0,),
        (),
        sent,
        (Queue(2, "bob", 3, 642, "secret", 1.0), Queue(1, "alice", 3, 643, "mine", 1.0)),
        running=(views.Running(0, 640, 1.0), views.Running(0, 641, 2.0)),
        compiling=(views.Compiling(0, 9, "secret", 1.0),),
        stopped=(StoppedOn(0, Stopped(640, "AT_BARRIER")), StoppedOn(0, Stopped(641, "AT_BARRIER"))),
        uploads=(views.ArrivingAt(0, views.Arriving(2, 64, 1, 2)), views.ArrivingAt(0, views.Arriving(1, 3, 1, 2))),
        story=("bob's launch 640",),
    )
    found = for_tenant(view, frozenset({1}))
    text = views.encode(found).decode()
    for word in ("bob", "secret", "640", "642", "64,"):
        assert word not in text
    assert [one.tenant for one in found.dispatched] == [OTHER, "alice"]
    assert [one.launches for one in found.queues] == [3, 3]
    assert [one.sequence for one in found.running] == [0, 641]
    assert [one.launch.sequence for one in found.stopped] == [641]
    assert [one.upload.buffer for one in found.uploads] == [3]
