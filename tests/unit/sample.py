"""A report in which there is something of everything."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta, timezone

from celery_budget.core.budgets import Balance
from celery_budget.reconcile import Drift, Queued, RelaySeen, Report
from celery_budget.reconcile.figures import FAILURES, Amounts, Day, Group, Refusals, Spread

BIG = 2**63 - 1
#: When the sample was made: an afternoon near the end of a month.
NOW = datetime(2030, 1, 27, 15, 30, tzinfo=timezone.utc)
MONTH_US = 1_893_456_000_000_000
NEXT_US = 1_896_134_400_000_000
#: Names that are trouble where they are not escaped.
HOSTILE = "tenant:<script>alert(1)</script>&\"'"
FORMULA = '=HYPERLINK("http://example.com","x")'


def monthly(
    name: str, limit: int, reserved: int, spent: int, parent: str | None = "org"
) -> Balance:
    return Balance(name, "tokens", limit, reserved, spent, parent, "month", MONTH_US, NEXT_US)


BALANCES = (
    monthly("org", 40_000_000, 1_200_000, 18_304_112, None),
    monthly("tenant:acme", 12_000_000, 800_000, 9_911_404),
    monthly("tenant:initech", 5_000_000, 0, 5_210_000),
    Balance("tenant:umbrella", "tokens", None, 400_000, 3_182_708, "org"),
    Balance("money", "micro-usd", BIG, 0, 2**53 + 1),
    Balance(HOSTILE, "requests", 500, 20, 112, None, "day", MONTH_US, NEXT_US),
    Balance(FORMULA, "tokens", 0, 0, 0, state="draining"),
)

COUNTS = {
    "admitted": 48_211, "refused": 1_204, "parked": 31, "given_up": 4, "planned": 2, "reserved": 5,
    "published": 40, "running": 12, "waiting": 3, "settled": 47_980, "released": 150, "lost": 19,
    "expired": 61, "cancelled": 33, "over": 812, "unmetered": 44, "unreserved": 1,
}  # fmt: skip

DRIFT = (
    Drift("draft", "tokens_of", "2", 18_000, 9_000_000, 8_700_000, ceiling=1.5),
    Drift("draft", "tokens_of", "3", 17_950, 8_000_000, 8_650_000, shadow=True),
    Drift("embed", "chars/4", "1", 21_000, 2_000_000, 3_900_000, ceiling=1.5),
    Drift("rerank", "constant:1000", "1", 8_000, 8_000_000, 2_100_000, ceiling=1.5),
    Drift(HOSTILE, "nothing", "1", 7, 0, 70, ceiling=1.5),
)


def amounts(scale: int) -> tuple[Amounts, ...]:
    """Of the budgets of the sample, so much."""
    return (
        Amounts("org", "tokens", 9 * scale, 5_000 * scale, 5_500 * scale, 900 * scale, scale),
        Amounts("tenant:acme", "tokens", 5 * scale, 3_000 * scale, 3_200 * scale, 500 * scale, 2),
        Amounts("money", "micro-usd", 1, 2**53 + 1, 2**53 + 1, 0, 0),
        Amounts(HOSTILE, "requests", scale % 9, scale % 9, scale % 9, 0, 0),
    )


def spread(count: int, factor: float) -> Spread:
    return Spread(count, 0.08 * factor, 2.4 * factor, 31.0 * factor)


LAST = NOW.date()


def days(until: date = LAST, number: int = 31) -> tuple[Day, ...]:
    """The last days up to one, on one of which nothing was measured."""
    found = []
    for at in range(number):
        day = until - timedelta(days=number - 1 - at)
        scale = 40 + (at * 37) % 90 if day.isoweekday() < 6 else 9
        quiet = at == 12
        wait = Spread() if quiet else spread(scale * 9, 1 + (at % 7) / 3)
        found.append(
            Day(
                day.isoformat(),
                {"admitted": scale * 9, "refused": at, "settled": scale * 8},
                dict.fromkeys(FAILURES, at),
                () if quiet else amounts(scale),
                wait,
                Spread() if quiet else spread(scale * 9, 40 + (at % 5) * 12),
                {"org": 40_000_000, "tenant:acme": 12_000_000},
            )
        )
    return tuple(found)


def groups() -> tuple[Group, ...]:
    return tuple(
        Group(
            key,
            {"admitted": 900 * at, "refused": 7 * at, "settled": 850 * at, "over": at},
            {"refused": 7 * at, "transient": at, "exhausted": 2},
            amounts(at),
            spread(900 * at, at),
            spread(880 * at, 30 * at),
        )
        for at, key in enumerate(("tenant:acme", "tenant:initech", HOSTILE, FORMULA), 1)
    )


REPORT = Report(
    balances=BALANCES,
    counts=COUNTS,
    drift=DRIFT,
    relays=(
        RelaySeen("web-1", 4711, 0, 0, 1.2, True),
        RelaySeen("web-2", 4712, 0, 0, 1500.0, False),
    ),
    open_work={"planned": 2, "reserved": 5, "published": 40, "running": 12, "due": 5, "parked": 31},
    overdue_seconds=95,
    since_us=MONTH_US - 5 * 86_400_000_000,
    quarantine={"max_attempts": 12, "unroutable": 2},
    quarantine_bound=14,
    parked=(Queued("tenant:acme", 31, 1250.0),),
    lanes={"free": 12_000, "paid": 800},
    refusals=(
        Refusals("tenant:initech", "exhausted", 1_100),
        Refusals("tenant:acme", "held", 100),
        Refusals(HOSTILE, "soft_stop", 4),
    ),
    amounts=amounts(2_500),
    failures={"refused": 1204, "transient": 310, "permanent": 41, "exhausted": 12, "uncertain": 19,
              "expired": 61},
    waits=spread(48_211, 1.0),
    runs=spread(48_900, 55.0),
    days=days(),
    at_us=int(NOW.timestamp()) * 1_000_000,
)  # fmt: skip

BY_TENANT = replace(REPORT, by="tenant", groups=groups())
