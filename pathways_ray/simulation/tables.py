"""Invariants of a core's tables, which hold after every event. The simulator and tests look at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pathways_ray.controller.launches import Launches
from pathways_ray.controller.lifecycle import LaunchState
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.policies import Ledger, Usage
from pathways_ray.transport.messages import IslandLaunch


def _check_ledger(ledger: Ledger, accounts: Sequence[Usage]) -> None:
    """Raises where a ledger counts other launches than there are, each with its account."""
    busy = Counter(id(usage) for usage in accounts)
    for usage in (*ledger.usages.values(), *accounts):
        assert usage.busy == busy[id(usage)], f"tenant {usage.tenant} has {busy[id(usage)]} launches, not {usage.busy}"
    assert ledger.active == len(busy), f"{len(busy)} tenants have launches, not {ledger.active}"


def check_order(order: IslandOrder) -> None:
    """Raises `AssertionError` where the tables of a scheduler's order disagree."""
    assert len(order.outstanding) <= order.window
    fresh = {
        (item.sequence, queue.session)
        for queue in order.waiting.values()
        for item in queue.items
        if isinstance(item, IslandLaunch) and item.first == 0
    }
    for session, queue in order.waiting.items():
        assert session == queue.session
        assert order.sessions[session] is queue
        assert queue.head.first == 0, "a later gang waits at the head"
    assert set(order.cross_island) <= fresh
    assert list(order.cross_island) == sorted(order.cross_island)
    waiting = [order.sessions[session].usage for _, session in fresh]
    _check_ledger(order.ledger, [*(record.usage for record in order.outstanding.values()), *waiting])
    assert order.inline == sum(record.is_inline for record in order.outstanding.values()), order.inline
    local = [record.program for record in order.outstanding.values() if record.program.counts]
    for group in order.devices.groups:
        assert group.launches == sum(group in program.devices.groups for program in local), group
    for devices in order.devices:
        found = [device for group in devices.groups for device in group.devices]
        assert sorted(found) == sorted(devices.devices), devices


def check_launches(launches: Launches) -> None:
    """Raises `AssertionError` where the controller's tables of launches and buffers disagree."""
    for sequence, record in launches.in_flight.items():
        assert record.sequence == sequence
        assert record.pending or record.failure is not None, f"launch {sequence} has nothing to wait for"
    for program in launches.programs.values():
        flying = sum(record.program is program for record in launches.in_flight.values())
        assert program.in_flight == flying, (program.in_flight, flying)
    for session in launches.sessions.values():
        flying = sum(record.session == session.id for record in launches.in_flight.values())
        assert session.in_flight == flying, (session.in_flight, flying)
        usage = session.usage
        parts = sum(one.usage is usage and one.is_part for one in launches.in_flight.values())
        assert usage.parts == parts, (usage.parts, parts)
        held = sum(b.type.device_bytes for b in session.buffers.values() if b.failure is None)
        assert all(found >= 0 for found in session.held.values()), session.held
        assert session.device_bytes == held, (session.device_bytes, held)
        charged = sum(b.type.charged_bytes for b in session.buffers.values() if b.failure is None)
        charged += sum(record.carried for record in launches.in_flight.values() if record.session == session.id)
        assert session.charged_bytes == charged, (
            f"session {session.id} has {charged} bytes, not {session.charged_bytes}"
        )
        assert all(session.lives(number) and one.hosts for number, one in session.arriving.items())
        assert session.early.keys().isdisjoint(session.arriving)
        for part, whole in session.parts.items():
            assert session.slices.keys() >= {part, whole}, f"slice {part} is a part of {whole}, which is not there"
            assert part != whole
            assert {*session.slices[part].devices} <= {*session.slices[whole].devices}, f"nobody counts slice {part}"
        for number, buffer in session.buffers.items():
            assert not buffer.producer or buffer.producer in launches.in_flight, f"buffer {number} waits for no launch"
    window = launches.cross_island
    under_way, calling = Counter[int](), Counter[tuple[int, int]]()
    for record in launches.in_flight.values():
        if record.program.cross_island:
            under_way.update(record.program.islands)
        elif record.program.calls:
            calling.update((record.session, island) for island in record.program.islands)
    assert under_way == {island: n for island, n in window.under_way.items() if n}
    assert calling == window.calling, f"launches that call functions: {dict(calling)}, not {window.calling}"
    backlogs = launches.admission.backlogs
    assert backlogs.keys() == launches.sessions.keys()
    waiting = [launches.sessions[session].usage for session, backlog in backlogs.items() for _ in backlog.launches()]
    _check_ledger(launches.ledger, [*(record.usage for record in launches.in_flight.values()), *waiting])
    states = {
        (session, launch.message.launch): launch.state
        for session, backlog in backlogs.items()
        for launch in backlog.launches()
    }
    short = {(session, number) for session, waiting in launches.admission.memory.waiting.items() for number in waiting}
    assert short == {key for key, state in states.items() if state is LaunchState.WAITING_FOR_MEMORY}
    assert window.queued.keys() <= states.keys()


def under_way(launches: Launches) -> set[int]:
    """The numbers of launches without an outcome, those of a controller before among them."""
    inherited = launches.outcomes.inherited.fates
    return {*launches.in_flight, *(sequence for sequence, fate in inherited.items() if fate.runs and fate.is_known)}
