"""The Grafana dashboard and the alert rules name what the collector exposes."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_budget.metrics import BudgetCollector
from celery_budget.metrics.catalogue import BY_NAME, CATALOGUE, Metric
from tests.monitoring.promql import OF_COUNTERS, OF_GAUGES, Named, read

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs/monitoring/grafana/celery_budget.json"
RULES = ROOT / "docs/monitoring/prometheus/rules.yml"
RULES_TEST = ROOT / "tests/monitoring/rules_test.yml"
PAGE = ROOT / "docs/metrics.md"

#: By whom a scrape was answered; Prometheus adds them.
OF_TARGETS = {"job", "instance", "pod"}
SERIES: dict[str, Metric] = {name: metric for metric in CATALOGUE for name in metric.series}

dashboard = json.loads(DASHBOARD.read_text("utf-8"))
panels: list[dict[str, Any]] = dashboard["panels"]
plots = [panel for panel in panels if panel["type"] != "row"]
groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
rules = [rule for group in groups for rule in group["rules"]]
alerts = {rule["alert"]: rule for rule in rules}
#: What each panel asks, with what Grafana would put in, and how it is shown.
asked = {
    f"{panel['title']}-{target['refId']}": (
        target["expr"].replace("$__rate_interval", "5m"),
        target["legendFormat"],
    )
    for panel in plots
    for target in panel["targets"]
}


def checked(expression: str) -> Named:
    """Check the names in an expression, and whether its functions fit what they are of."""
    named = read(expression)
    assert named.metrics
    assert named.metrics - SERIES.keys() == set()
    assert (named.grouped | named.dropped) - labels_of(named) == set()
    for metric, label in named.matched:
        assert label in SERIES[metric].all_labels | OF_TARGETS, (metric, label)
    for metric, function in named.functions:
        grows = SERIES[metric].kind in ("counter", "histogram")
        assert not (function in OF_COUNTERS and not grows), (metric, function)
        assert not (function in OF_GAUGES and grows), (metric, function)
        assert grows is (function in OF_COUNTERS), f"{metric} is a counter: of what time?"
    return named


def labels_of(named: Named) -> set[str]:
    """Labels that any of its metrics has."""
    return OF_TARGETS.union(*(SERIES[name].all_labels for name in named.metrics))


def left_of(named: Named) -> set[str]:
    """Labels that are left in what an expression gives."""
    return labels_of(named) - named.dropped if named.by is None else named.by


def test_the_collector_describes_the_catalogue() -> None:
    described = {
        family.name + {"counter": "_total", "info": "_info"}.get(family.type, ""): family.type
        for family in BudgetCollector(None).describe()  # type: ignore[arg-type]
    }
    assert described == {metric.name: metric.kind for metric in CATALOGUE}


@pytest.mark.parametrize("name", alerts)
def test_a_rule_names_what_there_is(name: str) -> None:
    rule = alerts[name]
    named = checked(rule["expr"])
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    for text in rule["annotations"].values():
        used = set(re.findall(r"\$labels\.(\w+)", text))
        assert used - left_of(named) == set()
        assert not re.search(r"\{\{(?! \$(labels\.\w+|value \| humanize\w*) \}\})", text), text


@pytest.mark.parametrize(
    "wrong",
    [
        "celery_budget_upp",
        'celery_budget_up{job="a"} + other_metric',
        'celery_budget_spent{stage="a"}',
        "sum by (stage) (celery_budget_spent)",
        "max without (host) (celery_budget_spent)",
        "rate(celery_budget_spent[5m])",
        "celery_budget_charged_total",
        "delta(celery_budget_charged_total[5m])",
        "increase(celery_budget_wait_seconds[5m])",
        "celery_budget_up # comment",
        "1",
    ],
)
def test_what_names_something_else_is_found_out(wrong: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        checked(wrong)


def test_names_of_rules_are_unique_and_on_the_page() -> None:
    assert len(alerts) == len(rules)
    listed = re.findall(r"`(CeleryBudget\w+)`", PAGE.read_text("utf-8"))
    assert sorted(listed) == sorted(alerts)


def test_each_alert_is_tested_by_promtool() -> None:
    text = RULES_TEST.read_text("utf-8")
    assert [name for name in alerts if f'"{name}"' not in text] == []
    for tests in yaml.safe_load(text)["tests"]:
        for one in tests["input_series"]:
            named = read(one["series"])
            [metric] = named.metrics
            labels = {label for _, label in named.matched} - OF_TARGETS
            assert labels == SERIES[metric].all_labels, one["series"]


@pytest.mark.parametrize("name", asked)
def test_a_panel_names_what_there_is(name: str) -> None:
    expression, legend = asked[name]
    named = checked(expression)
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) - left_of(named) == set()


def test_variables_are_defined_and_ask_for_what_there_is() -> None:
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([one["targets"] for one in plots])))
    assert used == {*variables, "__rate_interval"}
    assert variables.pop("datasource")["type"] == "datasource"
    for one in variables.values():
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"])
        assert query is not None
        [metric] = read(query[1]).metrics
        assert query[2] == one["name"]
        assert query[2] in SERIES[metric].all_labels | OF_TARGETS


def test_panels_stand_beside_each_other() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] >= 0
        assert at["x"] + at["w"] <= 24
        assert at["w"] > 0 < at["h"]
        return set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )

    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert not taken & cells(panel), panel["title"]
        taken |= cells(panel)
    # Nor are there holes.
    assert taken == set(itertools.product(range(24), range(max(y for _, y in taken) + 1)))


def test_the_dashboard_has_the_form_that_grafana_reads() -> None:
    for key, kind in {
        "annotations": dict, "editable": bool, "panels": list, "refresh": str, "schemaVersion": int,
        "tags": list, "templating": dict, "time": dict, "timezone": str, "title": str, "uid": str,
    }.items():  # fmt: skip
        assert isinstance(dashboard[key], kind), key
    assert "id" not in dashboard
    assert len(dashboard["uid"]) <= 40
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    assert len({panel["title"] for panel in panels}) == len(panels)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in plots:
        assert panel["type"] in ("stat", "timeseries", "bargauge")
        assert panel["description"]
        assert panel["datasource"] == source
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert isinstance(panel["fieldConfig"]["overrides"], list)
        assert isinstance(panel["options"], dict)
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs))
        assert {json.dumps(one["datasource"]) for one in panel["targets"]} == {json.dumps(source)}


def test_every_metric_of_the_ledger_is_on_the_dashboard() -> None:
    shown = set().union(*(read(expression).metrics for expression, _ in asked.values()))
    left = {metric.name for metric in CATALOGUE if not metric.series & shown}
    assert left == {
        f"celery_budget_{name}"
        for name in (
            "build_info",
            "available",
            "budgets",
            "estimator_requests_total",
            "estimator_drift_ratio",
            "quarantine_limit",
            "relay_silence_seconds",
            "lane_units",
            "lane_awake",
            "relay_broker_down",
        )
    }


def test_the_page_lists_every_metric() -> None:
    row = re.compile(r"^\| `(celery_budget_\w+)` \| (\w+) \|(.*?)\| (.+) \|$", re.MULTILINE)
    listed = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, meaning in row.findall(PAGE.read_text("utf-8"))
    ]
    assert listed == [(one.name, one.kind, one.labels, one.help) for one in CATALOGUE]


def test_names_on_the_page_exist() -> None:
    named = set(re.findall(r"\bcelery_budget_\w+", PAGE.read_text("utf-8")))
    assert named - SERIES.keys() - BY_NAME.keys() == set()


def test_promtool_finds_the_rules_right_and_each_alert_fires(promtool: str) -> None:
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(RULES_TEST)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_can_read_what_the_dashboard_asks(promtool: str, tmp_path: Path) -> None:
    records = [
        {"record": f"of:panel:{number}", "expr": expression}
        for number, (expression, _) in enumerate(asked.values())
    ]
    file = tmp_path / "asked.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": records}]}))
    done = subprocess.run(
        [promtool, "check", "rules", "--lint=none", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
