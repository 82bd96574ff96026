"""``budget reconcile``: the proof, what is open, brokers and results, repairs, invoices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_budget import budgeted
from celery_budget.core.usage import Used
from celery_budget.errors import InvalidAmount, InvalidPeriod, InvoiceError
from celery_budget.store import schema
from tests.contract.support import RETURNED, Ledger
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

MakeShop = Callable[..., Shop]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def ledger_of(shop: Shop) -> Ledger:
    return Ledger(shop.budget.store, shop.budget.settings)


def _draft(*args: object) -> None:
    pass


def publish(shop: Shop, count: int = 1) -> list[str]:
    """Publish tasks that nobody starts; their ids."""
    task = budgeted(budget="tenant:a", estimate=1)(
        shop.app.task(name="reconciled.draft", shared=False)(_draft)
    )
    ids = [str(task.delay().id) for _ in range(count)]
    assert shop.relay().published == count
    return ids


# The proof.


def test_a_ledger_that_adds_up(shop: Shop, run: Run) -> None:
    assert run(shop.app, "reconcile").out == "the ledger adds up: 0 requests, nothing open\n"
    request = ledger_of(shop).reserve(10, budget="tenant:a")
    done = run(shop.app, "reconcile")
    assert (done.code, done.err) == (0, "")
    first, *rest = done.out.splitlines()
    assert first == "the ledger adds up: 1 request, open: 1 reserved, 1 message to publish"
    assert any(line.startswith(f"- task {request.task_id} (shop.draft): message") for line in rest)
    # The table of kinds, and no list of each.
    brief = run(shop.app, "reconcile", "--limit", "0").out
    assert "published by a relay" in brief
    assert "and 1 more" not in brief
    found = run(shop.app, "reconcile", "--json")
    assert found.code == 0
    assert (found.json["ok"], found.json["mismatches"], found.json["requests"]) == (True, [], 1)
    [due] = found.json["pending"]
    assert (due["kind"], due["count"], due["lacks"]) == ("due", 1, "a publication")
    assert due["steps"][0]["task_id"] == request.task_id
    assert run(shop.app, "reconcile", "--json", "--limit", "0").json["pending"][0]["steps"] == []


def test_mismatches_are_listed_with_what_to_do_and_repaired(shop: Shop, run: Run) -> None:
    ledger_of(shop).reserve(10, budget="tenant:a")
    shop.sql(schema.balances.update().values(reserved=9))
    said = (
        "budget 'tenant:a' says 9 reserved and 0 spent, its lines add up to 10 and 0, "
        "its journal leads to 10 and 0"
    )
    done = run(shop.app, "reconcile")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[:2] == ["the ledger does not add up: 1 mismatch", f"- {said}"]
    assert lines[2].startswith("  balances and journals are rebuilt by 'celery -A ")
    found = run(shop.app, "reconcile", "--json")
    assert (found.code, found.json["ok"], found.json["mismatches"]) == (1, False, [said])
    assert run(shop.app, "report").code == 0
    done = run(shop.app, "reconcile", "--repair")
    assert done.code == 0
    assert done.out.startswith("repaired: budget 'tenant:a' was rebuilt from its lines\n")
    assert run(shop.app, "reconcile", "--repair", "--json").json["repaired"] == []


def test_what_is_overdue_fails_where_that_is_asked_for(shop: Shop, run: Run) -> None:
    ledger_of(shop).reserve(10, budget="tenant:a")
    shop.sql(schema.outbox.update().values(due_us=1))
    assert run(shop.app, "reconcile").code == 0
    assert run(shop.app, "reconcile", "--stuck", "10m").code == 1
    found = run(shop.app, "reconcile", "--stuck", "10m", "--json")
    assert (found.code, found.json["ok"], set(found.json["stuck"])) == (1, True, {"due"})
    shop.make_due()
    shop.relay()
    assert run(shop.app, "reconcile", "--stuck", "10m").code == 0


# Brokers.


@pytest.mark.parametrize(
    "broker",
    [
        "memory",
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
    ],
)
def test_what_waits_in_a_real_queue_is_told(
    request: pytest.FixtureRequest, make_shop: MakeShop, run: Run, broker: str
) -> None:
    url = "memory://" if broker == "memory" else request.getfixturevalue(f"{broker}_url")
    shop = make_shop(broker_url=url)
    publish(shop, 3)
    counted = ", 0 consumers" if broker == "rabbitmq" else ""
    name = shop.app.conf.task_default_queue
    found = run(shop.app, "reconcile", "--json").json
    [queue] = found["queues"]
    consumers = 0 if broker == "rabbitmq" else None
    assert (queue["queue"], queue["published"], queue["messages"], queue["consumers"]) == (
        name, 3, 3, consumers,
    )  # fmt: skip
    [published] = found["pending"]
    assert f"queue {name!r} holds 3 messages{counted}; looked" in published["steps"][0]["told"]
    assert run(shop.app, "reconcile", "--json", "--no-broker").json["queues"][0]["messages"] is None
    assert len(shop.received()) == 3
    [published] = run(shop.app, "reconcile", "--json").json["pending"]
    assert (
        f"queue {name!r} is empty: a worker has it, or it is lost" in published["steps"][0]["told"]
    )


@pytest.mark.rabbitmq
def test_what_a_broker_does_not_take_is_told_with_the_commands(
    make_shop: MakeShop, run: Run, rabbitmq_url: str
) -> None:
    shop = make_shop(broker_url=rabbitmq_url)
    task = budgeted(budget="tenant:a", estimate=1)(
        shop.app.task(name="reconciled.unroutable", shared=False)(_draft)
    )
    result = task.apply_async(exchange="amq.direct", routing_key="nobody", declare=[])
    assert shop.relay().quarantined == 1
    [found] = run(shop.app, "reconcile", "--json").json["pending"]
    [step] = found["steps"]
    assert (found["kind"], step["task_id"]) == ("quarantined", result.id)
    assert "(unroutable)" in step["told"]
    *_, requeued = step["commands"][0].split()
    assert run(shop.app, "quarantine", "show", requeued).code == 0


def test_a_broker_that_is_down_is_told_and_the_rest_is_shown(make_shop: MakeShop, run: Run) -> None:
    publish(make_shop())
    down = make_shop(broker_url="amqp://guest:guest@127.0.0.1:1//", init=False)
    done = run(down.app, "reconcile")
    assert done.code == 0
    assert done.out.startswith("the ledger adds up: 1 request, open: 1 published\n")
    assert "not known" in done.out


# Results.


def test_results_that_are_not_stored_fail(shop: Shop, run: Run) -> None:
    task = budgeted(budget="tenant:a", estimate=1)(
        shop.app.task(name="reconciled.stored", shared=False)(_draft)
    )
    quiet = budgeted(budget="tenant:a", estimate=1)(
        shop.app.task(name="reconciled.quiet", shared=False, ignore_result=True)(_draft)
    )
    ledger = ledger_of(shop)
    ids = []
    for name in (task.name, task.name, quiet.name, "reconciled.unknown"):
        request, attempt = ledger.start(1, budget="tenant:a", task_name=name)
        attempt.end(RETURNED)
        attempt.close()
        ids.append(request.task_id)
    shop.app.backend.store_result(ids[0], 1, "SUCCESS")
    done = run(shop.app, "reconcile", "--results", "10")
    assert done.code == 1
    assert done.out.startswith("the ledger adds up: 4 requests, nothing open\n")
    assert "results: 2 looked up, 1 not stored\n" in done.out
    assert f"- task {ids[1]} (reconciled.stored) has returned, and the result" in done.out
    assert run(shop.app, "reconcile", "--results", "1").code == 0, "of the last one nobody can tell"
    shop.app.conf.result_expires = 1
    shop.sql(schema.reservations.update().values(ended_us=1))
    assert run(shop.app, "reconcile", "--results", "10").code == 0, "they have expired"


def test_numbers_that_cannot_be_are_told(shop: Shop) -> None:
    for wrong in ({"limit": -1}, {"limit": True}, {"results": "all"}):
        with pytest.raises(InvalidAmount):
            shop.budget.reconcile(**wrong)  # type: ignore[arg-type]


# Invoices.

_NOT_THERE = ["not", "in", "the", "ledger"]


@pytest.fixture
def spent(shop: Shop) -> Shop:
    """A shop whose ledger has one record of 100, 40 and 10 tokens, on 2026-11-30."""
    ledger = ledger_of(shop)
    shop.budget.set("tenant:b", limit=1000, unit="tokens")
    _, attempt = ledger.start(200, budget="tenant:b")
    usage = {"input_tokens": 100, "cache_read_tokens": 40, "output_tokens": 10}
    told = {"provider": "openai", "model": "gpt-4o", "usage": usage, "whole": True}
    attempt.write(Used({"tokens": 110}, True, (), json.dumps(told)), "reply")
    attempt.end(RETURNED)
    attempt.close()
    shop.sql(schema.usage.update().values(recorded_us=1796040000_000_000))
    return shop


def test_an_invoice_that_says_the_same(spent: Shop, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "usage.csv"
    file.write_text(
        "start_time_iso,model,input_tokens,output_tokens,input_cached_tokens\n"
        "2026-11-30T00:00:00+00:00,gpt-4o,100,10,40\n"
    )
    done = run(spent.app, "reconcile", "--invoice", str(file))
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == (
        "export and ledger say the same of 1 day and model, 2026-11-30 to 2026-11-30 "
        "(OpenAI usage of openai)"
    )
    with file.open("rb") as opened:
        assert spent.budget.compare_invoice(opened).ok
    with file.open() as text:
        assert spent.budget.compare_invoice(text).ok


def test_an_invoice_that_differs(spent: Shop, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "usage.csv"
    file.write_text("When,SKU,In,Out\n2026-11-30,The Model,70,11\n2026-11-30,other,1,0\n")
    options = ["--columns", "day=When,model=SKU,input=In,output=Out", "--model", "The Model=gpt-4o"]
    done = run(spent.app, "reconcile", "--invoice", str(file), *options)
    assert done.code == 1
    assert [row for row in done.rows if row and row[0] in ("2026-11-30", "input", "output")] == [
        ["2026-11-30", "gpt-4o", "input", "70", "100", "-30", "-42.86"],
        ["2026-11-30", "gpt-4o", "output", "11", "10", "+1", "+9.09"],
        [
            "2026-11-30",
            "other",
            "input",
            "1",
            "none",
            "+1",
            "+100.00",
            "not",
            "in",
            "the",
            "ledger",
        ],
        ["input", "71", "100", "-29", "-40.85"],
        ["output", "11", "10", "+1", "+9.09"],
    ]
    found = run(spent.app, "reconcile", "--invoice", str(file), *options, "--json")
    assert (found.code, found.json["ok"], len(found.json["differences"])) == (1, False, 2)
    assert found.json["differences"][0]["measures"]["input"] == {
        "invoice": "70", "ledger": "100", "difference": "-30", "percent": "-42.86",
    }  # fmt: skip
    _, by_hand = ledger_of(spent).start(1, budget="tenant:b")
    by_hand.record(1)
    by_hand.end(RETURNED)
    by_hand.close()
    spent.sql(schema.usage.update().values(recorded_us=1796040000_000_000))
    done = run(spent.app, "reconcile", "--invoice", str(file), *options, "--tolerance", "50")
    assert "recorded by hand, with no model, and not compared: 1\n" in done.out
    assert "in 1 day and model" in done.out


def test_a_file_that_cannot_be_read_is_one_line_of_error(
    spent: Shop, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "usage.csv"
    assert run(spent.app, "reconcile", "--invoice", str(file)).failed(
        1, "usage.csv: it cannot be read: No"
    )
    file.write_text("day,cost\n2026-11-30,1\n2026-11-30,one\n")
    done = run(spent.app, "reconcile", "--invoice", str(file))
    assert done.failed(1, "line 3: 'one' is no number of cost")


WRONG: list[tuple[list[str], str]] = [
    (["--invoice", "f.csv", "--repair"], "--invoice compares an export, and proves nothing else"),
    (["--tolerance", "1"], "--tolerance is for --invoice"),
    (["--model", "a=b", "--provider", "x"], "--model, --provider is for --invoice"),
    (["--invoice", "f.csv", "--columns", "day"], "'day' is no NAME=VALUE"),
    (["--invoice", "f.csv", "--model", "a=b", "--model", "a=c"], "its name is there twice"),
    (["--stuck", "soon"], "soon"),
]


@pytest.mark.parametrize(("args", "said"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_what_cannot_be_asked_for_is_wrong_use(
    shop: Shop, run: Run, args: list[str], said: str
) -> None:
    assert run(shop.app, "reconcile", *args).failed(2, said)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"tolerance": "much"}, InvalidAmount),
        ({"tolerance": -1}, InvalidAmount),
        ({"tolerance": 101}, InvalidAmount),
        ({"timezone": "Mars"}, InvalidPeriod),
        ({"columns": {"day": "day"}}, InvoiceError),
    ],
    ids=["no number", "negative", "above 100", "no zone", "nothing to compare"],
)
def test_what_cannot_be_compared_is_told(
    spent: Shop, wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        spent.budget.compare_invoice(["day,cost\n", "2026-11-30,1\n"], **wrong)
