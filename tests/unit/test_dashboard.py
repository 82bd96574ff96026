"""What the dashboard is made of: tokens and sessions, reads that are shared, figures in words."""

from __future__ import annotations

import asyncio
import builtins
import subprocess
import sys
import threading

import pytest

from celery_budget.core.amounts import MAX_AMOUNT
from celery_budget.core.budgets import Balance, Budget
from celery_budget.dashboard import create_app, words
from celery_budget.dashboard.reads import FRESH_SECONDS, REMEMBERED, THREADS, Reads
from celery_budget.dashboard.tokens import SESSION_SECONDS, Token
from celery_budget.errors import ConfigurationError, MissingExtra, StoreError
from celery_budget.reconcile import BudgetSeen

NOW = 1_800_000_000.5


def test_a_token_opens_and_nothing_else_does() -> None:
    token = Token("sesame-ö")
    assert token.opens("sesame-ö")
    assert not any(map(token.opens, ("", "sesame", "Sesame-ö", "sesame-ö ", "\udcff")))
    assert "sesame" not in repr(vars(token))


@pytest.mark.parametrize("wrong", ["", "two words", "line\n", "\0"])
def test_what_no_header_carries_is_no_token(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="token of a dashboard"):
        Token(wrong)


def test_a_session_holds_for_its_time_and_is_of_its_token() -> None:
    token = Token("sesame")
    session = token.session(NOW)
    assert "sesame" not in session
    assert token.holds(session, NOW)
    assert token.holds(session, NOW + SESSION_SECONDS - 1)
    assert not token.holds(session, NOW + SESSION_SECONDS)
    assert not Token("another").holds(session, NOW)
    until, _, signature = session.partition(".")
    longer = f"{int(until) + 1}.{signature}"
    for forged in (longer, until, f"{until}.", f".{signature}", "", "ü.ü", f"x.{signature}"):
        assert not token.holds(forged, NOW)


class Ledger:
    """Something to be read, that counts how often it is."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.reads = 0
        self.fails = False
        self.takes = 0.0
        self.threads: set[str] = set()

    def read(self) -> int:
        self.reads += 1
        self.clock += self.takes
        self.threads.add(threading.current_thread().name)
        if self.fails:
            raise OSError("away")
        return self.reads


def test_all_who_ask_the_same_share_one_read() -> None:
    ledger = Ledger()
    reads = Reads(lambda: ledger.clock)

    async def look() -> None:
        seen = await asyncio.gather(*(reads.get("same", ledger.read) for _ in range(50)))
        assert {one.value for one in seen} == {1}
        assert (await reads.get("other", ledger.read)).value == 2
        ledger.clock = FRESH_SECONDS
        assert (await reads.get("same", ledger.read)).value == 3

    asyncio.run(look())
    assert all(name.startswith("budget-dashboard") for name in ledger.threads)


def test_what_takes_long_is_read_less_often() -> None:
    ledger = Ledger()
    ledger.takes = 0.5
    reads = Reads(lambda: ledger.clock)

    async def look() -> None:
        await reads.get("same", ledger.read)
        ledger.clock = 5.4
        assert (await reads.get("same", ledger.read)).value == 1
        ledger.clock = 5.5
        assert (await reads.get("same", ledger.read)).value == 2

    asyncio.run(look())


def test_a_failure_is_shared_too_and_for_no_longer_than_a_moment() -> None:
    ledger = Ledger()
    ledger.fails, ledger.takes = True, 5.0
    reads = Reads(lambda: ledger.clock)

    async def look() -> None:
        tries = (reads.get("same", ledger.read) for _ in range(50))
        failed = await asyncio.gather(*tries, return_exceptions=True)
        assert {type(one) for one in failed} == {OSError}
        assert ledger.reads == 1
        ledger.fails = False
        ledger.clock += FRESH_SECONDS
        assert (await reads.get("same", ledger.read)).value == 2

    asyncio.run(look())


def test_what_hangs_is_not_waited_for_and_takes_no_more_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("celery_budget.dashboard.reads.PATIENCE_SECONDS", 0.05)
    go_on, begun = threading.Event(), []

    def hang() -> str:
        begun.append(threading.current_thread())
        go_on.wait()
        return "there again"

    async def look() -> None:
        reads = Reads()
        keys = range(THREADS + 3)
        failed = await asyncio.gather(
            *(reads.get(key, hang) for key in keys), return_exceptions=True
        )
        assert {type(one) for one in failed} == {StoreError}
        assert len(begun) == THREADS
        assert all(thread.daemon for thread in begun)
        go_on.set()
        # What hung has let go of its threads before anybody else is served.
        monkeypatch.setattr("celery_budget.dashboard.reads.PATIENCE_SECONDS", 60.0)
        assert (await reads.get("another", hang)).value == "there again"

    try:
        asyncio.run(look())
    finally:
        go_on.set()


def test_only_so_many_reads_are_remembered() -> None:
    ledger = Ledger()
    reads = Reads(lambda: ledger.clock)

    async def look() -> None:
        for key in range(REMEMBERED + 1):
            await reads.get(key, ledger.read)
        before = ledger.reads
        await reads.get(REMEMBERED, ledger.read)
        assert ledger.reads == before
        await reads.get(0, ledger.read)
        assert ledger.reads == before + 1

    asyncio.run(look())


def seen(limit: int | None, spent: int, reserved: int, soft: int = 1_000_000) -> BudgetSeen:
    budget = Budget("b", "tokens", limit, soft_stop=soft)
    return BudgetSeen(budget, Balance("b", "tokens", limit, reserved, spent))


def test_a_bar_is_exact_for_the_largest_amounts() -> None:
    bar = words.bar(seen(MAX_AMOUNT, MAX_AMOUNT // 2, MAX_AMOUNT // 4, 800_000))
    assert bar is not None
    assert (bar.spent, bar.total, bar.limit) == (499, 749, 1000)
    assert bar.stops == (("soft stop", 799),)
    assert bar.label == "49.9% spent, 24.9% held, soft stop at 79.9%"


def test_a_bar_beyond_its_limit_shows_where_that_is() -> None:
    bar = words.bar(seen(100, 150, 50))
    assert bar is not None
    assert (bar.spent, bar.total, bar.limit, bar.stops) == (750, 1000, 500, ())
    assert bar.label == "150% spent, 50% held"


def test_a_little_is_not_nothing_and_almost_all_is_not_all() -> None:
    little, almost = words.bar(seen(1_000_000, 1, 0)), words.bar(seen(10**9, 10**9 - 1, 0))
    assert little is not None
    assert almost is not None
    assert little.label == "under 0.1% spent, 0% held"
    assert almost.label == "99.9% spent, 0% held"


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_limit_there_is_no_bar(limit: int | None) -> None:
    assert words.bar(seen(limit, 0, 0)) is None


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"),
     (5400, "1 h 30 min"), (86_400, "1 d"), (100_000, "1 d 3 h"), (10**9, "11574 d 1 h")],
)  # fmt: skip
def test_how_long_something_lasts(seconds: float, told: str) -> None:
    assert words.lasting(seconds) == told


def test_when_it_was_and_when_it_will_be() -> None:
    assert words.ago(0, 90_000_000) == "1 min ago"
    assert words.ago(3_600_000_000, 0) == "in 1 h"
    assert words.clock(1_800_000_000_123_456) == "2027-01-15 08:00:00"
    assert words.clock(MAX_AMOUNT) == str(MAX_AMOUNT)


def test_commands_are_written_for_a_shell() -> None:
    command = words.command("my proj")
    assert command("lane pause", "it's; rm -rf *\n") == (
        "celery -A 'my proj' budget lane pause 'it'\"'\"'s; rm -rf *\\n'"
    )


def test_nobody_gets_in_by_an_omission() -> None:
    with pytest.raises(ConfigurationError, match="authenticate="):
        create_app(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["starlette", "anyio"])
def test_without_its_extra_it_names_it(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [name for name in sys.modules if name.startswith("celery_budget.dashboard.")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "starlette":
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"celery-budget\[dashboard\]"):
        create_app(None, "sesame")  # type: ignore[arg-type]


def test_the_command_line_does_without_the_extra() -> None:
    """Every command loads what serves the dashboard; only that one needs its packages."""
    probe = (
        "import celery_budget.cli, sys; print(sorted({'starlette', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
