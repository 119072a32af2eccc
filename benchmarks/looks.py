"""The controller's CPU time for a look at everything, in a large runtime whose hosts are simulated.

The cores are those of the runtime, as in `benchmarks.scale`: 64 islands of 8 hosts, 100 sessions, launches in flight on
every island. What schedulers and the resource manager do for the look is theirs, and not counted.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from benchmarks.scale.controlplane import ControlPlane, Shape
from pathways_ray.controller import events
from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.tenants import Tenant
from pathways_ray.scheduler import events as to_scheduler
from pathways_ray.transport import messages as wire

HOSTS, PER_ISLAND, SESSIONS, TENANTS, FLYING = 512, 8, 100, 7, 640


def measured(looks: int) -> list[float]:
    """Milliseconds of each look, after one to warm up."""

    async def main() -> list[float]:
        plane = ControlPlane(Shape(HOSTS, PER_ISLAND))
        try:
            clients = plane.controller.clients
            for number in range(SESSIONS - 1):
                name = f"tenant {number % TENANTS}"
                clients.open(f"client {number}", Tenant(name), "", "", time.monotonic())
            await plane.admit(FLYING)
            status = json.dumps(_status(plane))
            now = time.monotonic()
            return [_look(plane, call, now + call, status) for call in range(1, looks + 2)][1:]
        finally:
            plane.close()

    return asyncio.run(main())


def _look(plane: ControlPlane, call: int, now: float, status: str) -> float:
    """One look, a second after the one before."""
    spent = 0.0

    def handle(event: events.Event) -> list[events.Command]:
        nonlocal spent
        began = time.thread_time()
        commands = plane.controller.handle(event, now)
        spent += time.thread_time() - began
        return commands

    (asked,) = handle(events.Requested(call, None, wire.Look(0, "all"), 30, ""))
    assert isinstance(asked, events.CallManager)
    answers: list[events.Command] = []
    for command in handle(events.ManagerAnswered(asked.call, status)):
        assert isinstance(command, SendIsland)
        scheduler = plane.islands[command.island].scheduler.core
        (said,) = scheduler.handle(to_scheduler.ControllerMessage(command.message), now)
        assert isinstance(said, to_scheduler.ToController)
        answers += handle(events.IslandMessages(command.island, command.island, [said.message]))
    (answer,) = answers
    assert isinstance(answer, events.AnswerCall)
    assert isinstance(answer.reply, wire.StatusReply)
    if len(json.loads(answer.reply.text)["islands"]) != HOSTS // PER_ISLAND:
        raise AssertionError("an island is missing in the look")
    return 1e3 * spent


def _status(plane: ControlPlane) -> dict[str, Any]:
    """The resource manager's part of a status."""
    devices = plane.shape.devices_per_host
    return {
        "islands": [
            {
                "island": island,
                "platform": "cpu",
                "tenant": "",
                "shares": None,
                "state": "up",
                "hosts": [
                    {
                        "host": host,
                        "node": "0" * 56,
                        "pid": 1000 + host,
                        "epoch": 1,
                        "up": True,
                        "devices": [
                            {"device": f"{host}.{k}", "slices": [f"session {host % SESSIONS}: slice {k}"]}
                            for k in range(devices)
                        ],
                    }
                    for host in range(island * PER_ISLAND, (island + 1) * PER_ISLAND)
                ],
            }
            for island in range(HOSTS // PER_ISLAND)
        ],
        "slices": [],
    }
