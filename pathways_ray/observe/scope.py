"""The scope of a tenant: views without the names and numbers of others."""

from __future__ import annotations

import msgspec

from pathways_ray.observe.views import IslandView, Running, StoppedOn

OTHER = "another tenant"
"""The name of every other tenant, as a tenant sees it."""


def for_tenant(view: IslandView, mine: frozenset[int]) -> IslandView:
    """An island as a tenant may see it: its own launches, and that others have some.

    Args:
        mine: the tenant's sessions.
    """
    own = {one.sequence for one in view.dispatched if one.session in mine}
    dispatched = tuple(
        one
        if one.session in mine
        else msgspec.structs.replace(one, sequence=0, session=0, tenant=OTHER, program="", failure="")
        for one in view.dispatched
    )
    queues = tuple(
        one if one.session in mine else msgspec.structs.replace(one, session=0, tenant=OTHER, head=0, program="")
        for one in view.queues
    )
    return msgspec.structs.replace(
        view,
        dispatched=dispatched,
        queues=queues,
        places=tuple(one for one in view.places if one.sequence in own),
        running=tuple(one if one.sequence in own else Running(one.host, 0, one.seconds) for one in view.running),
        compiling=(),
        stopped=tuple(StoppedOn(one.host, one.launch) for one in view.stopped if one.launch.sequence in own),
        uploads=tuple(one for one in view.uploads if one.upload.session in mine),
        story=(),
    )
