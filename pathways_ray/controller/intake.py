"""Intake of what clients say: their messages take effect, in turns.

A session has `TURN_WORK` at a time, then the next one that waits has its turn. What a client called waits in its inbox
(`Turns`) meanwhile, and for as long as something holds it (`Hold`): its program is planned, its backlog is full, or the
link to an island is. Such a client is not read.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from pathways_ray.controller import events, quotas
from pathways_ray.controller.channel import ChannelEvent
from pathways_ray.controller.clients import Client, Clients
from pathways_ray.controller.programs import BufferType
from pathways_ray.controller.turns import TURN_WORK, Hold, work_of, work_of_launch
from pathways_ray.errors import PathwaysError, WireError
from pathways_ray.transport import batcher
from pathways_ray.transport.messages import (
    Cancel,
    Free,
    Launch,
    Put,
    Register,
    ToController,
    Unregister,
    inline_bytes,
)


class Intake:
    """Works off the messages of all clients."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.launches = clients.launches
        self.turns = clients.turns

    def messages(self, event: events.ClientMessages, now: float) -> list[events.Command]:
        """Messages of a client, in order. One that is out of order, too big or trips this process ends its session."""
        client = self.clients.known.get(event.session)
        if client is None:
            return []
        try:
            client.channel.check_carrier(event.carrier)
            if client.tenant.quota.message_bytes is not None:
                self._check_size(client, event.size, event.messages)
        except PathwaysError as error:
            return self.clients.end(client, str(error))
        if self.turns.put(event.session, event.messages):
            return []
        return self._work_off(client, event.messages)

    def turn(self, event: events.Turn, now: float) -> list[events.Command]:
        """The next session that waits has its turn."""
        self.turns.called = False
        found = self.turns.next()
        if found is None:
            return []
        session, messages = found
        return self._work_off(self.clients.known[session], messages)

    def _work_off(self, client: Client, messages: Sequence[ToController]) -> list[events.Command]:
        """Works off messages until the session's turn is over, or something holds the rest."""
        commands: list[events.Command] = []
        session = self.launches.sessions[client.session]
        take, backlog = self.launches.admission.call, self.launches.admission.backlogs[client.session]
        alike: dict[BufferType, Mapping[int, int]] = {}
        left, taken, hold = TURN_WORK, 0, None
        try:
            for message in messages:
                if isinstance(message, Launch):
                    program = session.programs.get(message.program)
                    looks = backlog.looks(message) if backlog.waiting else 0
                    left -= work_of_launch(message, program.result_count if program is not None else 0, looks)
                    commands += take(session, message)
                elif isinstance(message, Free):
                    left -= work_of(message)
                    commands += take(session, message)
                elif isinstance(message, Put):
                    left -= 1
                    commands += self.launches.admission.put(session, message, alike)
                elif isinstance(message, Register):
                    if self.clients.registrar.islands_full:
                        hold = Hold.ISLAND
                        break
                    left -= work_of(message)
                    made, hold = self.clients.registrar.register(client.registration, session, message)
                    commands += made
                elif isinstance(message, Unregister):
                    left -= work_of(message)
                    commands += take(session, Unregister(message.program))  # without names, where it has to wait
                    client.registration.let_go(session, message.functions)
                elif isinstance(message, Cancel):
                    left -= work_of(message)
                    commands += self.launches.cancellation.cancel(session, message)
                else:  # it is an `Upgrade`
                    commands += self._upgrade(client, is_last=taken + 1 == len(messages))
                taken += 1
                if backlog.waiting and backlog.is_over():
                    backlog.full = True
                    hold = Hold.BACKLOG
                if left <= 0 or hold is not None:
                    break
        except PathwaysError as error:
            return commands + self.clients.end(client, str(error))
        except Exception as error:  # it must not end the controller, and with it the sessions of others
            commands.append(events.ReportFault(traceback.format_exc()))
            return commands + self.clients.end(
                client, f"internal error of the controller: {type(error).__name__}: {error}"
            )
        if hold is not None or taken < len(messages):
            self.turns.wait(client.session, deque(islice(messages, taken, None)), hold)
            if client.reading:
                client.reading = False
                commands.append(events.PauseReading(client.session))
        elif not client.reading:
            client.reading = True
            commands.append(events.ResumeReading(client.session))
        return commands

    def after(self) -> list[events.Command]:
        """Lets sessions go on whose backlog an event has emptied, and asks for the next turn."""
        for session in self.launches.admission.relieved:
            self.turns.release(session, Hold.BACKLOG)
        self.launches.admission.relieved.clear()
        return [events.TakeTurn()] if self.turns.call() else []

    def _upgrade(self, client: Client, is_last: bool) -> list[events.Command]:
        client.channel.apply(ChannelEvent.UPGRADE)
        if not is_last:
            raise WireError("messages by the stream after the upgrade")
        return [events.SwitchToLink(client.session)]

    def _check_size(self, client: Client, size: int, messages: list[ToController]) -> None:
        """Raises `QuotaExceeded` for a batch over the tenant's quota of bytes. Many small messages that were gathered
        into one are fine, a program is refused by itself, and what launches carry is not counted: it has a limit of its
        own."""
        small = len(messages) > 1 and size <= batcher.MAX_BATCH_BYTES + len(messages)
        if not small and not any(isinstance(message, Register) for message in messages):
            carried = sum(inline_bytes(message) for message in messages if isinstance(message, Launch))
            quotas.enforce(quotas.message_bytes(client.tenant, size - carried, "a message"))
