"""``budget relay --health``, and relays in reports: for probes and for people."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from celery_budget import budgeted
from celery_budget.core.identity import new_id
from celery_budget.store import relays, schema
from celery_budget.store.schema import relays as table
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

HERE = socket.gethostname()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def seen(shop: Shop, host: str = HERE, seconds: float = 0, pid: int = 4711) -> None:
    """Let a relay have been seen some time ago."""
    store, root, relay_id = shop.budget.store, shop.budget.settings.root, new_id()
    store.run(relays.announce, root, relay_id, host, pid)
    shop.sql(
        table.update()
        .where(table.c.relay_id == relay_id)
        .values(seen_us=table.c.seen_us - int(seconds * 1_000_000))
    )


def test_a_relay_that_was_seen_here_is_healthy(on_both: Shop, run: Run) -> None:
    seen(on_both, seconds=5)
    seen(on_both, seconds=100, pid=4712)
    done = run(on_both.app, "relay", "--health")
    assert (done.code, done.err) == (0, "")
    [row] = done.rows[2:]
    assert (row[:2], row[3:]) == ([HERE, "4711"], ["s", "ago"])
    found = run(on_both.app, "relay", "--health", "--json")
    assert (found.code, found.json["ok"]) == (0, True)
    assert [relay["pid"] for relay in found.json["relays"]] == [4711, 4712]
    assert set(found.json["relays"][0]) == {
        "host", "pid", "started_us", "seen_us", "seconds", "sleeping"
    }  # fmt: skip
    assert 5 <= found.json["relays"][0]["seconds"] < 60


def test_a_full_quarantine_is_told_and_needs_no_restart(
    make_shop: Callable[..., Shop], run: Run
) -> None:
    shop = make_shop(budget_max_quarantine=1)
    seen(shop)
    done = run(shop.app, "relay", "--health")
    assert (done.code, done.err) == (0, "")
    assert run(shop.app, "relay", "--health", "--json").json["quarantine_full"] is False

    def draft() -> None:
        pass

    task = shop.app.task(name="kept", shared=False)(draft)
    shop.budget.set("tenant:a", limit=10, unit="tokens")
    budgeted(budget="tenant:a", estimate=1)(task).delay()
    shop.sql(schema.outbox.update().values(envelope="{"))
    assert shop.relay().quarantined == 1
    done = run(shop.app, "relay", "--health")
    said = "quarantine is full: what fails for good is not kept; see "
    assert (done.code, done.err) == (0, f"{said}'celery -A PROJ budget quarantine list'\n")
    found = run(shop.app, "relay", "--health", "--json")
    assert (found.code, found.json["ok"], found.json["quarantine_full"]) == (0, True, True)


@pytest.mark.parametrize("ago", [None, 16])
def test_none_or_one_that_is_gone_is_not(shop: Shop, run: Run, ago: float | None) -> None:
    if ago is not None:
        seen(shop, seconds=ago)
    done = run(shop.app, "relay", "--health")
    assert done.failed(1, f"no relay was seen on {HERE} in the last 15 s")
    assert "'celery -A PROJ budget relay'" in done.err
    assert ("the last one 1" in done.err) is (ago is not None)
    found = run(shop.app, "relay", "--health", "--json")
    assert (found.code, found.err, found.json["ok"]) == (1, "", False)


def test_how_long_ago_is_said(shop: Shop, run: Run) -> None:
    seen(shop, seconds=100)
    assert run(shop.app, "relay", "--health", "--max-age", "1000").code == 0
    assert run(shop.app, "relay", "--health", "--max-age", "90.5").failed(1, "the last 90.5 s")


def test_a_relay_elsewhere_counts_where_any_host_will_do(shop: Shop, run: Run) -> None:
    seen(shop, host="elsewhere")
    assert run(shop.app, "relay", "--health").failed(1, f"on {HERE}")
    assert run(shop.app, "relay", "--health", "--any-host").code == 0
    shop.sql(table.delete())
    assert run(shop.app, "relay", "--health", "--any-host").failed(1, "on any host")


def test_a_relay_of_another_root_does_not_count(
    shop: Shop, make_shop: Callable[..., Shop], run: Run
) -> None:
    seen(make_shop(budget_root="other"))
    assert run(shop.app, "relay", "--health", "--any-host").code == 1


@pytest.mark.parametrize("age", ["nan", "inf", "0"])
def test_an_age_that_is_none(shop: Shop, run: Run, age: str) -> None:
    done = run(shop.app, "relay", "--health", "--max-age", age)
    assert done.failed(2, f"'{age}' is not a number of seconds")


@pytest.mark.parametrize("option", [["--max-age", "5"], ["--any-host"], ["--json"]])
def test_its_options_mean_nothing_without_it(shop: Shop, run: Run, option: list[str]) -> None:
    assert run(shop.app, "relay", *option).failed(2, "are for --health")


@pytest.mark.parametrize("age", ["0", "-1", "soon"])
def test_no_age_is_less_than_a_moment(shop: Shop, run: Run, age: str) -> None:
    assert run(shop.app, "relay", "--health", "--max-age", age).code == 2


def test_without_tables_it_says_what_to_do(make_shop: Callable[..., Shop], run: Run) -> None:
    done = run(make_shop(init=False).app, "relay", "--health")
    assert done.failed(1, "run 'celery -A PROJ budget init'")


def test_a_report_lists_relays(shop: Shop, run: Run) -> None:
    assert "No relay runs" in run(shop.app, "report").out
    seen(shop)
    seen(shop, host="elsewhere", seconds=600)
    told = run(shop.app, "report").out
    assert "600." in told
    assert "gone" in told
    assert [relay["host"] for relay in run(shop.app, "report", "--json").json["relays"]] == [
        HERE,
        "elsewhere",
    ]
    assert [relay.host for relay in shop.budget.relays()] == [HERE, "elsewhere"]
