"""Looks: the controller explains why something waits, with the help of the islands that can tell more."""

from __future__ import annotations

import json
from typing import Any

from pathways_ray.controller.events import AnswerCall, CallManager, Command
from pathways_ray.controller.looks import ALL_AGE_S, LOOK_LIMIT_S, MAX_LOOKS, STATUS_LIMIT_S
from pathways_ray.controller.preemption import Way
from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.tenants import Tenant
from pathways_ray.observe import views
from pathways_ray.observe.views import Dispatched, IslandView, Place
from pathways_ray.observe.why import WHY, Why
from pathways_ray.transport.messages import (
    Accepted,
    DrainIsland,
    HostDown,
    Inspect,
    Inspected,
    Launch,
    LiftRefusal,
    Look,
    Put,
    Ready,
    Refused,
    StatusReply,
    Suspend,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, of, reply
from tests.unit.controller.harness import program_over
from tests.unit.helpers import VECTOR

ALICE, BOB = Tenant("alice"), Tenant("bob")


def cluster(*slices: int, ready: bool = True) -> CoreHarness:
    """Two sessions, of alice and bob, with a program on these slices that takes an array of the first one."""
    made = CoreHarness(hosts=True)
    for number, tenant in ((1, ALICE), (2, BOB)):
        made.open_session(tenant)
        made.core.clients.known[number].token = f"token of {tenant.name}"
        made.hold_slices(number)
        program = program_over(*slices, key=number, session=number)
        made.core.launches.register(number, 1, program)
        for host in program.hosts if ready else ():
            made.core.launches.ready(Ready(host, number, 0))
    return made


def launch(made: CoreHarness, session: int, number: int, argument: int) -> None:
    made.core.launches.admission.call(
        made.core.launches.sessions[session], Launch(number, 1, (argument,), 1000 * number)
    )


def put(made: CoreHarness, session: int, buffer: int, slice: int = 1) -> None:
    made.core.launches.admission.call(made.core.launches.sessions[session], Put(buffer, slice, VECTOR, ()))
    made.core.launches.sessions[session].arriving.pop(buffer, None)


def ask(made: CoreHarness, subject: str, number: int = 0, of: int = 0, viewer: Any = None) -> list[Command]:
    session = viewer if isinstance(viewer, int) else 0
    return made.request(viewer, Look(session, subject, number, of))


def answer(commands: list[Command]) -> Why:
    found = reply(commands)
    assert isinstance(found, StatusReply), found
    return WHY.decode(found.text)


def asked(commands: list[Command]) -> dict[int, Inspect]:
    return {c.island: c.message for c in commands if isinstance(c, SendIsland) and isinstance(c.message, Inspect)}


def test_the_islands_of_a_launch_are_asked_and_the_chain_goes_on_with_their_views() -> None:
    """1. Bob's launch has island 0, alice's waits. 2. The operator asks: island 0 is asked for the place. 3. It names
    bob's launch; the answer has both. 4. Alice learns of her own only."""
    made = cluster(1)
    put(made, 2, 1)
    put(made, 1, 1)
    launch(made, 2, 7, 1)
    launch(made, 1, 12, 1)
    sent = Dispatched(1, 2, "bob", "1", 1.5, (0,), ("0.0", "0.1"))
    view = IslandView(0, (0, 1), (), (sent,), places=(Place(2, 1, 1),))
    commands = ask(made, "launch", 2)
    (inspect,) = asked(commands).values()
    assert inspect.launches == (2,)
    found = answer(made.from_island(0, Inspected(inspect.look, 0, views.encode(view))))
    assert [link.launch for link in found.links] == [2, 1]
    assert "place 2 in the order of island 0, behind launch 1 of program '1' (bob)" in found.links[0].text
    assert "is first on devices 0.0 0.1, and host 0 has not reported its end; it was sent" in found.links[1].text
    assert found.links[1].age_s == 1.5
    (inspect,) = asked(ask(made, "launch", 12, 1, viewer=1)).values()
    text = str(answer(made.from_island(0, Inspected(inspect.look, 0, views.encode(view)))))
    assert "behind a launch of another tenant" in text
    assert "bob" not in text


def test_a_tenant_cannot_ask_for_what_is_anothers() -> None:
    made = cluster(1)
    put(made, 2, 1)
    launch(made, 2, 7, 1)
    assert isinstance(reply(ask(made, "launch", 7, 2, viewer=1)), Refused)
    assert isinstance(reply(ask(made, "session", 0, 2, viewer=ALICE)), Refused)
    assert str(answer(ask(made, "launch", 1, viewer=1))) == "launch 1 is over, or has not come to the controller"


def test_a_tenant_may_ask_without_a_session() -> None:
    made = cluster(1)
    assert str(answer(ask(made, "session", 0, 1, viewer=ALICE))) == "session 1 waits for nothing"
    assert isinstance(reply(made.request(ALICE, LiftRefusal(0, "x"))), Refused)


def test_a_launch_whose_host_is_away_needs_nobody_else() -> None:
    made = cluster(1)
    made.from_island(0, HostDown(0, 1, "killed"))
    put(made, 1, 1)
    launch(made, 1, 3, 1)
    made.now = 2.0
    made.core.launches.tables.now = 2.0
    text = "launch 1.3 of program '1' (alice) waits for host 0 to come back, for 2.0 s"
    assert str(answer(ask(made, "launch", 3, 1))) == text


def test_a_launch_behind_an_upload_says_how_much_of_it_has_come() -> None:
    made = cluster(1)
    made.core.launches.admission.call(made.core.launches.sessions[1], Put(1, 1, VECTOR, ()))
    launch(made, 1, 3, 1)
    (inspect,) = asked(ask(made, "launch", 3, 1)).values()
    arriving = views.ArrivingAt(0, views.Arriving(1, 1, 40, 64))
    view = IslandView(0, (0, 1), uploads=(arriving,))
    found = answer(made.from_island(0, Inspected(inspect.look, 0, views.encode(view))))
    assert "waits for an upload of" in found.links[0].text
    assert found.links[1].text == "host 0 has 40 bytes of the 64 bytes of array 1"
    (inspect,) = asked(ask(made, "upload", 1, 1)).values()
    found = answer(made.from_island(0, Inspected(inspect.look, 0, views.encode(view))))
    assert [link.text for link in found.links] == ["host 0 has 40 bytes of the 64 bytes of array 1"]


def test_a_launch_that_waits_for_its_compiler_says_which_host_compiles() -> None:
    made = cluster(1, ready=False)
    put(made, 1, 1)
    launch(made, 1, 3, 1)
    (inspect,) = asked(ask(made, "launch", 3, 1)).values()
    view = IslandView(0, (0, 1), compiling=(views.Compiling(0, 1, "1", 9.0),))
    found = answer(made.from_island(0, Inspected(inspect.look, 0, views.encode(view))))
    assert found.links[0].text.endswith("waits for its program: host 0 compiles '1', for 9.0 s")


def test_a_scheduler_that_does_not_answer_is_named_within_the_limit() -> None:
    made = cluster(1)
    put(made, 1, 1)
    launch(made, 1, 3, 1)
    commands = ask(made, "launch", 3, 1)
    assert asked(commands)
    found = answer(made.tick(made.now + LOOK_LIMIT_S))
    assert found.story == ("the scheduler of island 0 did not say in 1 s",)
    assert not made.core.requests.looks.gatherings


def test_looks_beyond_the_limit_go_without_the_islands() -> None:
    made = cluster(1)
    put(made, 1, 1)
    launch(made, 1, 3, 1)
    for _ in range(MAX_LOOKS):
        assert asked(ask(made, "launch", 3, 1))
    assert "island 0" in answer(ask(made, "launch", 3, 1)).story[0]


def test_a_slice_says_who_is_on_its_devices() -> None:
    made = cluster(1)
    (inspect,) = asked(ask(made, "slice", 1, 1)).values()
    sent = Dispatched(9, 2, "bob", "step", 1.5, (0,), ("0.0",))
    queue = views.Queue(1, "alice", 2, 10, "double", 0.5, ("0.0",))
    view = IslandView(0, (0, 1), (), (sent,), (queue,))
    found = answer(made.from_island(0, Inspected(inspect.look, 0, views.encode(view))))
    assert [link.text for link in found.links] == [
        "slice 1.1 is on island 0, devices 0.0 0.1",
        "launch 9 of program 'step' (bob) is on them, for 1.5 s",
        "2 launches of 1 sessions wait for them",
    ]
    assert "no slice 99" in str(answer(ask(made, "slice", 99, 1)))


def test_a_suspended_session_and_an_island_that_is_drained_are_said() -> None:
    """1. Alice's session has a slice on island 0, which is drained: the slice has to leave it. 2. The session is
    suspended: it says so, and has no slice. 3. It is resumed; the log has both."""
    made = cluster(1)
    placed = made.core.launches.sessions[1].slices[1]
    assert str(answer(ask(made, "session", 0, 1))) == "session 1 waits for nothing"
    made.answered(made.request(None, DrainIsland(0, 0, 60.0)), encode(Accepted()))
    text = "has to leave island 0, which is drained: its client moves it when it finds room"
    assert f"slice 1.1 {text}" in str(answer(ask(made, "session", 0, 1)))
    (inspect,) = asked(ask(made, "slice", 1, 1)).values()
    found = answer(made.from_island(0, Inspected(inspect.look, 0, views.encode(IslandView(0, (0, 1))))))
    assert [link.text for link in found.links][1:] == [f"it {text}", "nothing waits for it and nothing runs on it"]
    for _ in range(2):  # the second time as its client begins to resume it
        made.answered(made.request(1, Suspend(1)), 1)
    assert str(answer(ask(made, "session", 0, 1))) == "session 1 is suspended, until its client resumes it"
    made.core.launches.preemption.giving[1] = Way(2, 0.0, {}, 0.0, away=True)
    for viewer, other in ((None, "session 2"), (ALICE, "one of another tenant")):
        found = answer(ask(made, "session", 0, 1, viewer=viewer))
        assert str(found) == f"session 1 is suspended, for {other}, until its turn comes"
    assert "has no slice 1 while it is suspended" in str(answer(ask(made, "slice", 1, 1)))
    made.core.launches.add_slice(1, placed)
    assert "waits for nothing" not in str(answer(ask(made, "session", 0, 1)))
    events = [entry.event for entry in made.core.launches.story.lifecycle if entry.session == 1]
    assert [event for event in events if event.startswith("session") and event != "session opened"] == [
        "session suspended",
        "session resumed",
    ]


def test_an_unknown_subject_is_refused() -> None:
    assert isinstance(reply(ask(cluster(1), "weather")), Refused)


# --- everything -------------------------------------------------------------------------------------------------------

STATUS = '{"islands": [], "slices": []}'


def look(made: CoreHarness, viewer: Any = None) -> list[Command]:
    return ask(made, "all", viewer=viewer)


def gathered(made: CoreHarness, commands: list[Command]) -> list[Command]:
    """The resource manager answers, and then the islands."""
    commands = made.answered(commands, STATUS)
    found: list[Command] = []
    for island, inspect in asked(commands).items():
        sent = Dispatched(9, 2, "bob", "step", 1.5, (0,), ("0.0",))
        view = IslandView(island, (0,), (), (sent,) if not island else ())
        found += made.from_island(island, Inspected(inspect.look, island, views.encode(view)))
    return found


def test_everything_is_the_status_the_islands_and_the_controllers_own() -> None:
    made = cluster(1)
    (answer,) = of(AnswerCall, gathered(made, look(made)))
    assert isinstance(answer.reply, StatusReply)
    found = json.loads(answer.reply.text)
    assert set(found) == {"status", "islands", "overview"}
    assert set(found["islands"]) == {"0", "1", "2"}
    assert [tenant["tenant"] for tenant in found["status"]["tenants"]] == ["alice", "bob"]
    assert found["islands"]["0"]["dispatched"][0]["program"] == "step"


def test_all_who_look_share_one_gathering_which_is_told_again_for_a_moment() -> None:
    """1. Three look: the islands are asked once, all get the answer. 2. A fourth gets it at once. 3. Later it is made
    again."""
    made = cluster(1)
    commands = look(made)
    assert look(made) == look(made) == []
    answers = of(AnswerCall, gathered(made, commands))
    assert len(answers) == 3
    assert len({answer.call for answer in answers}) == 3
    assert reply(look(made)) == answers[0].reply
    made.now += ALL_AGE_S + 0.1
    assert of(CallManager, look(made))


def test_a_tenant_looks_at_its_own() -> None:
    made = cluster(1)
    (answer,) = of(AnswerCall, gathered(made, look(made, ALICE)))
    assert isinstance(answer.reply, StatusReply)
    for word in ("bob", "step"):
        assert word not in answer.reply.text
    assert json.loads(answer.reply.text)["islands"]["0"]["dispatched"][0]["tenant"] == "another tenant"


def test_a_look_ends_without_islands_and_manager_that_do_not_answer() -> None:
    made = cluster(1)
    commands = made.answered(look(made), RuntimeError("gone"))
    assert set(asked(commands)) == {0, 1, 2}
    (inspect, *_) = asked(commands).values()
    made.from_island(0, Inspected(inspect.look, 0, views.encode(IslandView(0, (0,)))))
    found = reply(made.tick(made.now + LOOK_LIMIT_S))
    assert isinstance(found, StatusReply)
    assert json.loads(found.text)["status"] is None
    assert set(json.loads(found.text)["islands"]) == {"0"}


def test_a_look_goes_on_without_a_manager_that_says_nothing() -> None:
    """1. The resource manager says nothing: the look goes on without it, while who asked still waits. 2. What it says
    too late counts no more. 3. A further look asks it again."""
    made = cluster(1)
    began, commands = made.now, look(made)
    assert not asked(made.tick(began + STATUS_LIMIT_S - 0.1))
    found = made.tick(began + STATUS_LIMIT_S)
    assert set(asked(found)) == {0, 1, 2}
    assert made.answered(commands, STATUS) == []
    answer = reply(made.tick(made.now + LOOK_LIMIT_S))
    assert isinstance(answer, StatusReply)
    assert json.loads(answer.text)["status"] is None
    made.now += ALL_AGE_S + 0.1
    (answered,) = of(AnswerCall, gathered(made, look(made)))
    assert isinstance(answered.reply, StatusReply)
    assert json.loads(answered.reply.text)["status"]
