"""The slices of a session that comes back to another controller, as its client knows them.

A client has for each of its slices the devices and a tag, which a controller made of both, so its word needs no other
one: the resource manager may have died as well, or know of an exchange whose answer was lost. Arrays lie where the
client knows them. What it has given back meanwhile it may name too; so quotas hold for what the resource manager has
forgotten, as for a new slice. A slice whose island was removed has to move, as it would have under the controller
before.
"""

from __future__ import annotations

import math
from collections.abc import Container

from pathways_ray import limits
from pathways_ray.controller import quotas
from pathways_ray.controller.events import Caller
from pathways_ray.controller.moves import Moves
from pathways_ray.controller.state import HostState
from pathways_ray.controller.tenants import Tenant, operators
from pathways_ray.errors import AuthenticationError, SessionClosed, TooLarge, WireError
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.transport.capabilities import is_resume_tag, is_slice_tag
from pathways_ray.transport.message import VERSION
from pathways_ray.transport.messages import HeldSlice, ResumeSession


def owner_of(request: ResumeSession, caller: Caller, secret: str) -> Tenant:
    """The tenant whose session comes back.

    Raises:
        WireError: the client speaks another version of the protocol.
        AuthenticationError: the session is not of this tenant, or its tag is wrong.
    """
    if request.version != VERSION:
        raise WireError(f"the client speaks protocol version {request.version}, this cluster {VERSION}")
    if isinstance(caller, int):
        raise AuthenticationError("a session is resumed with its tenant's token, and not with the secret of one")
    owner = caller.tenant if caller is not None else operators(request.session)
    if not is_resume_tag(secret, request.session, owner.name, request.resume_tag):
        raise AuthenticationError(f"session {request.session} is not of tenant {owner.name!r}, or its tag is wrong")
    return owner


def check_tags(request: ResumeSession, secret: str) -> None:
    """Raises `AuthenticationError` for a slice that no controller gave to the session on these devices. Nothing else
    looks at them before: they may be made up, and without end."""
    for one in request.slices:
        if not is_slice_tag(secret, request.session, one.placed, one.tag):
            number = one.placed.mesh.id
            text = f"session {request.session} cannot be resumed: it never had slice {number} on these devices"
            raise AuthenticationError(f"{text}, the tag is wrong")


def slices_of(
    request: ResumeSession, owner: Tenant, isolated: str, moves: Moves, known: Container[int]
) -> list[HeldSlice]:
    """The slices of a session that comes back.

    Args:
        isolated: the tenant whose islands they lie on; "" for those of all.
        known: those that the resource manager knows.

    Raises:
        TooLarge: they are more than a session may have.
        QuotaExceeded: they are more than the tenant may have.
        SessionClosed: hosts of theirs have come to another island since, or to that of another tenant.
    """
    slices = {one.placed.mesh.id: one for one in request.slices}
    if len(slices) > limits.MAX_SLICES:
        raise TooLarge(f"a session has up to {limits.MAX_SLICES} slices, and not {len(slices)}")
    wholes = {number: set(one.placed.devices) for number, one in slices.items() if not one.within}
    parts = {n: s.within for n, s in slices.items() if wholes.get(s.within, set()) >= set(s.placed.devices)}
    launches, hosts = moves.launches, moves.launches.hosts
    if any(number not in known for number in slices):
        asked = sum(one.placed.mesh.size for number, one in slices.items() if number not in parts)
        quotas.enforce(quotas.devices(owner, asked, launches.sessions.values()))
    for number, one in slices.items():
        if any(_is_of_others(hosts[host], one.placed, isolated) for host in one.placed.hosts if host in hosts):
            text = f"hosts of its slice {number} are not on island {one.placed.island} any more, or not its tenant's"
            raise SessionClosed(f"session {request.session} cannot be resumed: {text}")
    there = {host.island for host in hosts.values()} | launches.tables.schedulers
    for placed in [one.placed for one in slices.values()]:
        absent = [host for host in placed.hosts if host not in hosts]
        launches.membership.expect({placed.island: absent})
        if placed.island not in there:
            moves.unheard.add(placed.island)
            for host in absent:
                hosts[host].down_since = -math.inf  # nobody waits for it
    return [HeldSlice(request.session, slices[n].placed, slices[n].name[:256], parts.get(n, 0)) for n in sorted(slices)]


def _is_of_others(host: HostState, placed: PlacedSlice, isolated: str) -> bool:
    """Whether a host has another island than a slice there, or serves another tenant than the `isolated` one."""
    return host.island != placed.island or (host.info is not None and host.info.tenant != isolated)
