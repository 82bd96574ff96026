"""Alerts: raised once a window, told at least once, over when what they are about is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import sqlalchemy as sa

from celery_budget import alerting
from celery_budget.alerting import MOST_TRIES, Alerting, Drifted, Passed
from celery_budget.core.alerts import Alert
from celery_budget.core.budgets import Share
from celery_budget.relay import Unpublishable
from celery_budget.store import Store, alerts
from tests import messages
from tests.contract.racers import at_once
from tests.contract.support import RETURNED, Ledger


@dataclass
class Told:
    """A callable that remembers what it was told, and does what it is told to do."""

    alerts: list[Alert] = field(default_factory=list)
    tries: list[int] = field(default_factory=list)
    does: Callable[[Alert], Any] = lambda alert: None

    def __call__(self, alert: Alert, tries: int) -> None:
        self.alerts.append(alert)
        self.tries.append(tries)
        self.does(alert)

    @property
    def seen(self) -> list[tuple[str, str, float]]:
        return [(one.kind, one.subject, one.threshold) for one in self.alerts]


@dataclass
class Looker:
    """A relay's step that looks each time it is asked to, whenever it has looked before."""

    ledger: Ledger
    told: Told = field(default_factory=Told)
    drifts: list[Drifted] = field(default_factory=list)
    wrong: int = 0

    def __post_init__(self) -> None:
        # Less than a microsecond is none.
        self.settings = replace(
            self.ledger.settings, alert_seconds=1e-7, alert_reconcile_seconds=1e-7
        )
        self.alerting = self.made()

    def made(self, **changes: Any) -> Alerting:
        return Alerting(
            self.ledger.store,
            replace(self.settings, **changes),
            self.told,
            lambda: self.drifts,
            lambda: self.wrong,
        )

    def look(self) -> list[tuple[str, str, float]]:
        """What is told in one more pass."""
        before = len(self.told.alerts)
        self.alerting.run_once()
        return self.told.seen[before:]


@pytest.fixture
def looker(funded: Ledger) -> Looker:
    return Looker(funded)


def test_each_threshold_is_told_once(looker: Looker) -> None:
    ledger = looker.ledger
    ledger.reserve(79)
    assert looker.look() == []
    ledger.reserve(1)
    assert looker.look() == [("budget", "b", 0.8)]
    ledger.reserve(20)
    assert looker.look() == [("budget", "b", 0.95), ("budget", "b", 1.0)]
    assert looker.look() == []
    [first, *_] = looker.told.alerts
    assert (first.value, first.details) == (
        0.8,
        {"unit": "tokens", "limit": 100, "reserved": 80, "spent": 0},
    )
    assert "80%" in first.message
    assert "80 held of 100 tokens" in first.message


def test_holds_and_what_is_spent_count_together(looker: Looker) -> None:
    _, attempt = looker.ledger.start(50)
    attempt.record(50)
    assert attempt.end(RETURNED)
    looker.ledger.reserve(30)
    assert looker.ledger.balance() == (30, 50)
    assert looker.look() == [("budget", "b", 0.8)]


def test_two_lookers_at_once_tell_each_once(looker: Looker) -> None:
    names = [f"b{number}" for number in range(20)]
    for name in names:
        looker.ledger.set(name, 10)
        looker.ledger.reserve(10, budget=name)
    others = [looker.made() for _ in range(4)]
    at_once([one.run_once for one in others])
    # One that found the other looking has still to tell what that raised.
    looker.look()
    assert sorted(looker.told.seen) == sorted(
        ("budget", name, threshold) for name in names for threshold in (0.8, 0.95, 1.0)
    )
    assert set(looker.told.tries) == {1}


def test_several_relays_look_no_more_often_than_one(looker: Looker) -> None:
    seldom = [looker.made(alert_seconds=60.0) for _ in range(3)]
    looker.ledger.reserve(100)
    assert [one.run_once().raised for one in seldom] == [3, 0, 0]


def test_a_clock_that_was_set_back_holds_up_no_look(looker: Looker) -> None:
    looker.ledger.reserve(80)
    assert looker.made(alert_seconds=60.0).run_once().raised == 1
    looker.ledger.put("alert_looks", {"looked_us": sa.text("looked_us + 86400000000")})
    looker.ledger.reserve(15)
    assert looker.made(alert_seconds=60.0).run_once().raised == 1
    looker.ledger.reserve(5)
    assert looker.made(alert_seconds=60.0).run_once().raised == 0


def test_another_window_alerts_anew(looker: Looker) -> None:
    ledger = looker.ledger
    ledger.set("day", 10, period="day")
    ledger.reserve(8, budget="day")
    assert looker.look() == [("budget", "day", 0.8)]
    [alert] = looker.told.alerts
    assert alert.window is not None
    assert alert.window_end is not None
    assert (alert.window_end - alert.window).days == 1
    day = 86_400_000_000
    ledger.age("day", 2 * day)
    [row] = ledger.rows("alerts")
    ledger.put("alerts", {"window_us": row.window_us - 2 * day, "end_us": row.end_us - 2 * day})
    ledger.reserve(8, budget="day")
    assert looker.look() == [("budget", "day", 0.8)]
    assert len(ledger.rows("alerts")) == 2
    # That of the window that is over goes with the sweep, and stands no more.
    assert len(alerting.standing(ledger.store, ledger.settings)) == 1
    ledger.upkeep()
    assert len(ledger.rows("alerts")) == 1


def test_a_share_that_falls_below_by_a_margin_arms_the_threshold_anew(looker: Looker) -> None:
    ledger = looker.ledger
    ledger.reserve(80)
    assert looker.look() == [("budget", "b", 0.8)]
    # 79.2% and 78.4% of it: within the margin of two points.
    for limit in (101, 102):
        ledger.set("b", limit)
        assert looker.look() == []
    ledger.set("b", 100)
    assert looker.look() == []
    ledger.set("b", 110)
    assert looker.look() == []
    assert alerting.standing(ledger.store, ledger.settings) == ()
    ledger.set("b", 100)
    assert looker.look() == [("budget", "b", 0.8)]
    assert len({one.id for one in looker.told.alerts}) == 2


def test_grants_and_shares_count(looker: Looker) -> None:
    ledger = looker.ledger
    ledger.set("part", Share.parse("10%", "a limit"), parent="b")
    ledger.reserve(8, budget="part")
    assert looker.look() == [("budget", "part", 0.8)]
    ledger.grant("more", 100)
    ledger.reserve(75)
    # 83 of 200.
    assert looker.look() == []


def test_own_thresholds_of_a_budget_and_its_template(looker: Looker) -> None:
    ledger = looker.ledger
    ledger.set("b", 100, alert_at=(500_000,))
    ledger.set("quiet", 100, alert_at=())
    ledger.set("tenant:*", 100, alert_at=(250_000,))
    ledger.set("endless", None)
    for name in ("b", "quiet", "tenant:x", "endless"):
        ledger.reserve(100, budget=name)
    assert sorted(looker.look()) == [("budget", "b", 0.5), ("budget", "tenant:x", 0.25)]
    # A threshold that is taken away has nothing to stand for.
    ledger.set("b", 100, alert_at=(900_000,))
    assert looker.look() == [("budget", "b", 0.9)]
    assert [row.threshold for row in ledger.rows("alerts", subject="b")] == [900_000]


def test_a_limit_of_nothing_alerts_where_anything_is_used(looker: Looker) -> None:
    ledger = looker.ledger
    ledger.set("shut", 0)
    assert looker.look() == []
    ledger.reserve(50)
    ledger.set("b", 0)
    assert looker.look() == [("budget", "b", 0.8), ("budget", "b", 0.95), ("budget", "b", 1.0)]


def test_all_budgets_have_their_turn(looker: Looker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerting, "PAGE", 2)
    monkeypatch.setattr(alerting, "PAGES", 2)
    names = ["b", *(f"c{number}" for number in range(5))]
    for name in names:
        looker.ledger.set(name, 10, alert_at=(MOST_TRIES * 100_000,))
        looker.ledger.reserve(5, budget=name)
    assert [one for _, one, _ in looker.look()] == names[:4]
    assert [one for _, one, _ in looker.look()] == names[4:]
    assert looker.look() == []


def test_what_raises_is_told_again_and_at_last_given_up(
    looker: Looker, caplog: pytest.LogCaptureFixture, told: messages.Told
) -> None:
    def broken(alert: Alert) -> None:
        raise RuntimeError("no way to the pager")

    looker.told.does = broken
    looker.ledger.set("b", 100, alert_at=(800_000,))
    looker.ledger.reserve(80)
    for tries in range(1, MOST_TRIES + 1):
        assert looker.alerting.run_once().failed == 1
        # Later, and not at once.
        assert looker.alerting.run_once() == Passed()
        assert len(looker.told.alerts) == tries
        looker.ledger.put("alerts", {"due_us": 1})
    assert looker.alerting.run_once() == Passed()
    assert looker.told.tries == list(range(1, MOST_TRIES + 1))
    assert len({one.id for one in looker.told.alerts}) == 1
    [stands] = alerting.standing(looker.ledger.store, looker.ledger.settings)
    assert (stands.state, stands.told) == ("failed", None)
    assert "no way to the pager" in caplog.text
    assert "told no more" in caplog.text
    assert {one["error_type"] for one in told("alert.call_failed")} == {"RuntimeError"}
    assert len(told("alert.put_off")) == MOST_TRIES - 1
    assert {one["name"] for one in told("alert.raised")} == {"b"}


def test_a_crash_between_the_call_and_its_mark_tells_it_again(
    looker: Looker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looker.ledger.set("b", 100, alert_at=(800_000,))
    looker.ledger.reserve(80)

    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as broken:
        broken.setattr(alerts, "mark_told", kill)
        with pytest.raises(Killed):
            looker.alerting.run_once()
    other = looker.made()
    # It may be that the first one still tells it.
    assert other.run_once() == Passed()
    looker.ledger.put("alerts", {"due_us": 1})
    assert other.run_once().told == 1
    assert looker.told.tries == [1, 2]
    assert len({one.id for one in looker.told.alerts}) == 1


def test_one_that_hangs_is_said_and_holds_up_no_look(
    looker: Looker, caplog: pytest.LogCaptureFixture
) -> None:
    free, ledger = threading.Event(), looker.ledger
    looker.told.does = lambda alert: free.wait(60)
    ledger.set("b", 100, alert_at=(800_000,))
    ledger.set("c", 100, alert_at=(800_000,))
    ledger.reserve(80)
    hanging = looker.made(alert_call_seconds=0.01)
    assert hanging.run_once() == Passed(raised=1, failed=1)
    assert "has not returned after 0.01 s" in caplog.text
    ledger.reserve(80, budget="c")
    assert hanging.run_once() == Passed(raised=1)
    # Another relay tells the others meanwhile.
    looker.told.does = lambda alert: None
    assert looker.look() == [("budget", "c", 0.8)]
    free.set()
    call = hanging._call
    assert call is not None
    assert call.wait(60)
    hanging.run_once()
    assert {row.state for row in ledger.rows("alerts")} == {"told"}


def test_a_call_that_another_has_taken_since_marks_nothing(looker: Looker) -> None:
    ledger = looker.ledger
    ledger.set("b", 100, alert_at=(800_000,))
    ledger.reserve(80)
    looker.settings = replace(looker.settings)
    store, root = ledger.store, ledger.root
    store.run(alerts.begin_look, root, "budget", 0)
    store.run(alerts.look_at_budgets, root, "", 10, ())
    first = store.run(alerts.take_due, root, 0)
    second = store.run(alerts.take_due, root, 60_000_000)
    assert store.run(alerts.take_due, root, 0) is None
    assert not store.run(alerts.mark_told, root, first)
    assert not store.run(alerts.put_off, root, first, 0)
    assert store.run(alerts.mark_told, root, second)


def test_an_alert_that_is_not_told_yet_stays_when_it_is_over(looker: Looker) -> None:
    def broken(alert: Alert) -> None:
        raise RuntimeError

    looker.told.does = broken
    looker.ledger.set("b", 100, alert_at=(800_000,))
    looker.ledger.reserve(80)
    looker.look()
    looker.ledger.set("b", 1000)
    looker.told.does = lambda alert: None
    looker.ledger.put("alerts", {"due_us": 1})
    assert looker.look() == [("budget", "b", 0.8)]
    looker.look()
    assert looker.ledger.rows("alerts") == []


def test_the_oldest_parked_request(looker: Looker) -> None:
    ledger = looker.ledger
    request = ledger.request(200, budget="b")
    ledger.set("b", 100, alert_at=())
    ledger.admit(request, continuation=True)
    assert looker.look() == []
    ledger.put("parked", {"created_us": ledger.now() - 3_700_000_000})
    assert looker.look() == [("parked", "", 3600.0)]
    [alert] = looker.told.alerts
    assert alert.details == {"task_id": request.task_id, "budget": "b"}
    assert (alert.window, alert.window_end) == (None, None)
    assert looker.look() == []
    ledger.put("parked", {"created_us": ledger.now()})
    looker.look()
    assert alerting.standing(ledger.store, ledger.settings) == ()


def test_what_goes_into_quarantine(looker: Looker) -> None:
    def reject(message: Any) -> None:
        raise Unpublishable("unroutable", "no such exchange")

    ledger = looker.ledger
    looker.settings = replace(looker.settings, alert_quarantine=1, max_quarantine=3)
    looker.alerting = looker.made()
    ledger.broker.on_publish = reject
    for _ in range(2):
        ledger.reserve(1)
    assert ledger.relay().quarantined == 2
    assert looker.look() == [("quarantine_growth", "", 1)]
    ledger.reserve(1)
    ledger.relay()
    assert looker.look() == [("quarantine_full", "", 0.8)]
    # It grows no more an hour later, and is as full.
    ledger.put("quarantine", {"quarantined_us": 1})
    looker.look()
    [stands] = alerting.standing(ledger.store, ledger.settings)
    assert stands.alert.kind == "quarantine_full"


def test_messages_that_are_overdue(looker: Looker) -> None:
    ledger = looker.ledger
    request = ledger.reserve(1)
    assert looker.look() == []
    ledger.put(
        "outbox",
        {
            "due_us": ledger.now() - 61_000_000,
            "task_name": "draft\n[CRITICAL]",
            "last_error": "refused\r\n by all",
        },
    )
    assert looker.look() == [("overdue", "", 60.0)]
    [alert] = looker.told.alerts
    assert "a message of draft [CRITICAL] has been due" in alert.message
    assert alert.message.endswith("is not published: refused by all")
    ledger.make_due(request)
    assert ledger.relay().published == 1
    looker.look()
    assert alerting.standing(ledger.store, ledger.settings) == ()


def test_what_a_relay_has_in_hand_is_overdue_still(looker: Looker) -> None:
    ledger = looker.ledger
    ledger.reserve(1)
    ledger.put("outbox", {"due_us": ledger.now() - 61_000_000})
    looker.look()

    def look(message: Any) -> None:
        looker.look()

    ledger.broker.on_publish = look
    assert ledger.relay().published == 1
    assert looker.told.seen == [("overdue", "", 60.0)]


def test_drift_by_enough_requests(looker: Looker) -> None:
    looker.drifts = [Drifted("draft (constant:1)", 2.0, 1.5, 19), Drifted("x", 3.0, 1.5, 20)]
    assert looker.look() == [("drift", "x", 1.5)]
    assert looker.look() == []
    looker.drifts = []
    looker.look()
    assert alerting.standing(looker.ledger.store, looker.ledger.settings) == ()


def test_a_ledger_that_does_not_add_up(looker: Looker) -> None:
    assert looker.look() == []
    looker.wrong = 2
    assert looker.look() == [("reconcile", "", 1)]
    assert looker.told.alerts[0].value == 2


def test_what_stands_is_told_before_the_proof_which_takes_long(looker: Looker) -> None:
    looker.drifts = [Drifted("draft", 2.0, 1.5, 20)]
    seen: list[list[tuple[str, str, float]]] = []

    def prove() -> int:
        seen.append(list(looker.told.seen))
        return 1

    Alerting(
        looker.ledger.store, looker.settings, looker.told, lambda: looker.drifts, prove
    ).run_once()
    assert seen == [[("drift", "draft", 1.5)]]
    assert looker.told.seen[1:] == [("reconcile", "", 1)]


def test_a_proof_that_breaks_off_is_tried_again_soon(looker: Looker) -> None:
    proofs: list[int] = []

    def prove() -> int:
        proofs.append(1)
        if len(proofs) == 1:
            raise RuntimeError("the ledger went away")
        return 0

    ledger = looker.ledger
    settings = replace(looker.settings, alert_reconcile_seconds=86_400.0)
    daily = Alerting(ledger.store, settings, looker.told, prove=prove)
    with pytest.raises(RuntimeError):
        daily.run_once()
    daily.run_once()
    assert len(proofs) == 1
    # Ten minutes later.
    looked = ledger.rows("alert_looks", what="reconcile")[0].looked_us
    ledger.put("alert_looks", {"looked_us": looked - 601_000_000}, what="reconcile")
    daily.run_once()
    ledger.put("alert_looks", {"looked_us": looked - 601_000_000}, what="budget")
    daily.run_once()
    assert len(proofs) == 2


def test_what_is_switched_off_is_not_looked_at(looker: Looker) -> None:
    off = looker.made(
        alert_at=(),
        alert_parked_seconds=0.0,
        alert_quarantine=0,
        alert_drift_requests=0,
        alert_overdue_seconds=0.0,
        alert_reconcile_seconds=0.0,
    )
    looker.ledger.reserve(100)
    looker.ledger.put("outbox", {"due_us": 1})
    looker.wrong, looker.drifts = 1, [Drifted("x", 3.0, 1.5, 99)]
    assert off.run_once() == Passed()


def test_a_look_reads_a_page_whatever_else_there_is(store: Store, ledger: Ledger) -> None:
    """No statement of a look goes through a table of balances, budgets or messages."""
    for number in range(300):
        ledger.set(f"b{number:03}", 10)
    ledger.reserve(1, budget="b000")
    statements: list[tuple[str, Any]] = []

    def note(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: Any
    ) -> None:
        if "SELECT" in statement and "EXPLAIN" not in statement:
            statements.append((statement, parameters))

    looker = Looker(ledger)
    looker.look()
    if store.dialect == "postgresql":
        with store.statement() as connection:
            connection.execute(sa.text("ANALYZE budget_budgets, budget_balances"))
    sa.event.listen(store.engine, "before_cursor_execute", note)
    try:
        store.run(alerts.look_at_budgets, ledger.root, "b010", 5, (800_000,))
        store.run(alerts.take_due, ledger.root, 1)
        with store.transaction() as connection:
            connection.execute(
                sa.text(
                    "UPDATE budget_alert_looks SET after_name = 'b010' WHERE root = :root"
                    " AND what = 'budget'"
                ),
                {"root": ledger.root},
            )
        statements.clear()
        looked = store.run(alerts.look_at_budgets, ledger.root, "b010", 5, (800_000,))
        assert looked is not None
        assert looked.after == "b015"
    finally:
        sa.event.remove(store.engine, "before_cursor_execute", note)
    assert 3 <= len(statements) <= 6
    explain = "EXPLAIN " if store.dialect == "postgresql" else "EXPLAIN QUERY PLAN "
    with store.transaction() as connection:
        if store.dialect == "postgresql":
            connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
        for statement, parameters in statements:
            plan = connection.exec_driver_sql(explain + statement, parameters).all()
            told = "\n".join(str(tuple(row)) for row in plan)
            for table in ("budget_budgets", "budget_balances", "budget_alerts"):
                assert f"Seq Scan on {table}" not in told
                assert f"SCAN {table}\n" not in told + "\n"
