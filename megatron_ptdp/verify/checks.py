"""The checks: each is one question with a measured answer.

    gradients   loss and every gradient of a case are those of one device
    training    so are losses, norms and parameters of `reference.STEPS` clipped optimizer steps; float64 only
    bits        two cases that must compute the same bits do; a case with itself: run twice
    mistake     a bug planted into the step of a case is found by the comparison of gradients or of trainings

What must be the same to the bit. Each stage adds gradients up over microbatches, and the same computations in the same
order give the same bits. That is so where each stage runs the backwards of the microbatches in the same order, each
backward is one computation, and the last stage joins forward and backward of the same microbatches. So it is for gpipe,
1f1b and interleaved, for the same cut, if nothing is joined. Scatter/gather only moves. Not compared: `join`, as XLA
compiles two computations in one otherwise; looped-bfs and dualpipe-v, which run backwards in another order; zb-h1,
interleaved-zb and zb-v, whose backwards are two computations; other t and d, as sums over members have other terms;
other cuts, as XLA may compile a stage of two layers otherwise than two stages of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.verify import cases, compare, models, reference, runs
from megatron_ptdp.verify.cases import Case, Grid
from megatron_ptdp.verify.compare import Difference, DType
from megatron_ptdp.verify.planted import PLANTED_BUGS, planted

Kind: TypeAlias = Literal["gradients", "training", "bits", "mistake"]


@dataclass(frozen=True)
class Check:
    """One question.

    Attributes:
        kind: see the module
        case: what is run
        other: of "bits", what it is compared with
        planted_bug: of "mistake", its name in `PLANTED_BUGS`
        trains: of "mistake", whether a training must find it instead of the gradients
    """

    kind: Kind
    case: Case
    other: Case | None = None
    planted_bug: str = ""
    trains: bool = False

    def settings(self) -> dict[str, Any]:
        """Settings by name, as for `--only`."""
        named = {"check": self.kind, **cases.settings(self.case)}
        return {**named, "mistake": self.planted_bug} if self.planted_bug else named

    def label(self) -> str:
        """The check in one line."""
        if self.planted_bug:
            return f"{self.planted_bug}: {PLANTED_BUGS[self.planted_bug].effect}"
        if self.other == self.case:
            return f"{self.case.label()}, twice"
        return f"{self.case.label()} = {self.other.label()}" if self.other else self.case.label()


@dataclass(frozen=True)
class Outcome:
    """The answer.

    Attributes:
        check: the question
        difference: the worst tensor; None when the case did not run
        passed: the comparison is as it must be; of a planted bug: it was found
        seconds: it took
        failure: why the case did not run, else ""
    """

    check: Check
    difference: Difference | None
    passed: bool
    seconds: float
    failure: str = ""


_INSIDE = Case("gpt", p=2, t=2, d=2, m=4, sp=True, zero=1, place="apart")
_TWO = Case("gpt", p=2, m=4)
_FOUR = Case("gpt", p=4, m=4)
_EXPERTS = Case("moe", p=2, t=2, m=4)

BITS: Sequence[tuple[Case, Case]] = (
    (_INSIDE, _INSIDE),
    (_TWO, replace(_TWO, schedule="gpipe")),
    (_FOUR, replace(_FOUR, p=2, v=2, schedule="interleaved")),
    (replace(_FOUR, schedule="gpipe", keep="input"), replace(_FOUR, p=2, v=2, schedule="interleaved", keep="input")),
    (_EXPERTS, replace(_EXPERTS, schedule="gpipe", sg=False)),
)
"""Pairs of cases that must compute the same bits. The first is one case, run twice."""


TRAININGS: Sequence[Case] = (
    Case("gpt", p=2, t=2, d=2, m=4, sp=True, zero=1, place="apart"),
    Case("moe", p=2, t=2, d=2, m=2, r=2, zero=0, cut="uneven"),
    Case("t5", p=2, v=2, d=2, m=4, schedule="interleaved", zero=2),
    Case("gpt-untied", t=2, d=2, zero=3),
)

PLANTED = Case("gpt", p=2, t=2, d=2, m=2, sp=True, place="apart")
"""The case with planted bugs: tied, padded, with weights, members of every axis. Each of `PLANTED_BUGS` shows here."""

BY_TRAINING = ("replicated-counted-twice", "tied-counted-twice")
"""Planted bugs that no gradient shows: they are in the norm and the update."""


def with_planted_bugs() -> list[Check]:
    """The case without a planted bug, which must pass, and then with each of them."""
    bugs = [Check("mistake", PLANTED, planted_bug=name, trains=name in BY_TRAINING) for name in PLANTED_BUGS]
    return [Check("gradients", PLANTED), Check("training", PLANTED), *bugs]


def listed(grid: Grid, dtype: DType) -> list[Check]:
    """The checks of a grid. The small one has one training and the first two pairs of bits."""
    few = grid == "small"
    checks = [Check("gradients", case) for case in cases.grid(grid)]
    checks += [Check("bits", case, other) for case, other in (BITS[:2] if few else BITS)]
    if dtype == "float64":
        checks += [Check("training", case) for case in (TRAININGS[:1] if few else TRAININGS)]
    return checks


def chosen(grid: Grid, dtype: DType, mistakes: bool, only: Sequence[str]) -> list[Check]:
    """The checks that are asked for.

    Raises:
        ConfigError: `only` matches nothing, or mistakes are asked for in float32.
    """
    if mistakes and dtype != "float64":
        raise ConfigError("mistakes are planted in float64, where nothing else is in the way; leave --dtype out")
    found = with_planted_bugs() if mistakes else listed(grid, dtype)
    return [found[number] for number in cases.selected([check.settings() for check in found], only)]


def measured(check: Check, dtype: DType) -> Difference:
    """Runs a check on the current session.

    Raises:
        BadSizes, ConfigError, ScheduleError: the case does not fit the devices.
    """
    case, config = check.case, models.CONFIGS[check.case.model]
    with planted(*filter(None, [check.planted_bug])):
        if check.kind == "training" or check.trains:
            return compare.trained_apart(config, runs.trained(case), reference.trained(case.model))
        found = runs.gradients(case, dtype)
    if check.other is not None:
        return compare.bits_apart(config, found, runs.gradients(check.other, dtype))
    return compare.gradients_apart(config, dtype, found, reference.gradients(case.model, dtype))


def answered(check: Check, dtype: DType, clock: Callable[[], float] = time.perf_counter) -> Outcome:
    """Runs a check. An error is an outcome: the other checks still run."""
    start = clock()
    try:
        apart = measured(check, dtype)
    except Exception as error:  # whatever it was, this case is not proven
        return Outcome(check, None, False, clock() - start, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Outcome(check, apart, apart.passed != bool(check.planted_bug), clock() - start)


def record(outcome: Outcome) -> Mapping[str, Any]:
    """The outcome as a JSON object."""
    check, apart = outcome.check, outcome.difference
    made = {**check.settings(), "label": check.label(), "passed": outcome.passed, "seconds": round(outcome.seconds, 2)}
    if check.other is not None:
        made["other"] = cases.settings(check.other)
    if apart is None:
        return {**made, "failure": outcome.failure}
    # JSON has no infinity.
    error = apart.error if apart.error != float("inf") else "inf"
    return {**made, "worst": apart.worst, "error": error, "bound": apart.bound, "tensors": apart.tensors}
