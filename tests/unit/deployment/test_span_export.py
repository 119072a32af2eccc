"""Export of spans: each launch once, when all have noted it, by the time of day; what a collector lacks is counted."""

from __future__ import annotations

import time

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pathways_ray.deployment.span_export import SETTLED_S, SpanExport
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
