"""Who is blamed for the death of a host, and who is refused for it."""

from __future__ import annotations

import pytest

from pathways_ray.controller.circuit_breaker import MAX_DEATHS, MAX_RECORDS, Candidate, CircuitBreaker, Culprit

A, B, C = (Culprit(tenant, f"digest {tenant}") for tenant in "abc")


def launched(culprit: Culprit) -> Candidate:
    return Candidate(culprit, f"of {culprit.tenant}", False)


def compiled(culprit: Culprit) -> Candidate:
    return Candidate(culprit, f"of {culprit.tenant}", True)


def breaker(*good: Culprit) -> CircuitBreaker:
    """These were compiled and launched with success."""
    made = CircuitBreaker()
    for culprit in good:
        made.compiled(culprit)
        made.succeeded(culprit)
    return made


def blamed(made: CircuitBreaker, *candidates: Candidate, decided: bool = False, host: int = 0) -> list[Culprit]:
    return [one.culprit for one in made.died(host, candidates, "it ended", decided, 5.0)]


def test_whoever_the_scheduler_names_is_to_blame_also_one_that_succeeded() -> None:
    made = breaker(A)
    assert blamed(made, launched(A), decided=True) == [A]


def test_a_compilation_that_was_never_seen_to_end_is_blamed_and_what_runs_beside_it_is_not() -> None:
    made = breaker(A)
    for _ in range(MAX_DEATHS):
        assert blamed(made, compiled(B), launched(A)) == [B]
        made.crashed(0, "Segmentation fault", 6.0)
    assert set(made.refused) == {B}
    assert not made.is_watched(A)


def test_of_several_in_doubt_none_is_blamed_and_all_are_suspects() -> None:
    made = breaker(A)
    assert blamed(made, compiled(B), compiled(C), launched(A)) == []
    assert [made.is_suspect(one) for one in (A, B, C)] == [False, True, True]
    made.compiled(B)
    assert made.is_suspect(B), "it may still end a host when it is launched"
    made.succeeded(B)
    assert not made.is_suspect(B)


def test_deaths_beside_programs_that_have_shown_what_they_can_blame_nobody() -> None:
    made = breaker(A, B)
    for _ in range(5 * MAX_DEATHS):
        assert blamed(made, launched(A), launched(B)) == []
        assert blamed(made, launched(A)) == []
    assert not made.refused


def test_a_crash_of_one_that_has_shown_what_it_can_is_its_own_and_one_of_several_has_to_be_shown_again() -> None:
    made = breaker(A, B)
    blamed(made, launched(A), launched(B))
    made.crashed(0, "Segmentation fault", 6.0)
    assert not made.records[A].strikes
    assert made.is_suspect(A)
    assert made.is_suspect(B)
    made.succeeded(A)
    assert blamed(made, launched(A), launched(B)) == [B]
    for _ in range(MAX_DEATHS):
        blamed(made, launched(A))
        made.crashed(0, "Segmentation fault", 6.0)
    assert A in made.refused
    assert "host 0 died of Segmentation fault" in made.refused[A].failure.message


@pytest.mark.parametrize("stage", [launched, compiled])
def test_what_may_have_been_chance_is_forgotten_with_a_success_of_the_same_kind(stage: type) -> None:
    made = breaker()
    for _ in range(MAX_DEATHS - 1):
        assert blamed(made, stage(A)) == [A]
    made.compiled(A)
    assert len(made.records[A].strikes) == (MAX_DEATHS - 1 if stage is launched else 0)
    made.succeeded(A)
    assert not made.records[A].strikes
    assert blamed(made, launched(A), decided=True) == [A]
    made.succeeded(A)
    assert len(made.records[A].strikes) == 1, "what is sure stays"


def test_the_same_program_of_another_tenant_is_another_one() -> None:
    made = breaker()
    copy = Culprit("mallory", A.digest)
    for _ in range(MAX_DEATHS):
        blamed(made, launched(copy), decided=True)
    assert made.refusal(copy) is not None
    assert made.refusal(A) is None


def test_an_operator_lifts_a_refusal_by_its_id() -> None:
    made = breaker()
    for _ in range(MAX_DEATHS):
        blamed(made, launched(A), decided=True)
    refusal = made.refused[A]
    assert (refusal.name, refusal.at) == ("of a", 5.0)
    assert A.id in refusal.failure.message
    assert not made.lift("another")
    assert made.lift(A.id)
    assert made.refusal(A) is None
    assert not made.is_watched(A)
    assert blamed(made, launched(A), decided=True) == [A]
    assert made.refusal(A) is None, "it starts from nothing"


def test_only_so_many_programs_are_remembered_and_those_with_strikes_longest() -> None:
    made = breaker()
    blamed(made, launched(A), decided=True)
    for k in range(MAX_RECORDS + 5):
        made.compiled(Culprit("t", str(k)))
    assert len(made.records) == MAX_RECORDS
    assert made.records[A].strikes


def test_hosts_that_die_together_count_as_one_death() -> None:
    """
    1. A program that nobody has seen succeed is compiled on three islands as all lose their power: one strike.
    2. Hosts that are back and die again count again, each time once.
    """
    made = CircuitBreaker()
    for round_number in range(MAX_DEATHS):
        assert not made.refused, f"after {round_number} deaths"
        for host in range(3):
            made.died(host, [compiled(A)], "it ended", False, 20.0 * round_number)
        assert len(made.records[A].strikes) == round_number + 1
    assert set(made.refused) == {A}
    soon = CircuitBreaker()
    for second in range(MAX_DEATHS):
        soon.died(0, [compiled(A)], "it ended", False, float(second))
    assert set(soon.refused) == {A}, "one host that dies again and again"
