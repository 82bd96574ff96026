"""Every rule of ``budget check``: what it finds, that it finds nothing else, and its page."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from celery_budget.core import rules
from celery_budget.core.checkup import (
    BrokerSeen,
    Facts,
    RelayHost,
    ReplicaSeen,
    StoreSeen,
    TaskSeen,
    WorkerSeen,
)
from celery_budget.core.rules import RULES, judge
from tests.messages import JARGON, REMEDY, whole, written

PAGE = Path(__file__).resolve().parents[2] / "docs" / "check.md"

STORE = StoreSeen(
    "postgresql",
    settings={
        "synchronous_commit": "on",
        "fsync": "on",
        "full_page_writes": "on",
        "statement_timeout": "0",
    },
    version=140_005,
    max_connections=100,
    standbys=(1, 1),
    clock_seconds=0.2,
    round_trip_seconds=0.01,
    mark="m",
    relays=(RelayHost("here", 7, 1.0),),
)
SQLITE = replace(
    STORE,
    dialect="sqlite",
    settings={},
    version=None,
    max_connections=None,
    file_system="ext4",
    free_bytes=10**12,
)
WORKER = WorkerSeen(
    "w@here",
    version="1",
    schema="0010",
    root="default",
    ledger="d",
    mark="m",
    host="here",
    lease_seconds=60.0,
    pool="prefork",
    concurrency=4,
    prefetch=16,
    clock_seconds=-0.1,
    round_trip_seconds=0.01,
)
CLEAN = Facts(
    host="here",
    pid=1,
    version="1",
    schema="0010",
    root="default",
    ledger="d",
    lease_seconds=60.0,
    lock_seconds=5.0,
    result_seconds=86_400.0,
    brokers=(
        BrokerSeen("", "amqp", "py-amqp", error=""),
        BrokerSeen("eu", "redis", "redis", visibility_seconds=3600.0, error=""),
    ),
    tasks=(
        TaskSeen("shop.draft", says_budget=True, acks_late=True, time_limit=600.0),
        TaskSeen("shop.plain", budgeted=False, ignore_result=True),
        TaskSeen("shop.joined", reuse_seconds=3600.0),
    ),
    store=STORE,
    workers=(WORKER,),
    backend="RedisBackend",
    result_expires=86_400.0,
    replica=ReplicaSeen("postgresql://r/b", mark="m"),
)


def broker(**changes: Any) -> Facts:
    return replace(CLEAN, brokers=(replace(CLEAN.brokers[0], **changes),))


def redis(**changes: Any) -> Facts:
    return replace(CLEAN, brokers=(replace(CLEAN.brokers[1], **changes),))


def task(**changes: Any) -> Facts:
    return replace(CLEAN, tasks=(replace(CLEAN.tasks[0], **changes),))


def store(**changes: Any) -> Facts:
    return replace(CLEAN, store=replace(STORE, **changes))


def replica(**changes: Any) -> Facts:
    return replace(CLEAN, replica=ReplicaSeen("postgresql://r/b", **{"mark": "m", **changes}))


def sqlite(**changes: Any) -> Facts:
    return replace(CLEAN, store=replace(SQLITE, **changes))


def worker(**changes: Any) -> Facts:
    return replace(CLEAN, workers=(replace(WORKER, **changes),))


#: What is wrong, which rule finds it, at which level, and what it says.
WRONG: list[tuple[str, str, str, Facts]] = [
    ("confirms", "error", "confirm_publish is off for the broker", broker(confirms=False)),
    ("confirms", "error", "librabbitmq, which has no", broker(driver="librabbitmq")),
    ("broker", "error", "the broker cannot be reached: refused", broker(error="refused")),
    ("memory-broker", "error", "runs in another process", broker(transport="memory")),
    (
        "memory-broker",
        "warning",
        "the broker is memory://",
        replace(
            broker(transport="memory"), store=replace(STORE, relays=(RelayHost("here", 1, 0.1),))
        ),
    ),
    (
        "visibility-lease",
        "error",
        "again after 59 s",
        replace(redis(visibility_seconds=59.0), tasks=()),
    ),
    (
        "visibility-time-limit",
        "warning",
        "shop.draft may run longer",
        redis(visibility_seconds=599.0),
    ),
    (
        "visibility-time-limit",
        "warning",
        "shop.draft may run longer",
        replace(task(time_limit=None), task_time_limit=3601.0),
    ),
    ("gate", "error", "past all budgets", replace(CLEAN, gate_error="past all budgets")),
    ("other-base", "error", "shop.draft: budget=", task(budgeted=False)),
    (
        "early-rerun",
        "error",
        "shop.draft: reject_on_worker_lost",
        task(acks_late=False, reject_on_worker_lost=True),
    ),
    ("acks-on-failure", "warning", "shop.draft: acks_on", task(acks_on_failure=False)),
    ("not-enforced", "warning", "shop.draft: nothing is refused", task(enforced=False)),
    (
        "not-enforced",
        "warning",
        "shop.draft: nothing is refused",
        replace(sqlite(), tasks=task(enforced=False).tasks),
    ),
    ("prefetch", "warning", "without a bound", replace(CLEAN, prefetch=0)),
    ("prefetch", "warning", "w@here takes 5,000 messages", worker(prefetch=5000)),
    ("result-backend", "warning", "no result_backend", replace(CLEAN, backend="disabled")),
    ("result-expires", "error", "result_expires is 7200 s", replace(CLEAN, result_expires=7200.0)),
    ("reuse-expires", "error", "shop.draft: reuse= is longer", task(reuse_seconds=90_000.0)),
    ("ignore-result", "warning", "shop.draft: ignore_result", task(ignore_result=True)),
    ("ledger", "error", "refused", store(error="refused")),
    ("migrations", "error", "version 0006", store(schema_error="version 0006")),
    ("read-only", "error", "read-only transaction", store(write_error="a read-only transaction")),
    ("disk", "warning", "99 MiB are free", sqlite(free_bytes=99 * 1024 * 1024)),
    ("sqlite-network", "error", "the ledger's file is on nfs4", sqlite(file_system="nfs4")),
    (
        "sqlite-hosts",
        "warning",
        "used on there as well",
        sqlite(relays=(RelayHost("there", 1, 9.0), RelayHost("gone", 1, 99.0))),
    ),
    (
        "sqlite-hosts",
        "warning",
        "used on there as well",
        replace(sqlite(), workers=(replace(WORKER, host="there"),)),
    ),
    (
        "sqlite-hosts",
        "error",
        "there has another file",
        replace(sqlite(), workers=(replace(WORKER, host="there", mark="n"),)),
    ),
    (
        "distributed",
        "error",
        "not distributed: budget_new",
        store(distributed=True, undistributed=("budget_new",)),
    ),
    ("durability", "error", "fsync is off", store(settings={"fsync": "off"})),
    ("standbys", "warning", "2 standbys, and no commit waits", store(standbys=(2, 0))),
    (
        "standbys",
        "warning",
        "1 standby, and synchronous_commit is local",
        store(standbys=(1, 1), settings={"synchronous_commit": "local"}),
    ),
    ("server-version", "error", "PostgreSQL 13", store(version=130_011)),
    (
        "statement-timeout",
        "warning",
        "statement_timeout is 5000 ms",
        store(settings={"statement_timeout": "5000"}),
    ),
    ("clock", "warning", "+1.5 s off", store(clock_seconds=1.5)),
    ("clock", "error", "-20.0 s off", store(clock_seconds=-20.0)),
    ("time-zones", "error", "Mars/Olympus", store(zones_missing=("Mars/Olympus",))),
    ("relay", "warning", "no relay was seen", store(relays=(RelayHost("here", 7, 15.1),))),
    ("relay", "error", "due for 20 s", store(relays=(), overdue_seconds=20.0)),
    ("relay", "warning", "a relay runs, and", store(overdue_seconds=61.0)),
    ("replica", "error", "is down", replica(error="is down")),
    ("replica-ledger", "error", "the first budget in postgresql://r/b", replica(mark="n")),
    ("replica-ledger", "error", "the first budget in postgresql://r/b", replica(mark=None)),
    ("replica-read-only", "warning", "r/b is not in recovery", replica(follows=False)),
    ("replica-read-only", "warning", "r/b can be written", replica(writable=True)),
    ("replica-lag", "warning", "r/b is 10.0 s behind", replica(behind_seconds=10.0)),
    ("replica-lag", "warning", "does not tell", replica(behind_seconds=None)),
    ("workers", "warning", "no worker answered", replace(CLEAN, workers=())),
    (
        "workers",
        "warning",
        "worker_enable_remote_control is off",
        replace(CLEAN, workers=(), remote_control=False),
    ),
    ("workers-extension", "error", "w@here does not know", worker(knows=False)),
    ("workers-extension", "error", "without CeleryBudget", worker(installed=False)),
    ("workers-ledger", "error", "w@here has the root 'other'", worker(root="other")),
    ("workers-ledger", "error", "another ledger", worker(ledger="e", mark="n")),
    ("workers-ledger", "error", "another ledger", worker(mark="n")),
    ("workers-ledger", "error", "another ledger", worker(ledger="e", mark=None)),
    ("workers-ledger", "error", "cannot ask its ledger: refused", worker(error="refused")),
    ("workers-version", "warning", "w@here has version 2", worker(version="2")),
    ("workers-version", "error", "needs schema 0008", worker(schema="0008")),
    ("workers-lease", "warning", "w@here has 10 s", worker(lease_seconds=10.0)),
    ("workers-clock", "warning", "w@here is +2.0 s off", worker(clock_seconds=2.0)),
    ("workers-clock", "error", "w@here is -16.0 s off", worker(clock_seconds=-16.0)),
    ("pool-size", "warning", "runs 16 tasks at once", worker(pool="gevent", concurrency=16)),
    ("max-connections", "warning", "some 103 connections", worker(concurrency=100)),
    ("spool", "error", "w@here: /s cannot be written", worker(spool_error="/s cannot be written")),
    ("spool", "warning", "here, s: no", replace(CLEAN, spool="s", spool_error="no")),
    (
        "authorize",
        "error",
        "cannot be imported",
        replace(CLEAN, authorize_error="cannot be imported"),
    ),
    ("on-alert", "error", "cannot be imported", replace(CLEAN, alert_error="cannot be imported")),
    ("prices", "warning", "m-1 at 2", replace(CLEAN, prices_differ=("m-1 at 2",))),
]


#: What cannot be seen, and which rules do not look then.
SKIPPED: list[tuple[Facts, set[str]]] = [
    (
        replace(CLEAN, workers=None, workers_why="the broker cannot be reached"),
        {
            "workers", "workers-extension", "workers-ledger", "workers-version",
            "workers-lease", "workers-clock", "pool-size", "max-connections",
        },
    ),
    (
        store(error="refused"),
        {
            "migrations", "read-only", "disk", "sqlite-network", "sqlite-hosts", "durability",
            "standbys", "server-version", "statement-timeout", "clock", "time-zones", "relay",
            "distributed",
        },
    ),
    (store(standbys=None), {"standbys"}),
    (
        store(schema_error="version 0006"),
        {"read-only", "time-zones", "relay", "distributed"},
    ),
    (broker(error=None), {"broker"}),
]  # fmt: skip
#: All that rules judge in these tests.
SEEN = [
    *(facts for _, _, _, facts in WRONG),
    *(facts for facts, _ in SKIPPED),
    replace(CLEAN, replica=None),
    replace(sqlite(), brokers=broker(transport="filesystem").brokers),
    store(distributed=True, undistributed=tuple("abcdef")),
]


def problems(facts: Facts) -> list[tuple[str, str, str]]:
    found = judge(facts)
    return [
        (one.id, one.level, one.seen) for level in ("error", "warning") for one in found.of(level)
    ]


@pytest.mark.parametrize("facts", [CLEAN, sqlite()], ids=["postgresql", "sqlite"])
def test_a_clean_configuration_triggers_nothing(facts: Facts) -> None:
    found = judge(facts)
    assert problems(facts) == []
    assert found.of("skipped") == ()
    assert found.ok
    assert len(found.findings) == len(RULES)


@pytest.mark.parametrize(
    ("rule", "level", "said", "facts"),
    WRONG,
    ids=[f"{number}-{one[0]}" for number, one in enumerate(WRONG)],
)
def test_what_is_wrong_is_found_by_its_rule_alone(
    rule: str, level: str, said: str, facts: Facts
) -> None:
    [(found, of_level, seen)] = problems(facts)
    assert (found, of_level) == (rule, level)
    assert said in seen
    [finding] = [one for one in judge(facts).findings if one.id == rule]
    assert finding.why
    assert finding.remedy


def test_every_rule_is_triggered_by_some_test() -> None:
    assert {rule for rule, _, _, _ in WRONG} == {rule.id for rule in RULES}
    assert len({rule.id for rule in RULES}) == len(RULES)


def templates() -> dict[str, str]:
    """What functions of the rules say, by where, with ``…`` for what is put in."""
    found = {}
    for path in sorted(Path(rules.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef):
                body = ast.Module(function.body, [])
                parts = {
                    id(part) for node in ast.walk(body) for part in getattr(node, "values", ())
                }
                parts |= {id(node.value) for node in ast.walk(body) if isinstance(node, ast.Expr)}
                for node in ast.walk(body):
                    said = written(node) if isinstance(node, ast.expr) else None
                    if said and " " in said.replace("…", "") and id(node) not in parts:
                        found[f"{path.name}:{node.lineno}"] = said  # type: ignore[attr-defined]
    return found


def test_every_rule_says_each_of_its_texts_in_some_test() -> None:
    seen = {one.seen for facts in (CLEAN, sqlite(), *SEEN) for one in judge(facts).findings}
    left = {
        where: said
        for where, said in templates().items()
        if not any(whole(said).search(one) for one in seen)
    }
    assert left == {}


def test_every_rule_says_what_to_do() -> None:
    for rule in RULES:
        assert REMEDY.search(rule.remedy), rule.id
        assert not JARGON.search(rule.why + rule.remedy)


@pytest.mark.parametrize(
    ("facts", "skipped"),
    SKIPPED,
    ids=["workers", "ledger", "standbys", "tables", "broker"],
)
def test_what_cannot_be_seen_is_skipped_with_the_reason(facts: Facts, skipped: set[str]) -> None:
    found = judge(facts)
    assert {one.id for one in found.of("skipped")} == skipped
    assert all(one.seen for one in found.of("skipped"))


def test_a_clock_is_as_uncertain_as_the_way_to_it() -> None:
    assert problems(store(clock_seconds=1.5, round_trip_seconds=1.2)) == []
    assert problems(worker(clock_seconds=-1.5, round_trip_seconds=1.2)) == []


def test_one_that_reaches_the_same_ledger_by_another_name_has_no_other() -> None:
    assert problems(worker(ledger="e")) == []


def test_findings_come_gravest_first_and_are_data() -> None:
    facts = replace(store(error="refused"), workers=())
    found = judge(facts)
    levels = [one.level for one in found.findings]
    assert levels == sorted(levels, key=("error", "warning", "skipped", "ok").index)
    assert found.as_dict()["counts"]["error"] == 1
    assert found.as_dict()["ok"] is False


def test_the_page_lists_every_rule_with_its_level_and_remedy() -> None:
    row = re.compile(r"^\| `([\w-]+)` \| (error|warning) \| (.+) \| (.+) \|$", re.MULTILINE)
    rows = row.findall(PAGE.read_text("utf-8"))
    assert [found[:2] for found in rows] == [(rule.id, rule.level) for rule in RULES]
    assert [found[3] for found in rows] == [rule.remedy for rule in RULES]
