"""Commands that change what a budget has, and those that show and prove it: grant to reconcile."""

from __future__ import annotations

import sys
from datetime import datetime, timezone

import pytest

from celery_budget.cli import progress
from celery_budget.cli.progress import Progress
from celery_budget.store import schema
from tests.contract.support import RETURNED, Ledger
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

BIG = 2**63 - 1
#: Amounts that other number types cannot tell from their neighbours.
LARGE = [2**31 + 1, 2**53 + 1, BIG]
DAY_US = 86_400_000_000


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def ledger_of(shop: Shop) -> Ledger:
    return Ledger(shop.budget.store, shop.budget.settings)


def settle(shop: Shop, amount: int, used: int, request_id: str = "order-1") -> None:
    _, attempt = ledger_of(shop).start(amount, budget="tenant:a", request_id=request_id)
    attempt.record(used)
    attempt.end(RETURNED)
    attempt.close()


# grant


def test_grant_raises_the_limit_once_for_its_key(on_both: Shop, run: Run) -> None:
    options = ["--key", "launch", "--for", "7d", "--reason", "launch week"]
    done = run(on_both.app, "grant", "tenant:a", "1_000", *options)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("granted 1,000 tokens to 'tenant:a' until 20")
    assert done.out.endswith(" (key launch); available: 1,010\n")
    before = on_both.ledger()
    again = run(on_both.app, "grant", "tenant:a", "1_000", *options)
    assert again.code == 0
    assert again.out.startswith("nothing was changed, key 'launch' was used for this before")
    found = run(on_both.app, "grant", "tenant:a", "1_000", *options, "--json").json
    assert on_both.ledger() == before
    assert (found["repeated"], found["key"], found["amount"]) == (True, "launch", 1000)
    assert found["until_us"] - found["created_us"] == 7 * DAY_US
    assert (found["balance"]["limit"], found["reason"]) == (1010, "launch week")


@pytest.mark.parametrize(
    "other", [["tenant:a", "2", "--for", "7d"], ["tenant:a", "1", "--for", "8d"], ["tenant:a", "1"]]
)
def test_grant_refuses_a_key_that_is_anothers(shop: Shop, run: Run, other: list[str]) -> None:
    run(shop.app, "grant", "tenant:a", "1", "--for", "7d", "--key", "k")
    before = shop.ledger()
    done = run(shop.app, "grant", *other, "--key", "k")
    assert done.failed(1, "key 'k' is that of another grant; repeat that one, or use a new key")
    assert shop.ledger() == before


def test_grant_without_a_key_counts_each_time(shop: Shop, run: Run) -> None:
    keys = {run(shop.app, "grant", "tenant:a", "5", "--json").json["key"] for _ in range(2)}
    assert len(keys) == 2
    assert shop.budget.balance("tenant:a").limit == 20


@pytest.mark.parametrize("written", ["2999-12-31T23:59:59Z", "3000-01-01T00:59:59+01:00"])
def test_grant_until_a_time(shop: Shop, run: Run, written: str) -> None:
    found = run(shop.app, "grant", "tenant:a", "5", "--until", written, "--json").json
    ends = datetime(2999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
    assert found["until_us"] == int(ends.timestamp()) * 1_000_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["0x10"], "'0x10' is not an amount; give an integer from 0 to 2^63-1"),
        (["9223372036854775808"], "is not an amount"),
        (["1.0"], "is not an amount"),
        (["5", "--until", "2999-12-31T23:59:59"], "is not a time with a time zone; give it in ISO"),
        (["5", "--until", "tomorrow"], "is not a time with a time zone"),
        (["5", "--for", "7"], "'7' is not a duration; give a number and a unit: 45s, 30m, 12h, 7d"),
        (["5", "--for", "-1d"], "is not a duration"),
        (["5", "--for", "999999999999w"], "is not a duration"),
        (["5", "--for", "٣d"], "is not a duration"),
        (["5", "--for", "7d", "--until", "2999-12-31T23:59:59Z"], "give one of them"),
        ([], "Missing argument 'AMOUNT'"),
    ],
)
def test_grant_of_what_cannot_be_is_wrong_use(
    shop: Shop, run: Run, options: list[str], said: str
) -> None:
    before = shop.ledger()
    assert run(shop.app, "grant", "--json", "tenant:a", *options).failed(2, said)
    assert shop.ledger() == before


@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        (["tenant:a", "0"], "a grant of 0 grants nothing; give an integer from 1", 1),
        (["tenant:a", "5", "--for", "0s"], "the end of the grant has passed already", 1),
        (
            ["tenant:a", "5", "--until", "1969-01-01T00:00:00Z"],
            "has passed already; give a later",
            1,
        ),
        (["tenant:a", "5", "--key", ""], "a grant's key has 1 to 255 characters", 2),
        (
            ["tenant:a", "5", "--reason", "a\tb"],
            "the reason of a grant has no control characters",
            2,
        ),
        (["nobody", "5"], "there is no budget named 'nobody'", 1),
        (["user:*", "5"], "names a template", 2),
    ],
)
def test_grant_is_refused(shop: Shop, run: Run, options: list[str], said: str, code: int) -> None:
    before = shop.ledger()
    assert run(shop.app, "grant", *options, "--json").failed(code, said)
    assert shop.ledger() == before


@pytest.mark.parametrize("lasts", ["45s", "30m", "12h", "7d", "2w"])
def test_durations(shop: Shop, run: Run, lasts: str) -> None:
    found = run(shop.app, "grant", "tenant:a", "1", "--for", lasts, "--json").json
    seconds = {"45s": 45, "30m": 1800, "12h": 43_200, "7d": 604_800, "2w": 1_209_600}
    assert found["until_us"] - found["created_us"] == seconds[lasts] * 1_000_000


def test_grants_never_add_up_to_more_than_can_be_counted(on_both: Shop, run: Run) -> None:
    assert run(on_both.app, "grant", "tenant:a", str(BIG)).code == 0
    before = on_both.ledger()
    assert run(on_both.app, "grant", "tenant:a", "1").failed(1, "would be more than 2^63-1")
    assert on_both.ledger() == before
    assert on_both.budget.balance("tenant:a").limit == BIG


# adjust


def test_adjust_charges_and_refunds_once_for_its_key(on_both: Shop, run: Run) -> None:
    charge = ["--charge", "7", "--reason", "calls by hand", "--key", "k1"]
    done = run(on_both.app, "adjust", "tenant:a", *charge)
    assert done.out == "7 tokens charged to 'tenant:a' (key k1); available: 3\n"
    refund = ["--refund", "5", "--reason", "Monday", "--key", "k2"]
    done = run(on_both.app, "adjust", "tenant:a", *refund)
    assert done.out == "5 tokens refunded to 'tenant:a' (key k2); available: 8\n"
    before = on_both.ledger()
    for options in (charge, refund):
        again = run(on_both.app, "adjust", "tenant:a", *options)
        assert (again.code, again.out[:19]) == (0, "nothing was changed")
    found = run(on_both.app, "adjust", "tenant:a", *refund, "--json").json
    assert (found["amount"], found["repeated"], found["balance"]["spent"]) == (-5, True, 2)
    assert on_both.ledger() == before
    other = run(on_both.app, "adjust", "tenant:a", "--refund", "6", *refund[2:])
    assert other.failed(1, "key 'k2' is that of another adjustment")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reason", "x"], "give --charge N or --refund N, one of the two"),
        (["--reason", "x", "--charge", "1", "--refund", "1"], "one of the two"),
        (["--charge", "1"], "Missing option '--reason'"),
        (["--charge", "-1", "--reason", "x"], "'-1' is not an amount"),
    ],
)
def test_adjust_of_what_cannot_be_is_wrong_use(
    shop: Shop, run: Run, options: list[str], said: str
) -> None:
    before = shop.ledger()
    assert run(shop.app, "adjust", "tenant:a", *options).failed(2, said)
    assert shop.ledger() == before


@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        (["tenant:a", "--refund", "1", "--reason", "x"], "has spent 0 in its present window; 1", 1),
        (["tenant:a", "--charge", "0", "--reason", "x"], "an integer from 1 to 2^63-1", 1),
        (["tenant:a", "--charge", "1", "--reason", ""], "has 1 to 255 characters", 2),
        (["nobody", "--charge", "1", "--reason", "x"], "there is no budget named 'nobody'", 1),
    ],
)
def test_adjust_is_refused(shop: Shop, run: Run, options: list[str], said: str, code: int) -> None:
    before = shop.ledger()
    assert run(shop.app, "adjust", *options, "--json").failed(code, said)
    assert shop.ledger() == before


def test_adjust_refuses_what_no_balance_can_count(on_both: Shop, run: Run) -> None:
    charge = ["adjust", "tenant:a", "--reason", "x", "--charge"]
    assert run(on_both.app, *charge, str(BIG)).code == 0
    before = on_both.ledger()
    assert run(on_both.app, *charge, "1").failed(1, "a balance is at most 2^63-1")
    assert on_both.ledger() == before


# journal


def test_journal_tells_every_change_the_newest_first(on_both: Shop, run: Run) -> None:
    settle(on_both, 10, 4)
    run(on_both.app, "adjust", "tenant:a", "--refund", "3", "--reason", "by [hand]")
    done = run(on_both.app, "journal", "tenant:a")
    assert (done.code, done.err) == (0, "")
    head, _, newest, *rest = done.out.splitlines()
    assert head.split()[:4] == ["entry", "when", "what", "reserved"]
    assert newest.split()[2:7] == ["adjust", "0", "-3", "0", "1"]
    assert newest.endswith("by [hand]")
    assert rest[-1].split()[2:7] == ["reserve", "+10", "0", "10", "0"]
    entries = run(on_both.app, "journal", "tenant:a", "--json").json["entries"]
    assert [one["entry"] for one in entries] == list(range(len(entries), 0, -1))
    assert sum(one["spent"] for one in entries) == entries[0]["spent_after"] == 1
    assert entries[0]["reservation_id"] is None
    reservation = ledger_of(on_both).rows("reservations")[0].reservation_id
    assert entries[-1]["reservation_id"] == str(reservation)
    limited = run(on_both.app, "journal", "tenant:a", "--limit", "1", "--json").json["entries"]
    assert limited == entries[:1]


def test_journal_of_a_budget_with_windows_tells_them(shop: Shop, run: Run) -> None:
    shop.budget.set("hourly", limit=5, unit="x", period="hour")
    assert run(shop.app, "journal", "hourly").out == "Nothing was drawn on it yet.\n"
    shop.budget.adjust("hourly", 3, reason="x")
    assert run(shop.app, "journal", "hourly").rows[0][0] == "window"
    [entry] = run(shop.app, "journal", "hourly", "--json").json["entries"]
    assert entry["window_us"] == shop.budget.balance("hourly").start_us


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give the NAME of a budget, or --fold-before"),
        (["tenant:a", "--limit", "0"], "0 is not in the range"),
        (["--fold-before", "90"], "'90' is not a duration"),
        (["tenant:a", "--fold-before", "90d"], "leave NAME and --limit out"),
        (["--limit", "5", "--fold-before", "90d"], "leave NAME and --limit out"),
    ],
)
def test_journal_wrongly_used(shop: Shop, run: Run, options: list[str], said: str) -> None:
    assert run(shop.app, "journal", *options).failed(2, said)


def test_journal_of_an_unknown_budget_fails(shop: Shop, run: Run) -> None:
    assert run(shop.app, "journal", "nobody", "--json").failed(1, "no budget named 'nobody'")


def test_journal_folds_what_is_old(
    on_both: Shop, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_budget.reconcile.proof.PAGE", 2)
    names = [f"b{at}" for at in range(5)]
    for name in names:
        on_both.budget.set(name, limit=100, unit="x")
        for _ in range(3):
            on_both.budget.adjust(name, 2, reason="x")
    balances = on_both.budget.balances()
    assert run(on_both.app, "journal", "--fold-before", "1h", "--json").json == {"folded": 0}
    on_both.sql(schema.journal.update().values(at_us=schema.journal.c.at_us - 2 * DAY_US))
    on_both.budget.adjust("b1", 2, reason="young")
    done = run(on_both.app, "journal", "--fold-before", "1d")
    assert (done.code, done.out) == (0, "10 entries of the journals folded into checkpoints\n")
    assert run(on_both.app, "journal", "--fold-before", "1d", "--json").json == {"folded": 0}
    assert [one.entry for one in on_both.budget.journal("b0")] == [3]
    assert [(one.entry, one.what) for one in on_both.budget.journal("b1")] == [
        (4, "adjust"),
        (3, "checkpoint"),
    ]
    assert run(on_both.app, "reconcile").code == 0
    after = {one.budget: one.spent for one in on_both.budget.balances()}
    assert after == {**{one.budget: one.spent for one in balances}, "b1": 8}


def test_journal_that_does_not_add_up_is_not_folded(shop: Shop, run: Run) -> None:
    for _ in range(3):
        shop.budget.adjust("tenant:a", 1, reason="x")
    shop.sql(schema.journal.update().where(schema.journal.c.entry == 1).values(spent=2))
    assert run(shop.app, "journal", "--fold-before", "0s", "--json").json == {"folded": 0}
    assert run(shop.app, "reconcile").code == 1


def test_a_bar_is_shown_only_to_a_terminal_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = [False]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", _Stream(terminal))
    monkeypatch.setattr(progress, "QUIET_SECONDS", 3600)
    with Progress("folding", "balances") as bar:
        terminal[0] = True
        bar.told(1, 3)
        assert bar._bar is None
        monkeypatch.setattr(progress, "QUIET_SECONDS", 0)
        terminal[0] = False
        bar.told(2, 3)
        assert bar._bar is None
        terminal[0] = True
        bar.told(3, 3)
        assert bar._bar is not None
    assert "folding" in sys.stderr.text


class _Stream:
    """A standard error stream that is a terminal, or not."""

    encoding = "utf-8"

    def __init__(self, terminal: list[bool]) -> None:
        self.text = ""
        self._terminal = terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return self._terminal[0]


# reconcile


def test_reconcile_repairs_balances(on_both: Shop, run: Run) -> None:
    settle(on_both, 10, 4)
    ledger_of(on_both).reserve(6, budget="tenant:a")
    right = on_both.budget.balance("tenant:a")
    on_both.sql(schema.balances.update().values(reserved=1, spent=9))
    done = run(on_both.app, "reconcile", "--repair")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "repaired: budget 'tenant:a' was rebuilt from its lines"
    assert done.out.splitlines()[1].startswith("the ledger adds up: 2 requests, open: 1 reserved")
    assert on_both.budget.balance("tenant:a") == right
    entry = on_both.budget.journal("tenant:a")[0]
    assert (entry.what, entry.reserved, entry.spent) == ("repair", 5, -5)
    found = run(on_both.app, "reconcile", "--repair", "--json")
    assert (found.code, found.json["ok"], found.json["repaired"]) == (0, True, [])


def test_reconcile_names_balance_lines_and_journal(shop: Shop, run: Run) -> None:
    settle(shop, 10, 4)
    shop.budget.adjust("tenant:a", 1, reason="x")
    shop.sql(schema.adjustments.update().values(amount=2))
    [said] = run(shop.app, "reconcile", "--json").json["mismatches"]
    assert said == (
        "budget 'tenant:a' says 0 reserved and 5 spent, its lines add up to 0 and 6, "
        "its journal agrees"
    )
    shop.sql(schema.adjustments.update().values(amount=1))
    shop.sql(schema.journal.delete().where(schema.journal.c.entry == 1))
    [said] = run(shop.app, "reconcile", "--json").json["mismatches"]
    assert said == (
        "budget 'tenant:a' says 0 reserved and 5 spent, its lines agree, "
        "an entry of its journal is missing"
    )


def test_reconcile_cannot_repair_what_nobody_knows(shop: Shop, run: Run) -> None:
    settle(shop, 10, 4)
    shop.sql(schema.usage.update().values(amount=5))
    for options in ([], ["--repair"]):
        done = run(shop.app, "reconcile", *options)
        assert done.code == 1
        assert done.out.splitlines()[0] == "the ledger does not add up: 1 mismatch"


# numbers


@pytest.mark.parametrize("amount", LARGE)
def test_large_amounts_are_exact_everywhere(on_both: Shop, run: Run, amount: int) -> None:
    assert run(on_both.app, "set", "tenant:a", "--limit", str(amount)).code == 0
    settle(on_both, amount, amount)
    run(on_both.app, "adjust", "tenant:a", "--refund", str(amount), "--reason", "x")
    run(on_both.app, "adjust", "tenant:a", "--charge", str(amount), "--reason", "y")
    ledger_of(on_both).start(0, budget="tenant:a", request_id="open")
    shown = run(on_both.app, "show", "tenant:a", "--json").json
    assert (shown["limit"], shown["spent"], shown["available"]) == (amount, amount, 0)
    assert shown["declared"]["limit"] == amount
    assert f"{amount:,}" in run(on_both.app, "show", "tenant:a").out
    entries = run(on_both.app, "journal", "tenant:a", "--json").json["entries"]
    assert [one["spent"] for one in entries][:2] == [amount, -amount]
    assert f"-{amount:,}" in run(on_both.app, "journal", "tenant:a").out
    report = run(on_both.app, "report", "--json").json
    assert report["budgets"][0]["spent"] == report["drift"][0]["actual"] == amount
    assert report["drift"][0]["estimated"] == amount
    assert f"{amount:,}" in run(on_both.app, "report").out
    assert f"limit = {amount:_}" in run(on_both.app, "export").out
    assert run(on_both.app, "reconcile").code == 0


def test_sums_beyond_64_bits_are_exact(on_both: Shop, run: Run) -> None:
    """Two requests of the greatest amount, charged one after the other."""
    run(on_both.app, "set", "tenant:a", "--limit", "none")
    for at in range(2):
        settle(on_both, BIG, BIG, f"order-{at}")
        run(on_both.app, "adjust", "tenant:a", "--refund", str(BIG), "--reason", "x")
    [drift] = run(on_both.app, "report", "--json").json["drift"]
    assert (drift["estimated"], drift["actual"]) == (2 * BIG, 2 * BIG)
    assert f"{2 * BIG:,}" in run(on_both.app, "report").out
    assert run(on_both.app, "reconcile").code == 0
    on_both.sql(schema.balances.update().values(spent=1))
    assert run(on_both.app, "reconcile", "--repair").code == 0
    assert on_both.budget.balance("tenant:a").spent == 0
