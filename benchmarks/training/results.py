"""Ratios, figures with aims, and tables of `benchmarks.training`, from tokens per second and recorded steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from rich.console import Console

from benchmarks import measure
from benchmarks.aims import verdict_of
from benchmarks.printing import Table, shows
from benchmarks.training.model import Sizes
from benchmarks.training.runtime import SPMD, Case
from megatron_ptdp.schedules import Costs, simulate

MEASURED = (
    "A GPT of {layers} layers, hidden {hidden}, sequence {sequence}, {vocabulary} tokens of vocabulary, fp32, AdamW; "
    "microbatches of {examples} examples. A step of M microbatches takes the same batch in all systems. Two devices "
    "are two cores with one XLA thread each (host k's device runs on core k mod 2); everything else (client, "
    "controller, schedulers) has no core of its own. Four devices share the two cores. {rounds} rounds of about "
    "{seconds} s a case after one to warm up, all cases in turn, no step waited for before the last; ratios are taken "
    "round by round. All systems begin with the same parameters, and the losses of the first steps are compared."
)
UNPINNED = " There are fewer than two cores: devices are not pinned, and no ratio means anything."


@dataclass
class Samples:
    """Measurements of all cases.

    Attributes:
        sizes: of the model
        losses: of the first steps of each case
        rates: tokens a second of each case in each round
        cpu: CPU seconds of one step, of all systems, those that were idle too
        bubbles: as `runtime.bubbles` gives them
        stages: for four stages, the costs of their actions alone on a core, and seconds of the rest of a step
    """

    sizes: Sizes
    losses: Mapping[Case, list[float]]
    rates: Mapping[Case, list[float]] = field(default_factory=dict)
    cpu: Mapping[Case, list[float]] = field(default_factory=dict)
    bubbles: list[dict[str, Any]] = field(default_factory=list)
    stages: tuple[Costs, float] | None = None

    def result(self) -> dict[str, Any]:
        return {
            "rows": [self._row(case, values) for case, values in self.rates.items()],
            "ratios": list(self.ratios()),
            "figures": list(self.figures()),
            "bubbles": self.bubbles,
        }

    def _row(self, case: Case, values: Sequence[float]) -> dict[str, Any]:
        rate = measure.spread(values)
        row = {
            "name": case.name,
            **vars(case),
            "place": case.place if case.system == "pathways" else "",
            "tokens_per_second": rate,
            "step_ms": 1e3 * self.sizes.tokens(case.microbatches) / rate["median"],
            "losses": self.losses[case],
        }
        if case in self.cpu:
            row["cpu_ms"] = 1e3 * median(self.cpu[case])
        if self.stages is not None and case.devices == 4:
            row["predicted_tokens_per_second"] = self.predicted_rate(case)
        return row

    def predicted_rate(self, case: Case) -> float:
        return self.sizes.tokens(case.microbatches) / self.predicted_seconds(case)

    def predicted_seconds(self, case: Case) -> float:
        """A step on four cores: the schedule simulated with the times of stages that had a core each."""
        assert self.stages is not None
        costs, rest = self.stages
        return simulate(case.schedule(), costs).makespan + rest

    # --- ratios -------------------------------------------------------------------------------------------------------

    def ratios(self) -> Iterator[dict[str, Any]]:
        """Every ratio whose two cases were measured."""
        for case in self.rates:
            m, spmd = case.microbatches, Case("pathways", SPMD, case.microbatches)
            if case.system != "pathways":
                continue
            if case.how == SPMD:
                if case.place == "across":
                    name = f"two islands / one of twice the devices, data parallel, M {m}"
                    yield from self._ratio(name, case, spmd)
                    continue
                for way in ("scan", "calls"):
                    yield from self._ratio(f"pathways / plain JAX ({way}), SPMD, M {m}", case, Case("jax", way, m))
                continue
            where = f"{case.how}, S {case.devices}, M {m}"
            many = "oversubscribed pipeline" if case.devices > 2 else "pipeline"
            yield from self._ratio(f"{many} / SPMD, {where}, {case.place}", case, spmd)
            ideal = f"{many} / ideal 1/(1+bubble) of SPMD, {where}, {case.place}"
            yield from self._ratio(ideal, case, spmd, 1 + case.bubble)
            if case.place == "across":
                inside = Case("pathways", case.how, m, case.devices)
                yield from self._ratio(f"pipeline across islands / inside one, {where}", case, inside)
            elif case.devices == 2:
                yield from self._ratio(f"pathways / torch pipelining, {where}", case, Case("torch", case.how, m))
                if case.how != "1f1b":
                    yield from self._ratio(f"{case.how} / 1f1b, S 2, M {m}", case, Case("pathways", "1f1b", m))

    def _ratio(self, name: str, over: Case, under: Case, times: float = 1.0) -> Iterator[dict[str, Any]]:
        if over in self.rates and under in self.rates:
            values = [times * rate for rate in self.rates[over]]
            yield {"name": name, **measure.paired_ratios(values, self.rates[under])}

    # --- figures ------------------------------------------------------------------------------------------------------

    def figures(self) -> Iterator[dict[str, Any]]:
        """Figures with an aim that are not ratios of rates."""
        of = {found["case"]: found for found in self.bubbles}
        for name, found in of.items():
            off = [abs(one["measured"] / one["predicted"] - 1) for one in found["records"] if one["predicted"]]
            if off:
                yield {"name": f"bubble, off its prediction, {name}", **measure.spread(off)}
            other = of.get(name.replace("zb-h1", "1f1b"))
            if "zb-h1" in name and other:
                both = zip(found["records"], other["records"], strict=True)
                values = [one["measured"] / two["measured"] for one, two in both if two["measured"]]
                if values:
                    yield {"name": f"bubble of zb-h1 / of 1f1b, {name}", **measure.spread(values)}
        for case, losses in self.losses.items():
            first = next(other for other in self.losses if other.microbatches == case.microbatches)
            if case != first:
                differences = [abs(a - b) for a, b in zip(losses, self.losses[first], strict=True)]
                yield {"name": f"loss, off the first: {case.name}", "median": max(differences)}
        for case, rates in self.rates.items() if self.stages is not None else ():
            if case.devices == 4:
                name = f"oversubscribed / predicted for four cores, {case.name}"
                yield {"name": name, **measure.spread([rate / self.predicted_rate(case) for rate in rates])}


def described(settings: Any, cores: Sequence[int]) -> str:
    text = MEASURED.format(**vars(settings.sizes), rounds=settings.rounds, seconds=settings.seconds)
    return text if cores else text + UNPINNED


# --- printing ---------------------------------------------------------------------------------------------------------


TABLES = shows(
    Table(
        "training", "rows", *("name", "tokens_per_second", "step_ms:.1f", "cpu_ms:.0f", "predicted_tokens_per_second")
    ),
    *(Table(title, title, "name", ".:.3g", "aim", "verdict") for title in ("ratios", "figures")),
    Table(
        "recorded steps, means: bubble as idle / busy; ms of all actions, of those of a device, of the rest",
        "bubbles",
        *("case", "hop_ms:.1f", "ideal:.1%", "predicted:.1%", "measured:.1%"),
        *("predicted_ms:.1f", "makespan_ms:.1f", "busy_ms:.1f", "others_ms:.1f"),
    ),
    Table("bytes of a step between islands", "bytes", "tensor", "scatter_gather", "bytes_between_hosts"),
)


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints a result, with aims beside figures and with means over recorded steps."""
    held = {key: [{**one, **verdict_of("training", one)} for one in result[key]] for key in ("ratios", "figures")}
    means = [
        {**one, **{name: fmean(record[name] for record in one["records"]) for name in one["records"][0]}}
        for one in result["bubbles"]
    ]
    TABLES({**result, **held, "bubbles": means}, console)
    if "busy_cores_between_rounds" in result:
        console.print(
            f"Before the rounds, nothing measured, {result['busy_cores_between_rounds']:.2f} cores were busy."
        )
