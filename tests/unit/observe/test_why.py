"""Why something is not ready: chains out of views, each link a reason."""

from __future__ import annotations

import msgspec

from pathways_ray.observe import views
from pathways_ray.observe.views import Dispatched, IslandView, LaunchView, Place, Stopped, StoppedOn
from pathways_ray.observe.why import MAX_LINKS, Why, bytes_text, chain_text, explain

ALICE = LaunchView(1, "alice", 12, 812, "double", 5, "in flight", 3.0, (0,))
BOB = LaunchView(2, "bob", 3, 640, "step", 6, "in flight", 9.0, (0, 1))


def chain(
    subject: LaunchView, *islands: IslandView, others: tuple[LaunchView, ...] = (BOB, ALICE), viewer: str = ""
) -> tuple[str, ...]:
    return tuple(link.text for link in explained(subject, *islands, others=others, viewer=viewer).links)


def explained(subject, *islands, others=(BOB, ALICE), viewer=""):
    def find(session: int, number: int) -> LaunchView | None:
        known = (one for one in others if (one.session, one.launch) == (session, number) or one.sequence == number != 0)
        return next((one for one in known if not session or one.session == session), None)

    return explain(subject, find, {view.island: view for view in islands}, viewer)


def sent(launch: LaunchView, *hosts: int, devices: tuple[str, ...] = ("0.0",), age_s: float = 1.2) -> Dispatched:
    return Dispatched(launch.sequence, launch.session, launch.tenant, launch.program, age_s, hosts, devices)


BEHIND = IslandView(0, (0,), (), (sent(BOB, 0),), places=(Place(812, 2, 640),))


def test_the_chain_of_a_launch_behind_another_tenants_that_waits_for_data_of_a_host_that_is_late() -> None:
    """Alice's launch is behind bob's, which waits on island 0 for data of host 5, where island 1 runs bob's part."""
    there = IslandView(1, (5,), (), (sent(BOB, 5, devices=("5.0",)),), running=(views.Running(5, 640, 7.25),))
    here = IslandView(
        0, (0,), (), (sent(BOB, 0),), places=(Place(812, 2, 640),),
        stopped=(StoppedOn(0, Stopped(640, "AT_BARRIER", (), (5,))),),
    )  # fmt: skip
    assert chain(ALICE, here, there) == (
        "launch 812 of program 'double' (alice) is at place 3 in the order of island 0, behind launch 640 of program "
        "'step' (bob)",
        "launch 640 of program 'step' (bob) waits on host 0 for data of host 5, for 1.2 s",
        "launch 640 of program 'step' (bob) runs on host 5, for 7.2 s",
    )


def test_a_launch_waits_for_python_beside_the_devices() -> None:
    stands = Stopped(812, "AT_BARRIER", calls=("reward",))
    here = IslandView(0, (0,), (), (sent(ALICE, 0),), stopped=(StoppedOn(0, stands),))
    assert chain(ALICE, here)[-1] == (
        "launch 812 of program 'double' (alice) waits on host 0 for the host function reward, for 1.2 s"
    )


def test_islands_that_were_not_asked_are_wanted_with_the_launches_whose_places_matter() -> None:
    assert explained(ALICE).wanted == {0: {812}}
    assert explained(ALICE, BEHIND).wanted == {}


def test_a_tenant_learns_nothing_of_others() -> None:
    text = "\n".join(chain(ALICE, BEHIND, viewer="alice"))
    assert "behind a launch of another tenant" in text
    for word in ("bob", "step", "640"):
        assert word not in text
    made = explained(ALICE, BEHIND, viewer="alice")
    assert [link.launch for link in made.links] == [812, 0]


def test_a_tenant_learns_neither_failures_nor_functions_nor_producers_of_others() -> None:
    failed = msgspec.structs.replace(BOB, failure="bob's own text")
    places = (Place(812, 2, 640),)
    calls = (StoppedOn(0, Stopped(640, "AT_BARRIER", calls=("reward",))),)
    results = (StoppedOn(0, Stopped(640, "AT_BARRIER", producers=(639,))),)
    for bob, stopped in ((failed, ()), (BOB, calls), (BOB, results)):
        island = IslandView(0, (0,), (), (sent(BOB, 0),), places=places, stopped=stopped)
        found = chain(ALICE, island, IslandView(1, (5,)), others=(bob, ALICE), viewer="alice")
        assert found[1].startswith("a launch of another tenant ")
        for word in ("bob", "reward", "639"):
            assert word not in found[1]


def test_a_launch_that_waits_for_a_result_leads_to_the_one_that_makes_it() -> None:
    first = LaunchView(1, "alice", 11, 811, "make", 4, "in flight", 5.0, (0,))
    here = IslandView(
        0, (0,), (), (sent(first, 0), sent(ALICE, 0)), running=(views.Running(0, 811, 4.0),),
        stopped=(StoppedOn(0, Stopped(812, "WAITING_FOR_INPUTS", (811,))),),
    )  # fmt: skip
    assert chain(ALICE, here, others=(first,)) == (
        "launch 812 of program 'double' (alice) waits on host 0 for a result of launch 811 of program 'make' (alice), "
        "for 1.2 s",
        "launch 811 of program 'make' (alice) runs on host 0, for 4.0 s",
    )


def test_a_launch_in_a_device_queue_leads_to_the_one_before_it_on_its_devices() -> None:
    apart = LaunchView(3, "carol", 1, 639, "apart", 9, "in flight", 1.0, (0,))
    here = IslandView(0, (0,), (), (sent(apart, 0, devices=("0.1",)), sent(BOB, 0), sent(ALICE, 0)))
    assert chain(ALICE, here)[0].endswith(
        "is in the device queues of island 0 behind launch 640 of program 'step' (bob)"
    )


def test_a_launch_at_a_rendezvous_names_the_hosts_that_have_not_come() -> None:
    here = IslandView(
        0, (0, 1), (), (sent(ALICE, 0, 1),), stopped=(StoppedOn(0, Stopped(812, "ENQUEUED", arrived=True)),)
    )  # fmt: skip
    assert chain(ALICE, here) == ("launch 812 of program 'double' (alice) waits on host 0 for host 1 of its island",)


def test_an_island_without_one_of_its_hosts_starts_nothing() -> None:
    found = chain(ALICE, IslandView(0, (0, 1, 2), (1, 2)))
    assert found == (
        "launch 812 of program 'double' (alice) waits: island 0 starts nothing until hosts 1, 2 have joined",
    )


def waiting(**fields) -> LaunchView:
    return LaunchView(1, "alice", 13, 0, "double", 5, "deferred", 9.0, (0,), **fields)


def test_before_admission_the_reason_is_a_host_an_upload_a_compiler_or_memory() -> None:
    who = "launch 1.13 of program 'double' (alice)"
    assert chain(waiting(absent=(2,))) == (f"{who} waits for host 2 to come back, for 9.0 s",)
    upload = views.Upload(3, (2,), 64 << 20)
    arriving = views.ArrivingAt(2, views.Arriving(1, 3, 40 << 20, 64 << 20))
    assert chain(waiting(uploads=(upload,)), IslandView(0, (2,), uploads=(arriving,))) == (
        f"{who} waits for an upload of 64.0 MiB, which host 2 has not got whole, for 9.0 s",
        "host 2 has 40.0 MiB of the 64.0 MiB of array 3",
    )
    compiles = views.Compiling(2, 5, "double", 8.5)
    assert chain(waiting(unready=(2,)), IslandView(0, (2,), compiling=(compiles,))) == (
        f"{who} waits for its program: host 2 compiles 'double', for 8.5 s",
    )
    other = views.Compiling(2, 6, "bobs", 1.0)
    found = chain(waiting(unready=(2,)), IslandView(0, (2,), compiling=(other,)), viewer="alice")
    assert found == (f"{who} waits for its program, which host 2 compiles after another program, for 9.0 s",)
    lacking = views.Lacking("0.1", 3 << 30, 8 << 30, 6 << 30, 1 << 30)
    assert chain(waiting(lacking=lacking)) == (
        f"{who} waits for 3.0 GiB on device 0.1, which has 8.0 GiB: 1.0 GiB hold this session's buffers, 5.0 GiB those "
        "of others, for 9.0 s",
    )
    lacking = views.Lacking("0.1", 3 << 30, 8 << 30, 6 << 30, 1 << 30, 11)
    for viewer, who_gives_way in (("", "session 11"), ("alice", "another session")):
        assert f"; {who_gives_way} gives way to it, " in chain(waiting(lacking=lacking), viewer=viewer)[0]


def test_a_launch_behind_others_of_its_session_leads_to_the_first_of_them() -> None:
    first = LaunchView(1, "alice", 12, 0, "double", 5, "waiting for memory", 9.0, (0,), absent=(4,))
    found = chain(waiting(before=1, behind=12), others=(first,))
    assert found[0].endswith("waits behind 1 calls of its session, for 9.0 s")
    assert found[1].endswith("waits for host 4 to come back, for 9.0 s")


def test_a_failed_launch_waits_for_the_cause() -> None:
    failed = LaunchView(1, "alice", 12, 812, "double", 5, "failed", 3.0, (), (640,), failure="boom")
    found = chain(failed, IslandView(0, (0,), (), (sent(BOB, 0),)), IslandView(1, (5,)))
    assert found[0].endswith("has failed (boom), and waits for the cause")
    assert found[1].startswith("launch 640")


def test_chains_end() -> None:
    """Views of different moments may lead in a circle, and there may be more launches than anybody reads."""
    one = LaunchView(1, "a", 1, 0, "p", 1, "waiting", 0.0, (), before=1, behind=2)
    two = LaunchView(1, "a", 2, 0, "p", 1, "waiting", 0.0, (), before=1, behind=1)
    assert len(chain(one, others=(one, two))) == 2
    many = tuple(LaunchView(1, "a", n, 0, "p", 1, "waiting", 0.0, (), before=1, behind=n + 1) for n in range(1, 99))
    assert len(chain(many[0], others=many)) == MAX_LINKS


def test_the_text_of_a_chain_reads_downward() -> None:
    links = explained(ALICE, BEHIND).links
    found = Why("launch 812", tuple(links), ("controller: 1 s before: admitted",))
    lines = str(found).splitlines()
    assert lines[0].startswith("launch 812")
    assert lines[1].startswith("   because launch 640")
    assert lines[-1] == "   controller: 1 s before: admitted"
    assert found.dict()["links"][0]["launch"] == 812
    assert chain_text([]) == ""


def test_bytes_in_words() -> None:
    assert [bytes_text(n) for n in (0, 2048, 3 << 20, 5 << 30)] == ["0 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_a_launch_that_decides_leads_to_the_part_by_which_it_does() -> None:
    part = LaunchView(1, "alice", 0, 811, "test", 4, "in flight", 5.0, (0,))
    here = IslandView(0, (0,), (), (sent(part, 0),), running=(views.Running(0, 811, 4.0),))
    assert chain(waiting(parts=(811,), rounds=3), here, others=(part,)) == (
        "launch 1.13 of program 'double' (alice) goes on by what a part of it computes, 1 of which are under way, "
        "after 3 rounds of its loops, for 9.0 s",
        "launch 811 of program 'test' (alice) runs on host 0, for 4.0 s",
    )
