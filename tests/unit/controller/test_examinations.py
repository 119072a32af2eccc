"""Examinations: a client asks what its program was compiled to, and the hosts that compiled it say."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.controller import examinations
from pathways_ray.controller.events import Command
from pathways_ray.controller.examinations import EXAMINE_LIMIT_S, MAX_TENANT_EXAMINATIONS
from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.observe.computations import REPORT, REPORTS, Computation, Report, each_once, total_cost
from pathways_ray.transport.messages import Examine, Examined, Look, Ready, Refused, StatusReply
from tests.unit.controller.core_harness import CoreHarness, reply
from tests.unit.controller.harness import program_over

ALICE, BOB = Tenant("alice"), Tenant("bob")


def cluster(*slices: int) -> tuple[CoreHarness, frozenset[int]]:
    """Sessions of alice and bob; alice's has a program on these slices, which all hosts have compiled."""
    made = CoreHarness(hosts=True)
    for number, tenant in ((1, ALICE), (2, BOB)):
        made.open_session(tenant)
        made.core.clients.known[number].token = f"token of {tenant.name}"
        made.hold_slices(number)
    program = program_over(*slices, key=9, session=1)
    made.core.launches.register(1, 1, program)
    for host in program.hosts:
        made.core.launches.ready(Ready(host, 9, 0))
    return made, program.hosts


def asked(commands: list[Command]) -> list[Examine]:
    return [c.message for c in commands if isinstance(c, SendIsland) and isinstance(c.message, Examine)]


def answers(made: CoreHarness, examine: Examine, hosts: Any) -> list[Command]:
    commands: list[Command] = []
    for host in hosts:
        report = Report(9, host, (Computation(0, "f", 1, {"flops": 2.0}),))
        commands += made.from_island(0, Examined(examine.look, host, 9, REPORT.encode(report)))
    return commands


def test_the_reports_of_all_hosts_are_the_answer() -> None:
    made, hosts = cluster(1, 2)
    examines = asked(made.request(1, Look(1, "code", 1, 1)))
    assert {(e.program, e.tenant, e.text) for e in examines} == {(9, "alice", True)}
    *some, last = sorted(hosts)
    assert some, "several hosts are needed here"
    assert not answers(made, examines[0], some)
    said = reply(answers(made, examines[0], [last]))
    assert isinstance(said, StatusReply)
    found = each_once(REPORTS.decode(said.text))
    assert total_cost(found) == {"flops": 2.0 * len(hosts)}
    assert not answers(made, examines[0], [last])  # again


def test_a_host_that_does_not_answer_is_left_out() -> None:
    made, hosts = cluster(1, 2)
    (examine, *_) = asked(made.request(1, Look(1, "computations", 1, 1)))
    answers(made, examine, sorted(hosts)[:1])
    made.tick(EXAMINE_LIMIT_S - 1.0)
    said = reply(made.tick(EXAMINE_LIMIT_S))
    assert isinstance(said, StatusReply)
    assert len(REPORTS.decode(said.text)) == 1
    made.from_island(0, Examined(examine.look, max(hosts), 9, b"[]"))  # too late


def test_what_cannot_be_asked() -> None:
    made, _ = cluster(1)
    for caller, look in ((2, Look(2, "code", 1, 1)), (1, Look(1, "code", 7, 1)), (1, Look(1, "code", 1, 0))):
        assert isinstance(reply(made.request(caller, look)), Refused), look
    made.core.launches.ready(Ready(0, 9, 0, Failure("CompileError", "no")))
    refused = reply(made.request(1, Look(1, "code", 1, 1)))
    assert isinstance(refused, Refused)
    assert refused.failure.message == "no"


def test_a_tenant_does_not_take_the_places_of_all() -> None:
    made, hosts = cluster(1)
    code = Look(1, "code", 1, 1)
    first = [asked(made.request(1, code)) for _ in range(MAX_TENANT_EXAMINATIONS)]
    refused = reply(made.request(1, code))
    assert isinstance(refused, Refused)
    assert "tenant 'alice'" in refused.failure.message
    made.core.launches.register(2, 1, program_over(1, key=10, session=2))
    for host in hosts:
        made.core.launches.ready(Ready(host, 10, 0))
    assert asked(made.request(2, Look(2, "code", 1, 2))), "another tenant"
    answers(made, first[0][0], hosts)
    assert asked(made.request(1, code)), "one has its answer"


def test_reports_of_all_examinations_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wait for the last of their hosts. What the first keeps leaves no room for the second, until it is told."""
    monkeypatch.setattr(examinations, "MAX_KEPT_BYTES", 15)
    made, hosts = cluster(1, 2)
    some, last = sorted(hosts)
    one, other, third = (asked(made.request(1, Look(1, "code", 1, 1)))[0].look for _ in range(3))
    report = b"[1,2,3,4]"
    assert not made.from_island(0, Examined(one, some, 9, report))
    refused = reply(made.from_island(0, Examined(other, some, 9, report)))
    assert isinstance(refused, Refused)
    assert refused.failure.kind == "UsageError"
    assert not made.from_island(0, Examined(other, last, 9, report)), "it was answered"
    said = reply(made.from_island(0, Examined(one, last, 9, b"")))
    assert said == StatusReply("[[1,2,3,4]]")
    assert not made.from_island(0, Examined(third, some, 9, report)), "there is room again"
