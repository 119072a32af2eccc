"""Export of spans: each launch once, when all have noted it, by the time of day; what a collector lacks is counted."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pathways_ray.deployment.span_export import KINDS, SETTLED_S, SpanExport
from pathways_ray.observe.timeline import Ended, Interval, Records


def records(now: float) -> Records:
    """Launch 1 ended 3 s ago, launch 2 just now."""
    return Records(
        ended=[Ended(1, 7, 5, now - 4.0, now - 3.0, 1), Ended(2, 7, 5, now - 0.2, now - 0.1, -2)],
        programs={5: "step"},
        tenants={7: "bob"},
        ran={0: [Interval(1, now - 3.8, now - 3.2)]},
    )


def test_a_launch_is_exported_once_and_when_it_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    clock = [now]
    monkeypatch.setattr("pathways_ray.deployment.span_export.time.monotonic", lambda: clock[0])
    exporter = InMemorySpanExporter()
    export = SpanExport(exporter, "see", 1.0, lambda since: records(now))
    assert export.round() == 1
    assert export.round() == 0
    root, devices = exporter.get_finished_spans()
    assert (root.name, root.parent) == ("step", None)
    assert devices.parent == root.context
    assert root.attributes is not None
    assert root.start_time is not None
    assert root.end_time is not None
    assert root.attributes["pathways.tenant"] == "bob"
    assert abs(root.end_time / 1e9 - (time.time() - 3.0)) < 60
    assert root.end_time - root.start_time == pytest.approx(1e9, abs=1e3)
    assert root.resource.attributes["service.name"] == "pathways"
    clock[0] = now + 2 * SETTLED_S
    assert export.round() == 1
    assert not exporter.get_finished_spans()[-1].status.is_ok


def test_what_a_collector_does_not_take_is_counted() -> None:
    class Away(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            return SpanExportResult.FAILURE

    export = SpanExport(Away(), "see", 1.0, lambda since: records(time.monotonic()))
    export.round()
    assert export.lost == 2


def test_the_time_of_gathering_moves_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 5 s to gather, by a clock that also goes on with each look at it."""
    clock = [1000.0]

    def monotonic() -> float:
        clock[0] += 0.001
        return clock[0]

    def gather(since: float) -> Records:
        clock[0] += 5.0
        return records(1000.0)

    monkeypatch.setattr("pathways_ray.deployment.span_export.time.monotonic", monotonic)
    monkeypatch.setattr("pathways_ray.deployment.span_export.time.time", lambda: monotonic() + 1e6)
    exporter = InMemorySpanExporter()
    SpanExport(exporter, "see", 1.0, gather).round()
    root, devices = exporter.get_finished_spans()
    assert root.start_time is not None
    assert devices.start_time is not None
    assert root.start_time / 1e9 == pytest.approx(1e6 + 996.0, abs=0.01)
    assert devices.start_time - root.start_time == pytest.approx(0.2e9, abs=1e3)


def test_launches_that_are_not_in_the_sample_are_not_counted() -> None:
    exporter = InMemorySpanExporter()
    assert SpanExport(exporter, "see", 0.0, lambda since: records(time.monotonic())).round() == 0
    assert not exporter.get_finished_spans()


def test_a_launch_that_lasts_over_rounds_is_exported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are asked for what is over since the last round; each interval is exported once."""
    clock = [1000.0]
    records = Records(
        ended=[Ended(1, 7, 5, 1001.0, 1021.0, 1), Ended(2, 7, 5, 1004.5, 1005.0, 2)],
        schedulers={0: [Interval(1, 1001.0, 1021.0), Interval(2, 1004.5, 1005.0)]},
        ran={0: [Interval(2, 1004.5, 1005.0), Interval(1, 1006.0, 1008.0)], 1: [Interval(1, 1008.0, 1021.0)]},
        waits={1: [Interval(1, 1001.0, 1006.0)]},
    )

    def gather(since: float) -> Records:
        def over(found: Any) -> Any:
            return [one for one in found if since <= one.end <= clock[0]]

        kinds = {kind: {n: over(found) for n, found in getattr(records, kind).items()} for kind in KINDS}
        return msgspec.structs.replace(records, ended=over(records.ended), **kinds)

    monkeypatch.setattr("pathways_ray.deployment.span_export.time.monotonic", lambda: clock[0])
    exporter = InMemorySpanExporter()
    export = SpanExport(exporter, "see", 1.0, gather)
    for _ in range(8):
        clock[0] += 5.0
        export.round()
    spans = exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 2
    assert sorted(span.name for span in spans) == [
        *("data for host 1", "devices of host 0", "devices of host 0", "devices of host 1"),
        *("island 0", "island 0", "launch", "launch"),
    ]
    assert not any(found for kind in export.carried.values() for found in kind.values())


def test_no_more_than_so_many_intervals_are_kept_for_a_launch_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("pathways_ray.deployment.span_export.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("pathways_ray.deployment.span_export.CARRIED", 3)
    export = SpanExport(
        InMemorySpanExporter(), "see", 1.0, lambda since: Records(ran={0: [Interval(1, clock[0] - 4, clock[0] - 3)]})
    )
    for _ in range(9):
        clock[0] += 5.0
        export.round()
    assert [one.end for one in export.carried["ran"][0]] == [1032.0, 1037.0, 1042.0]
