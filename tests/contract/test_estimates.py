"""What estimators promised against what was used, shadows beside it, and suggestions."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from celery_budget import reconcile
from celery_budget.core.reservations import Line
from celery_budget.reconcile import estimates as shown
from celery_budget.store import estimates
from celery_budget.store.estimates import IS_MEASURED
from tests.contract.support import RAISED, RETRIED, RETURNED, Ledger

MAX = 2**63 - 1
#: More than a float tells apart from its neighbours.
LARGE = 2**62 + 1


def use(
    ledger: Ledger, amount: int, used: int | None, outcome: Any = RETURNED, **changes: Any
) -> None:
    _, attempt = ledger.start(amount, **changes)
    if used is not None:
        attempt.record(used)
    assert attempt.end(outcome)
    attempt.close()


def asked(**answers: int) -> str:
    return json.dumps({f"draft:{version[1:]}": amount for version, amount in answers.items()})


def drift(ledger: Ledger, **ceilings: float) -> list[tuple[Any, ...]]:
    settings = replace(ledger.settings, drift_ceilings={"*": 1.5, **ceilings})
    return [
        (one.stage, one.estimator, one.version, one.requests, one.estimated, one.actual,
         one.shadow, one.above)
        for one in reconcile.report(ledger.store, settings).drift
    ]  # fmt: skip


def test_shadows_are_kept_and_shown_beside_the_estimator(ledger: Ledger) -> None:
    ledger.set("b", None)
    named = {"estimator": "draft", "estimator_version": "1"}
    use(ledger, 10, 40, shadows=asked(v2=30, v3=MAX), **named)
    use(ledger, 10, 20, shadows=asked(v2=30, v3=MAX), **named)
    # Of what the shadow failed, has not been asked, has not succeeded or measured, nothing counts.
    use(ledger, 10, 6, shadows=asked(v3=1), **named)
    use(ledger, 10, 6, **named)
    use(ledger, 10, 6, RAISED, shadows=asked(v2=30), **named)
    use(ledger, 10, None, shadows=asked(v2=30), **named)
    use(ledger, 1, 9, stage="other", shadows=asked(v2=2), estimator="é:x")
    assert drift(ledger) == [
        ("draft", "draft", "1", 4, 40, 72, False, True),
        ("draft", "draft", "2", 2, 60, 60, True, False),
        ("draft", "draft", "3", 3, 2 * MAX + 1, 66, True, False),
        ("other", "é:x", "1", 1, 1, 9, False, True),
        ("other", "draft", "2", 1, 2, 9, True, False),
    ]


def test_a_shadow_is_asked_for_one_attempt(ledger: Ledger) -> None:
    ledger.set("b", None)
    request, attempt = ledger.start(10, shadows=asked(v2=10))
    attempt.record(10, key="one")
    following, _ = ledger.retry(request, attempt)
    attempt.end(RETRIED)
    again = ledger.run(following)
    again.record(10, key="two")
    again.end(RETURNED)
    assert [row[:3] for row in drift(ledger)] == [("draft", "constant", "1")]
    assert suggest(ledger) == []


def test_a_stage_has_a_ceiling(ledger: Ledger) -> None:
    ledger.set("b", None)
    use(ledger, 10, 15, stage="edge")
    use(ledger, 100, 121, stage="strict")
    use(ledger, 0, 1, stage="zero")
    use(ledger, 0, 0, stage="nothing")
    above = {row[0]: row[-1] for row in drift(ledger, strict=1.2)}
    assert above == {"edge": False, "strict": True, "zero": True, "nothing": False}
    assert drift(ledger, strict=1.21)[2][-1] is False
    # Exact where floats are not: three times 0.1 is no more than 0.3.
    use(ledger, 10, 3, stage="tenths")
    assert {row[0]: row[-1] for row in drift(ledger, tenths=0.3)}["tenths"] is False


def suggest(ledger: Ledger, stage: str | None = None, of: str = "0.95", **since: int) -> Any:
    return [
        (one.stage, one.unit, one.requests, one.amount, one.median, one.largest, one.covered)
        for one in reconcile.suggest(ledger.store, ledger.settings, stage, Decimal(of), **since)
    ]


def test_what_was_used_suggests_an_estimate(ledger: Ledger) -> None:
    ledger.set("b", None)
    for used in (5, 1, 9, 3, 7, LARGE):
        use(ledger, 6, used, stage="draft")
    use(ledger, 10, 4, stage="embed")
    # None of these tells what an attempt needs.
    use(ledger, 10, 99, RAISED, stage="embed")
    use(ledger, 10, None, stage="embed")
    ledger.reserve(10, stage="embed")
    use(ledger, 10, None, stage="paid", lines=(Line("b", 10, "start"),))
    wanted = [
        ("draft", "tokens", 6, LARGE, 5, LARGE, 3),
        ("embed", "tokens", 1, 4, 4, 4, 1),
    ]
    assert suggest(ledger) == wanted
    assert suggest(ledger, "embed") == wanted[1:]
    assert suggest(ledger, "nobody") == []
    by_quantile = {of: suggest(ledger, "draft", of)[0][3] for of in ("0.01", "0.5", "0.51", "0.8")}
    assert by_quantile == {"0.01": 1, "0.5": 5, "0.51": 7, "0.8": 9}


def test_the_last_requests_of_a_stage_count(ledger: Ledger, monkeypatch: Any) -> None:
    ledger.set("b", None)
    for used in (100, 1, 2):
        use(ledger, 10, used)
    monkeypatch.setattr(shown, "LAST", 2)
    [first, *_] = [row for row in ledger.rows("lines") if row.settled == 100]
    ledger.put("reservations", {"ended_us": 1000}, reservation_id=first.reservation_id)
    assert suggest(ledger)[0][2:4] == (2, 2)
    monkeypatch.undo()
    assert suggest(ledger)[0][2:4] == (3, 100)
    assert suggest(ledger, since_us=1001)[0][2:4] == (2, 2)
    assert suggest(ledger, lasting_us=3600 * 1_000_000)[0][2:4] == (2, 2)


def test_units_are_told_apart(ledger: Ledger) -> None:
    ledger.set("b", None)
    ledger.set("m", None, unit="micro-usd")
    use(ledger, 10, 4)
    _, attempt = ledger.start(10, budget="m")
    attempt.record(7, unit="micro-usd")
    attempt.end(RETURNED)
    assert [row[:4] for row in suggest(ledger)] == [
        ("draft", "micro-usd", 1, 7),
        ("draft", "tokens", 1, 4),
    ]


def test_a_suggestion_is_found_by_an_index(ledger: Ledger) -> None:
    statement = (
        "SELECT reservation_id FROM budget_reservations WHERE root = :root AND stage = :stage"
        " AND ended_us >= 0 AND state = 'settled' AND NOT unmetered ORDER BY ended_us DESC LIMIT 10"
    )
    assert IS_MEASURED in statement
    postgresql = ledger.store.dialect == "postgresql"
    explain = "EXPLAIN " if postgresql else "EXPLAIN QUERY PLAN "
    with ledger.store.transaction() as connection:
        if postgresql:
            connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
        rows = connection.execute(
            sa.text(explain + statement), {"root": ledger.root, "stage": "draft"}
        ).all()
    plan = " ".join(str(value) for row in rows for value in row)
    assert "ix_budget_reservations_measured" in plan
    assert "SORT" not in plan.upper().replace("SORTED", "")
    assert estimates.__all__
