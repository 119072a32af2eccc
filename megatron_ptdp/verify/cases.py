"""The settings of a case, the rules for their combinations, and the two grids of cases.

All cases take one batch of `BATCH` examples, so b follows from m and d, and one device's result serves all of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from megatron_ptdp import schedules
from megatron_ptdp.errors import ConfigError
from megatron_ptdp.parallel import Sizes
from megatron_ptdp.verify.pairs import Rule, all_pairs

ISLANDS, DEVICES = 2, 4
"""The cluster of all cases: islands of one host, and devices of each host."""

BATCH = 8
"""Examples of each step, over all microbatches and replicas."""

LAYERS = 4
"""Layers of every model: the largest number of stages."""

Grid: TypeAlias = Literal["small", "full"]

SCHEDULES: Mapping[str, tuple[int, ...]] = {
    "1f1b": (1,),
    "gpipe": (1,),
    "zb-h1": (1,),
    "interleaved": (2,),
    "looped-bfs": (2,),
    "interleaved-zb": (2,),
    "zb-v": (2,),
    "dualpipe-v": (2,),
}
"""The chunks that each schedule is run with."""


@dataclass(frozen=True)
class Case:
    """One way to compute a step.

    Attributes:
        model: one of `models.CONFIGS`
        p, t, d, v, m: pipeline, tensor and data parallel sizes, chunks, microbatches
        schedule: by name
        sp: sequence parallelism
        recompute: "none", "selective", "full"
        keep: what forwards keep, "residuals" or "input"
        join: forward and backward of the last stage as one computation, where they follow each other
        zero: 0 to 3
        sg: scatter/gather of what moves between stages
        r: islands that the replicas lie on
        place: pipeline devices "together" on an island, or "apart" on both
        cut: "even", or "uneven": first and last stage with fewer layers, or none
    """

    model: str = "gpt"
    p: int = 1
    t: int = 1
    d: int = 1
    v: int = 1
    m: int = 2
    schedule: str = "1f1b"
    sp: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    keep: Literal["residuals", "input"] = "residuals"
    join: bool = False
    zero: int = 0
    sg: bool = True
    r: int = 1
    place: Literal["together", "apart"] = "together"
    cut: Literal["even", "uneven"] = "even"

    @property
    def sizes(self) -> Sizes:
        """Raises `BadSizes`."""
        return Sizes.for_batch(BATCH, self.p, self.t, self.d, BATCH // (self.m * self.d), self.v, self.r)

    @property
    def counts(self) -> list[int]:
        """The layers of each stage."""
        stages = self.p * self.v
        if self.cut == "even":
            return [LAYERS // stages] * stages
        inner = stages - 2
        if not inner:
            return [1, LAYERS - 1]
        edges = LAYERS % inner
        return [edges, *[LAYERS // inner] * inner, 0]

    def label(self) -> str:
        """The settings that are not those of one device, in short."""
        words = [self.model, f"p={self.p}", f"t={self.t}", f"d={self.d}"]
        words += [f"v={self.v}"] if self.v > 1 else []
        words += [f"m={self.m}", self.schedule]
        default = Case()
        for name in ("sp", "recompute", "keep", "join", "zero", "sg", "r", "place", "cut"):
            value = getattr(self, name)
            if value != getattr(default, name):
                words.append(f"{name}={text(value)}")
        return " ".join(words)


def text(value: Any) -> str:
    """A setting as it is written."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


FACTORS: Mapping[str, Sequence[Any]] = {
    "model": ("gpt", "gpt-untied", "moe", "t5", "t5-moe"),
    "schedule": tuple(SCHEDULES),
    "p": (2, 1, 4),
    "t": (2, 1, 4),
    "d": (1, 2, 4),
    "v": (1, 2),
    "m": (4, 2, 8),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "sp": (False, True),
    "keep": ("residuals", "input"),
    "join": (False, True),
    "sg": (True, False),
    "r": (1, 2),
    "place": ("together", "apart"),
    "cut": ("even", "uneven"),
}
"""All values that the full grid has."""


def _room(p: int, t: int, d: int, r: int, place: str) -> bool:
    """Whether each island has enough devices."""
    if d % r or (place == "apart" and (p == 1 or r > 1)):
        return False
    here = (p + 1) // 2 if place == "apart" else p
    return here * t * (d // r) <= DEVICES


def _schedule_runs(schedule: str, p: int, v: int, m: int) -> bool:
    try:
        schedules.build(schedule, p, m, v)
    except schedules.ScheduleError:
        return False
    return True


RULES: Sequence[Rule] = (
    Rule(("schedule", "v"), lambda schedule, v: v in SCHEDULES[schedule]),
    Rule(("schedule", "p", "v", "m"), _schedule_runs),
    Rule(("schedule", "p"), lambda schedule, p: p > 1 or schedule in ("1f1b", "gpipe")),  # else nothing to schedule
    Rule(("p", "v"), lambda p, v: p * v <= LAYERS),
    Rule(("p", "t", "d", "r", "place"), _room),
    Rule(("m", "d"), lambda m, d: m * d <= BATCH),
    Rule(("sp", "t"), lambda sp, t: t > 1 or not sp),
    Rule(("sg", "p", "t", "sp"), lambda sg, p, t, sp: sg or (p > 1 and t > 1 and not sp)),  # else it changes nothing
    Rule(("zero", "d", "r"), lambda zero, d, r: not zero or d // r > 1),  # members of one island share
    Rule(("zero", "p", "v"), lambda zero, p, v: zero < 3 or p * v == 1),
    Rule(("join", "keep"), lambda join, keep: keep == "residuals" or not join),  # else they are one anyway
    Rule(("join", "schedule"), lambda join, schedule: schedule != "gpipe" or not join),  # they never follow each other
    Rule(("cut", "p"), lambda cut, p: cut == "even" or p > 1),
)


SMALL: Sequence[Case] = (
    Case("gpt", t=2, d=2, sp=True),
    Case("gpt", p=2, t=2, d=2, m=4, sp=True, zero=1, place="apart"),
    Case("gpt", p=2, t=2, d=2, m=2, r=2, schedule="gpipe", sg=False),
    Case("gpt", p=2, v=2, m=4, schedule="interleaved", recompute="full", keep="input"),
    Case("gpt", p=4, t=2, m=4, schedule="zb-h1", place="apart", cut="uneven"),
    Case("gpt", d=4, zero=3),
    Case("gpt-untied", t=4, sp=True, recompute="selective", keep="input"),
    Case("gpt-untied", p=2, t=2, v=2, m=4, schedule="zb-v", recompute="selective"),
    Case("gpt-untied", p=2, d=2, m=2, join=True, zero=2, cut="uneven"),
    Case("moe", p=2, t=2, m=4, sp=True, recompute="full"),
    Case("moe", t=4, d=2, r=2, schedule="gpipe"),
    Case("moe", p=2, v=2, m=4, schedule="dualpipe-v"),
    Case("t5", p=2, t=2, m=4, join=True, cut="uneven"),
    Case("t5", p=2, t=2, v=2, d=2, m=4, schedule="interleaved", sp=True, place="apart", recompute="selective"),
    Case("t5", p=2, v=2, m=8, schedule="looped-bfs", keep="input"),
    Case("t5-moe", p=2, t=2, v=2, m=4, schedule="interleaved-zb", sp=True),
)
"""Cases chosen by hand: every value of every factor, and the combinations in which bugs are most likely."""


def full() -> list[Case]:
    """Cases that hold every pair of values of `FACTORS` that `RULES` allow."""
    return [Case(**row) for row in all_pairs(FACTORS, RULES)]


def grid(name: Grid) -> list[Case]:
    """The cases of a grid."""
    return list(SMALL) if name == "small" else full()


def selected(rows: Sequence[Mapping[str, Any]], only: Sequence[str]) -> list[int]:
    """The numbers of the rows that have all the settings of any of `only`; without any, of all.

    Args:
        rows: settings by name
        only: of the form "p=2,t=2"

    Raises:
        ConfigError: a name or value is unknown, or no row is left.
    """
    if not only:
        return list(range(len(rows)))
    wanted = [_wanted(one, rows) for one in only]
    found = [
        number
        for number, row in enumerate(rows)
        if any(all(name in row and text(row[name]) == value for name, value in each.items()) for each in wanted)
    ]
    if not found:
        raise ConfigError(
            f"--only {' --only '.join(only)} matches none of the {len(rows)} checks; leave some of the settings out, "
            "or choose the larger grid"
        )
    return found


def part(text: str, count: int) -> slice:
    """The slice that `--cases` selects: "10:20", where either side may be left out.

    Raises:
        ConfigError: it is of another form, or none of the `count` checks is in it.
    """
    first, colon, last = text.partition(":")
    if not colon or any(side and not (side.isascii() and side.isdigit()) for side in (first, last)):
        raise ConfigError(f"--cases takes two numbers, as in 10:20, not {text!r}")
    found = slice(int(first or 0), min(int(last or count), count))
    if found.start >= found.stop:
        raise ConfigError(f"--cases {text} holds none of the {count} checks, which are counted from 0")
    return found


def _wanted(one: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    names = sorted({name for row in rows for name in row})
    wanted = {}
    for part in one.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise ConfigError(f"--only takes settings like p=2,t=2, not {part.strip()!r}")
        if name not in names:
            raise ConfigError.unknown("setting of a check", name, names)
        wanted[name] = value
    return wanted


def settings(case: Case) -> dict[str, Any]:
    """All settings of a case by name."""
    return asdict(case)
