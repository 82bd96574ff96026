"""``budget explain``: one request's life, and what holds a budget."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from celery_budget import BudgetExceeded, ParkingFull, budgeted
from celery_budget.core.identity import new_id
from tests.contract.support import RETURNED, Ledger
from tests.integration.commands import Done, Run, runner
from tests.integration.support import Shop
from tests.integration.tenant import WAIT, Tenant


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def ledger_of(shop: Shop) -> Ledger:
    return Ledger(shop.budget.store, shop.budget.settings)


def settle(ledger: Ledger, amount: int = 10, used: int = 4) -> str:
    """A request that ran; its task id."""
    request, attempt = ledger.start(amount, budget="tenant:a", request_id="order-1")
    attempt.record(used)
    attempt.end(RETURNED)
    attempt.close()
    return request.task_id


def happened(done: Done) -> list[str]:
    """What happened, line by line, without what is in brackets."""
    return [
        line.split("Z", 1)[1].strip().split(" (")[0]
        for line in done.out.splitlines()
        if line.startswith("20")
    ]


def test_explain_a_settled_request_by_each_of_its_ids(shop: Shop, run: Run) -> None:
    ledger = ledger_of(shop)
    task_id = settle(ledger)
    reservation_id = str(ledger.rows("reservations")[0].reservation_id)
    told = [run(shop.app, "explain", some_id) for some_id in (task_id, "order-1", reservation_id)]
    assert told[0].code == 0
    assert told[0] == told[1] == told[2]
    assert happened(told[0]) == [
        "admitted",
        "published to celery",
        "attempt 1 started on worker@host",
        "attempt 1 used 4 tokens",
        "attempt 1 returned",
        "settled",
    ]
    [found] = run(shop.app, "explain", task_id, "--json").json["requests"]
    assert found["reservation"]["state"] == "settled"
    assert found["lines"][0]["settled"] == 4


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_explain_of_a_refused_request_knows_nothing(
    shop: Shop, run: Run, options: list[str]
) -> None:
    @budgeted(budget="tenant:a", estimate=11)
    @shop.app.task(name="shop.draft")
    def draft() -> None: ...

    with pytest.raises(BudgetExceeded):
        shop.task("shop.draft").apply_async(task_id="refused-1")
    done = run(shop.app, "explain", "refused-1", *options)
    assert (done.code, done.out) == (1, "")
    assert "nothing is known of 'refused-1'" in done.err


def test_explain_parked_work(shop: Shop, run: Run) -> None:
    ledger = ledger_of(shop)
    request = ledger.request(99, budget="tenant:a")
    ledger.admit(request, continuation=True)
    done = run(shop.app, "explain", request.task_id)
    assert done.code == 0
    assert re.search(r"^state +parked: exhausted$", done.out, re.MULTILINE)
    assert "waits      for 99 of budget tenant:a since 20" in done.out
    [found] = run(shop.app, "explain", request.task_id, "--json").json["requests"]
    assert found["reservation"]["state"] == "parked"


def test_explain_shows_balances_before_and_after(shop: Shop, run: Run) -> None:
    shop.budget.set("tenant:a", limit=2000)
    ledger = ledger_of(shop)
    ledger.reserve(1500, budget="tenant:a")
    task_id = settle(ledger)
    rows = run(shop.app, "explain", task_id).rows
    assert ["reserve", "tenant:a", "1,500", "->", "1,510", "0"] in [row[:6] for row in rows]
    assert ["settle", "tenant:a", "1,510", "->", "1,500", "0", "->", "4"] in [
        row[:8] for row in rows
    ]


def test_explain_of_an_open_request_says_what_comes_next(shop: Shop, run: Run) -> None:
    request = ledger_of(shop).reserve(10, budget="tenant:a")
    done = run(shop.app, "explain", request.task_id)
    [due] = [line for line in done.out.splitlines() if line.endswith("published by a relay")]
    [found] = run(shop.app, "explain", request.task_id, "--json").json["requests"]
    assert [one["what"] for one in found["next"]] == ["published by a relay"]
    assert found["next"][0]["at_us"] == found["messages"][0]["due_us"]
    assert due.startswith("20")


def test_explain_of_a_refused_try_by_its_reservation(shop: Shop, run: Run) -> None:
    ledger = ledger_of(shop)
    request = ledger.request(11, budget="tenant:a", reservation_id=new_id())
    ledger.admit(request)
    done = run(shop.app, "explain", str(request.reservation_id))
    assert done.facts["state"].strip() == "refused: exhausted"
    assert "11 requested, 0 reserved and 0 spent of 10" in done.facts["refused"]


# What holds a budget.


def test_explain_of_a_budget(on_both: Shop, run: Run) -> None:
    on_both.budget.set("all", limit=1000, unit="tokens")
    on_both.budget.set("tenant:a", limit=100, unit="tokens", parent="all")
    ledger = ledger_of(on_both)
    large, _ = ledger.start(60, budget="tenant:a")
    ledger.reserve(30, budget="tenant:a")
    waits = ledger.request(50, budget="tenant:a")
    ledger.admit(waits, continuation=True)
    ledger.admit(ledger.request(70, budget="tenant:a"))
    done = run(on_both.app, "explain", "--budget", "tenant:a", "--limit", "1", "--amount", "11")
    assert (done.code, done.err) == (0, "")
    assert ["tenant:a", "tokens", "100", "90", "0", "10"] in done.rows
    assert ["all", "tokens", "1,000", "90", "0", "910"] in done.rows
    assert "2 requests hold 90: 1 reserved (30), 1 running (60)" in done.out
    assert ["60", f"shop.draft[{large.task_id}]"] in [row[:2] for row in done.rows]
    assert ["30", "1", "more,", "each", "of", "them", "less"] in done.rows
    assert ["50", f"shop.draft[{waits.task_id}]"] in [row[:2] for row in done.rows]
    assert ["held", "1"] in [row[:2] for row in done.rows]
    assert "A new request of 11 would be refused: budget 'tenant:a' is held" in done.out
    fits = run(on_both.app, "explain", "--budget", "tenant:a", "--amount", "10")
    assert "A new request of 10 would be admitted now." in fits.out
    found = run(on_both.app, "explain", "--budget", "tenant:a", "--amount", "11", "--json").json
    assert (found["budget"], found["reserved"], found["held"]) == (
        "tenant:a", 90, {"reserved": 30, "running": 60},
    )  # fmt: skip
    assert [one["held"] for one in found["holds"]] == [60, 30]
    assert (found["parked"], found["waiting"][0]["task_id"]) == (1, waits.task_id)
    assert found["asking"]["refusal"]["error"] == "BudgetExceeded"
    assert [(one["reason"], one["count"]) for one in found["refusals"]] == [("held", 1)]


def test_explain_of_a_budget_that_nothing_holds(shop: Shop, run: Run) -> None:
    done = run(shop.app, "explain", "--budget", "tenant:a")
    assert done.out.splitlines()[-1] == "No request holds any of it."


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "give the ID of a request, or --budget NAME"),
        (["order-1", "--budget", "tenant:a"], 2, "give the ID of a request, or --budget NAME"),
        (["order-1", "--limit", "3"], 2, "--limit and --amount are for --budget NAME"),
        (["order-1", "--amount", "3"], 2, "--limit and --amount are for --budget NAME"),
        (["--budget", "nobody"], 1, "there is no budget named 'nobody'"),
        (["--budget", "tenant:*"], 1, "is a template: it holds nothing"),
        (["--budget", "tenant:a", "--limit", "0"], 2, "--limit"),
        (["--budget", "tenant:a", "--amount", "x"], 2, "--amount"),
    ],
    ids=[
        "nothing", "both", "limit of a request", "amount of a request", "unknown", "template",
        "no limit", "no amount",
    ],
)  # fmt: skip
def test_explain_says_what_it_needs(
    shop: Shop, run: Run, args: list[str], code: int, said: str
) -> None:
    assert run(shop.app, "explain", *args).failed(code, said)


# A refusal carries the command.


@pytest.mark.parametrize("name", ["acme", "two words", "it's", "-x", "tenant:ä"])
def test_a_refusal_names_the_command_that_explains_it(shop: Shop, run: Run, name: str) -> None:
    shop.budget.set(name, limit=5, unit="tokens")
    ledger = ledger_of(shop)
    outcome: Any = ledger.admit(ledger.request(6, budget=name))
    told = str(outcome.error())
    assert told.endswith("'")
    command = told[told.rindex("'celery -A PROJ budget ") + 1 : -1]
    assert command.startswith("celery -A PROJ budget explain --budget ")
    args = shlex.split(command)[4:]
    assert args == ["explain", "--budget", name]
    done = run(shop.app, *args, "--json")
    assert (done.code, done.json["budget"]) == (0, name)
    assert [(one["reason"], one["count"]) for one in done.json["refusals"]] == [("exhausted", 1)]


def test_what_is_not_parked_names_it_too(shop: Shop) -> None:
    error = ParkingFull(5, "acme", "tokens", 12, 7, 100, 60, 33, "held", 100)
    assert "'celery -A PROJ budget explain --budget acme'" in str(error)


# A whole life, by a real worker.


@pytest.mark.redis
@pytest.mark.postgres
def test_the_life_of_a_request_that_a_worker_ran(tenant: Tenant, run: Run) -> None:
    result = tenant.task("fail").delay(tenant.name, 3)
    with pytest.raises(ValueError, match=result.id):
        result.get(timeout=WAIT)
    tenant.spent(3)
    [attempt] = tenant.story(result.id).attempts
    done = run(tenant.cluster.app, "explain", result.id)
    told = happened(done)
    assert told[0] == "admitted"
    assert told[1] == f"published to {attempt['queue']}"
    assert re.fullmatch(rf"attempt 1 started on {attempt['worker']}, process [0-9]+", told[2])
    assert told[3:] == ["attempt 1 used 3 tokens", "attempt 1 raised ValueError", "settled"]
    assert re.search(rf"^settle +{tenant.budget} +[0-9]+ -> 0 +0 -> 3 ", done.out, re.MULTILINE)
    assert "next" not in done.out
