"""Clients at the controller: sessions that open and close, and their channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from pathways_ray.controller import events
from pathways_ray.controller.channel import Channel, ChannelEvent, ChannelState
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import check_functions
from pathways_ray.controller.registrar import Registrar
from pathways_ray.controller.registration import Registration, TenantFunctions
from pathways_ray.controller.state import SendClient
from pathways_ray.controller.tenants import GONE, Tenant, TenantBook
from pathways_ray.controller.turns import Turns
from pathways_ray.errors import WireError
from pathways_ray.story import Entry
from pathways_ray.transport.capabilities import authorised, session_of
from pathways_ray.transport.messages import SessionEnded

STREAM_LIMIT_S = 20.0
"""A session whose stream does not come within this time is closed."""


@dataclass(slots=True)
class Client:
    """The client of a session: its name, tenant, secret, channel, and the functions it has sent.

    `token` is the digest of the tenant's token, or "" for the operator's; `opened` is the time of its first request;
    `reading` is False while messages of it wait here.
    """

    session: int
    name: str
    tenant: Tenant
    token: str
    secret: str
    opened: float
    registration: Registration
    reading: bool = True
    channel: Channel = field(default_factory=Channel)


class Clients:
    """All clients, by the number of their session.

    Args:
        fusion: whether programs are fused when they are planned.
        sessions_made: sessions are numbered from the next number on.
        check: raises for functions that are not what their names say.
    """

    def __init__(
        self,
        launches: Launches,
        fusion: bool,
        sessions_made: int = 0,
        check: Callable[[Mapping[str, bytes]], None] = check_functions,
    ) -> None:
        self.launches = launches
        self.sessions_made = sessions_made
        self.known: dict[int, Client] = {}
        self.turns = Turns()
        self.functions = WeakValueDictionary[str, TenantFunctions]()
        """Those of each tenant, as long as it has a session."""
        self.registrar = Registrar(launches, self.turns, fusion, check)

    # --- opening and closing ------------------------------------------------------------------------------------------

    def open(
        self, name: str, tenant: Tenant, token: str, secret: str, now: float, number: int = 0
    ) -> tuple[Client, list[events.Command]]:
        """Opens the next session for a tenant, or number `number` again; messages are kept until its stream comes."""
        self.sessions_made += not number
        number = number or self.sessions_made
        registration = Registration(self.functions.setdefault(tenant.name, TenantFunctions()))
        client = self.known[number] = Client(number, name, tenant, token, secret, now, registration)
        return client, [events.OpenChannel(number), *self.launches.open_session(number, tenant)]

    def close(self, session: int, *, at_once: bool = True) -> list[events.Command]:
        """Closes a session and frees what it holds; nothing happens for one that is closed."""
        client = self.known.pop(session, None)
        if client is None:
            return []
        if client.channel.state is not ChannelState.CLOSED:
            client.channel.apply(ChannelEvent.SESSION_CLOSED)
        self.turns.forget(session)
        self.registrar.plans.forget(session)
        client.registration.close()
        return [
            *self.launches.close_session(session),
            events.CallManager("release_session", (session,)),
            events.CloseChannel(session, at_once),
        ]

    def end(self, client: Client, reason: str) -> list[events.Command]:
        """Closes a session from this side; its client hears why."""
        now = self.launches.tables.now
        self.launches.story.note(Entry(now, "session ended", cause=reason[:500], session=client.session))
        return [SendClient(client.session, SessionEnded(reason)), *self.close(client.session)]

    def expire(self, now: float) -> list[events.Command]:
        """Closes sessions whose stream did not come."""
        commands: list[events.Command] = []
        for client in list(self.known.values()):
            if client.channel.state is ChannelState.OPENED and now - client.opened > STREAM_LIMIT_S:
                commands += self.end(client, f"the stream of the session did not come within {STREAM_LIMIT_S:.0f} s")
        return commands

    def tenants_read(self, book: TenantBook) -> list[events.Command]:
        """The table of tenants changed: sessions whose tenant has left it end, the others have its new values."""
        known = {digest: tenant for tenant, digest in book.entries}
        commands: list[events.Command] = []
        changed: dict[str, Tenant] = {}
        for client in list(self.known.values()):
            if not client.token:
                continue
            tenant = known.get(client.token)
            if tenant is None or tenant.name != client.tenant.name:
                commands += self.end(client, f"tenant {client.tenant.name!r} {GONE}")
            elif client.tenant.trusted and not tenant.trusted:
                # What it has registered was checked as a trusted tenant's.
                commands += self.end(client, f"tenant {tenant.name!r} is not trusted any more")
            elif tenant != client.tenant:
                client.tenant = changed[tenant.name] = tenant
        # For all sessions of a tenant at once: for each of them, all would be told again.
        return [*commands, *(command for tenant in changed.values() for command in self.launches.set_tenant(tenant))]

    # --- the channel --------------------------------------------------------------------------------------------------

    def find(self, metadata: Mapping[str, str], secret: Callable[[Client], str]) -> Client | None:
        """The client that a connection names, if the connection shows its `secret`."""
        client = self.known.get(session_of(dict(metadata)))
        if client is None or not authorised(dict(metadata), secret(client)):
            return None
        return client

    def connection_changed(
        self, event: events.StreamOpened | events.StreamEnded | events.LinkOpened | events.LinkEnded, now: float
    ) -> list[events.Command]:
        """A connection of a client came or went; news of a session that is closed changes nothing."""
        client = self.known.get(event.session)
        if client is None:
            return []
        change = _CHANGES[type(event)]
        try:
            client.channel.apply(change)
        except WireError as error:
            return self.end(client, str(error))
        if client.channel.state is not ChannelState.CLOSED:
            return []
        self.launches.story.note(Entry(now, "client gone", cause=change, session=client.session))
        return self.close(client.session)

    def garbled(self, event: events.ClientGarbled, now: float) -> list[events.Command]:
        client = self.known.get(event.session)
        return self.end(client, event.reason) if client is not None else []


_CHANGES: dict[type, ChannelEvent] = {
    events.StreamOpened: ChannelEvent.STREAM_OPENED,
    events.StreamEnded: ChannelEvent.STREAM_ENDED,
    events.LinkOpened: ChannelEvent.LINK_OPENED,
    events.LinkEnded: ChannelEvent.LINK_ENDED,
}
