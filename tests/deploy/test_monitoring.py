"""Files of deploy/monitoring: each metric is one that a controller serves, each alert has a section of the runbook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from pathways_ray.controller import metrics
from pathways_ray.observe import diagnosis
from tests.unit.controller.test_metrics import STATUS

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")


def served() -> set[str]:
    """The names of all samples of a scrape."""
    families = text_string_to_metric_families(metrics.text(STATUS).decode())
    return {sample.name for family in families for sample in family.samples}


def named(expression: str) -> set[str]:
    return set(re.findall(r"pathways_\w+", expression))


def test_each_metric_of_an_alert_is_served() -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert named(rule["expr"]) <= served(), rule["alert"]
        assert f"## {rule['alert']}\n" in RUNBOOK


def test_a_queue_is_long_for_ten_minutes_before_somebody_is_called() -> None:
    """The least of what a series has had lately is its first value, where it is new."""
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    (rule,) = [rule for rule in group["rules"] if rule["alert"] == "PathwaysQueueGrows"]
    assert rule["for"] == "10m"
    assert not [rule for rule in group["rules"] if "_over_time" in rule["expr"] and "for" not in rule]


def test_each_metric_of_the_dashboard_is_served_and_each_that_is_served_is_shown() -> None:
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    shown = {name for panel in dashboard["panels"] for target in panel["targets"] for name in named(target["expr"])}
    assert shown <= served()
    assert {re.sub("_(sum|count|bucket)$", "", name) for name in served()} == {
        re.sub("_bucket$", "", name) for name in shown
    }
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))


def test_the_scrape_shows_the_token_and_reads_the_alerts() -> None:
    scrape = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert scrape["rule_files"] == ["alerts.yml"]
    (job,) = scrape["scrape_configs"]
    assert job["authorization"]["type"] == "Bearer"
    assert "metrics_path" not in job


def test_each_finding_has_its_place_in_the_runbook() -> None:
    source = Path(diagnosis.__file__).read_text(encoding="utf-8")
    kinds = set(re.findall(r'Finding\("(?:error|warning)", "([\w-]+)"', source)) | {"controller-silent"}
    assert len(kinds) > 8
    assert {kind for kind in kinds if f"`{kind}`" not in RUNBOOK} == set()
