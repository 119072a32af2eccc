"""Export of launches as OpenTelemetry spans, by a process beside the runtime: launches pay nothing for it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from pathways_ray.observe.spans import ROOT, Key, Span, span_id, spans, trace_id
from pathways_ray.observe.timeline import Interval, Records

SETTLED_S = 1.0
"""A launch is exported this long after its outcome, when all its processes have noted it."""

MAX_BATCH = 4096
"""Spans that are sent at once."""

CARRIED = 4096
"""Intervals of one kind of a process that are kept for launches which have not ended: the last ones."""

KINDS = ("schedulers", "ran", "waits", "python")
"""The fields of `Records` with intervals of processes."""

REMEMBERED = 1 << 18
"""Launches that are known to be exported."""


class SpanExport:
    """Exports the launches of a runtime, each once.

    Args:
        exporter: of the SDK, or one's own.
        cluster: the name of the runtime.
        sampled: the part of launches that are exported.
        gather: gives the records since a time; see `deployment.tracing.trace`.
    """

    def __init__(
        self, exporter: SpanExporter, cluster: str, sampled: float, gather: Callable[[float], Records]
    ) -> None:
        self.exporter, self.cluster, self.sampled, self.gather = exporter, cluster, sampled, gather
        self.resource = Resource.create({"service.name": "pathways", "service.instance.id": cluster})
        self.since = time.monotonic()
        self.done: OrderedDict[Key, None] = OrderedDict()
        self.carried: dict[str, dict[int, list[Interval]]] = {}
        """Intervals of launches that have not ended, by kind and process: they are not gathered again."""
        self.lost = 0
        """Spans that the collector did not take."""
        self.left_out_s = 0.0
        """Time of which the launches were more than can be gathered at once."""

    def round(self) -> int:
        """Exports what has ended since the last round; the number of launches, of a sample of those in it."""
        now = time.monotonic()
        records = self.gather(self.since - SETTLED_S)
        self.left_out_s += records.left_out_s
        launches = [e for e in records.ended if e.end <= now - SETTLED_S and (e.session, e.sequence) not in self.done]
        found = msgspec.structs.replace(records, ended=launches, **self._with_carried(records, now))
        epoch_s = time.time() - time.monotonic()  # of now: to gather takes a while
        made = [self._made(span, epoch_s) for span in spans(found, self.sampled)]
        for start in range(0, len(made), MAX_BATCH):
            batch = made[start : start + MAX_BATCH]
            if self.exporter.export(batch) is not SpanExportResult.SUCCESS:
                self.lost += len(batch)
        self.done.update(((e.session, e.sequence), None) for e in launches)
        while len(self.done) > REMEMBERED:
            self.done.popitem(last=False)
        self.since = now - SETTLED_S
        return sum(span.parent is None for span in made)

    def _with_carried(self, records: Records, now: float) -> dict[str, dict[int, list[Interval]]]:
        """All intervals by kind and process, with those that rounds before this one gathered of launches which had not
        ended; of those that have not yet, what the next round will not gather again is carried on."""
        over = {one.sequence: one.start for one in records.ended if one.end <= now - SETTLED_S}
        found, carried = dict[str, dict[int, list[Interval]]](), dict[str, dict[int, list[Interval]]]()
        for kind in KINDS:
            new, before = getattr(records, kind), self.carried.get(kind, {})
            # A controller that starts again counts from 1: what was over by then is of another launch.
            found[kind] = {
                number: [
                    one for one in before.get(number, ()) if one.end >= over.get(one.sequence, one.end) - SETTLED_S
                ]
                + [*new.get(number, ())]
                for number in {**before, **new}
            }
            carried[kind] = {
                number: [one for one in intervals if one.sequence not in over and one.end < now - 2 * SETTLED_S][
                    -CARRIED:
                ]
                for number, intervals in found[kind].items()
            }
        self.carried = carried
        return found

    def _made(self, span: Span, epoch_s: float) -> ReadableSpan:
        def context(number: int) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED)
            trace = trace_id(self.cluster, span.launch)
            return SpanContext(trace, span_id(self.cluster, span.launch, number), False, flags)

        return ReadableSpan(
            name=span.name,
            context=context(span.id),
            parent=context(ROOT) if span.id != ROOT else None,
            resource=self.resource,
            attributes=span.attributes,
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.failed else StatusCode.OK),
            start_time=round((span.start + epoch_s) * 1e9),
            end_time=round((span.end + epoch_s) * 1e9),
            instrumentation_scope=InstrumentationScope("pathways_ray"),
        )
