"""Who may use the cluster, and how much of it: the operator's table of tenants.

A tenant is known by its token; each connection with that token is a session of the tenant. What a session makes is its
own; weight, priority and quotas are the tenant's, over all its sessions together.
"""

from __future__ import annotations

import msgspec


class Quota(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a tenant may hold at once; None is no limit but the runtime's own.

    `devices` counts the devices of its virtual slices (a device in two slices counts twice), `device_bytes` the bytes
    its buffers take on devices (a replicated array counts on every device), `launches` those without an outcome,
    `message_bytes` one message to the controller, `nodes` the nodes of one program.
    """

    devices: int | None = None
    device_bytes: int | None = None
    launches: int | None = None
    message_bytes: int | None = None
    nodes: int | None = None


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An entry of the table.

    `weight` is its part of the device time under the policy "share", `priority` its rank under "priority" (higher goes
    first).
    """

    name: str
    weight: float = 1.0
    priority: int = 0
    quota: Quota = Quota()
