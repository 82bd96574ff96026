"""Commands for what could not be published, and where else it is shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import states

from celery_budget import budgeted
from celery_budget.errors import InvalidAmount
from celery_budget.integration.outcomes import MOST_TRACEBACK, traced
from celery_budget.store import schema
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

TASK = "quarantined.draft"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def isolate(shop: Shop, estimate: int = 6) -> str:
    """Have a message go into quarantine; its task's id."""
    task = shop.app.tasks.get(TASK)
    if task is None:
        task = budgeted(budget="tenant:a", estimate=estimate)(
            shop.app.task(name=TASK, shared=False)(_draft)
        )
    result = task.delay(1, b="two")
    kept = shop.rows(schema.outbox)[0].envelope
    shop.sql(schema.outbox.update().values(envelope="[bold]{"))
    assert shop.relay().quarantined == 1
    shop.sql(schema.quarantine.update().values(envelope=kept))
    return str(result.id)


def _draft(*args: object, **kwargs: object) -> None:
    pass


def test_what_is_in_quarantine_is_listed(on_both: Shop, run: Run) -> None:
    assert run(on_both.app, "quarantine", "list").out == "No message is in quarantine.\n"
    assert run(on_both.app, "quarantine", "list", "--json").json == {"quarantine": []}
    first, second = isolate(on_both), isolate(on_both)
    done = run(on_both.app, "quarantine", "list")
    assert (done.code, done.err) == (0, "")
    header, _, *rows = done.rows
    assert header == ["id", "task", "queue", "reason", "tries", "since", "error"]
    assert [row[1] for row in rows] == [f"{TASK}[{second}]", f"{TASK}[{first}]"]
    found = run(on_both.app, "quarantine", "list", "--limit", "1", "--json").json["quarantine"]
    assert [(one["task_id"], one["reason"], one["budgeted"]) for one in found] == [
        (second, "undecodable", True)
    ]
    assert found[0]["quarantine_id"] == rows[0][0]
    with pytest.raises(InvalidAmount):
        on_both.budget.quarantine(0)


def test_it_is_in_the_report_and_in_a_requests_story_and_is_no_mismatch(
    on_both: Shop, run: Run
) -> None:
    assert "No message is in quarantine." in run(on_both.app, "report").out
    task_id = isolate(on_both)
    assert run(on_both.app, "report", "--json").json["quarantine"] == {"undecodable": 1}
    told = ["undecodable", "1", "its", "stored", "form", "cannot", "be", "read"]
    assert told in run(on_both.app, "report").rows
    assert run(on_both.app, "reconcile").code == 0
    [story] = run(on_both.app, "explain", task_id, "--json").json["requests"]
    [isolated] = story["reservation"]["quarantine"]
    assert (isolated["task_id"], isolated["reason"]) == (task_id, "undecodable")
    facts = run(on_both.app, "explain", task_id).facts
    assert facts["state"].strip() == "released: unpublishable"
    assert facts["quarantine"].strip().startswith("undecodable since ")


def test_one_is_shown(on_both: Shop, run: Run) -> None:
    task_id = isolate(on_both)
    known = run(on_both.app, "quarantine", "show", task_id).facts
    assert known["task"].strip() == f"{TASK}[{task_id}]"
    assert known["reason"].strip() == "undecodable: its stored form cannot be read"
    assert known["publishing failed"].strip() == "1 times"
    on_both.sql(
        schema.quarantine.update().values(
            reason="max_attempts", attempts=2, used='{"tenant:a": 4}', error="ValueError('no')"
        )
    )
    known = run(on_both.app, "quarantine", "show", task_id).facts
    assert known["reason"].strip() == "max_attempts: failed, all its attempts used up"
    assert (known["attempts"].strip(), known["used of tenant:a"].strip()) == ("2", "4")
    assert known["error"].strip() == "ValueError('no')"
    found = run(on_both.app, "quarantine", "show", task_id, "--json").json
    assert (found["attempts"], found["used"]) == (2, {"tenant:a": 4})
    assert (found["args"], found["kwargs"], found["traceback"]) == ("(1,)", "{'b': 'two'}", None)
    assert known["arguments"].strip() == "(1,) {'b': 'two'}"
    assert run(on_both.app, "quarantine", "show", "nothing").failed(1, "is in quarantine")


def test_a_traceback_is_shown_after_the_error(on_both: Shop, run: Run) -> None:
    task_id = isolate(on_both)
    try:
        raise ValueError("a\x00b")
    except ValueError as error:
        told = traced(error)
    on_both.sql(schema.quarantine.update().values(reason="failed", attempts=1, error=told))
    facts, shown = run(on_both.app, "quarantine", "show", task_id).out.split("\n\n")
    assert "ValueError('a" in facts
    assert shown.startswith("Traceback (most recent call last):\n")
    assert "test_cli_quarantine.py" in shown
    found = run(on_both.app, "quarantine", "show", task_id, "--json").json
    assert found["error"] == told.split("\n")[0]
    assert found["traceback"].splitlines()[0] == shown.splitlines()[0]
    assert r"a\x00b" in found["traceback"]
    assert "Traceback" not in run(on_both.app, "quarantine", "list").out
    [listed] = run(on_both.app, "quarantine", "list", "--json").json["quarantine"]
    assert listed["error"] == found["error"]


@pytest.mark.parametrize(
    "envelope", ["[bold]{", "[]", "{}", '{"headers": []}', '{"headers": {"argsrepr": 5}}']
)
def test_arguments_that_cannot_be_read_are_left_out(shop: Shop, run: Run, envelope: str) -> None:
    task_id = isolate(shop)
    shop.sql(schema.quarantine.update().values(envelope=envelope))
    found = run(shop.app, "quarantine", "show", task_id, "--json").json
    assert (found["args"], found["kwargs"]) == (None, None)
    assert "arguments" not in run(shop.app, "quarantine", "show", task_id).facts


def test_the_end_of_a_long_traceback_is_kept() -> None:
    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError("deep")
        # Two that call each other: Python does not fold their frames.
        fall_again(depth - 1)

    def fall_again(depth: int) -> None:
        fall(depth)

    try:
        fall(200)
    except ValueError as error:
        told = traced(error)
    assert len(told) < MOST_TRACEBACK + 100
    assert told.rstrip().endswith('raise ValueError("deep")')
    assert traced(ValueError("none")) == "ValueError('none')"


def test_a_full_one_is_told(make_shop: Callable[..., Shop], run: Run) -> None:
    shop = make_shop(budget_max_quarantine=1)
    assert run(shop.app, "report", "--json").json["quarantine_full"] is False
    isolate(shop)
    assert "quarantine is full" in run(shop.app, "report").out
    assert run(shop.app, "report", "--json").json["quarantine_full"] is True
    assert run(shop.app, "relay", "--health", "--json").json["quarantine_full"] is True


@pytest.mark.parametrize("by", ["task_id", "quarantine_id"])
def test_a_message_is_published_again(on_both: Shop, run: Run, by: str) -> None:
    task_id = isolate(on_both)
    [one] = run(on_both.app, "quarantine", "list", "--json").json["quarantine"]
    on_both.budget.set("tenant:a", limit=5)
    before = on_both.ledger("budget_refusals")
    assert run(on_both.app, "quarantine", "requeue", one[by]).failed(1, "'tenant:a'")
    assert on_both.ledger("budget_refusals") == before
    on_both.budget.set("tenant:a", limit=10)
    done = run(on_both.app, "quarantine", "requeue", one[by])
    assert (done.code, done.out) == (0, f"{one[by]} will be published again\n")
    assert on_both.amounts("tenant:a") == (6, 0, 4)
    assert on_both.relay().published == 1
    assert [message.headers["id"] for message in on_both.received()] == [task_id]
    said = f"no message '{one[by]}' is in quarantine"
    assert run(on_both.app, "quarantine", "requeue", one[by]).failed(1, said)
    first, again = run(on_both.app, "explain", task_id, "--json").json["requests"]
    assert again["reservation"]["reason"] is None
    became = f"unpublishable, requeued as {again['reservation']['reservation_id']}"
    assert first["reservation"]["reason"] == became
    assert f"released: {became}" in run(on_both.app, "explain", task_id).out


def test_a_message_is_discarded(on_both: Shop, run: Run) -> None:
    task_id = isolate(on_both)
    assert on_both.app.AsyncResult(task_id).state == states.FAILURE
    done = run(on_both.app, "quarantine", "discard", task_id, "--json")
    assert (done.code, done.json) == (0, {"discarded": task_id})
    assert run(on_both.app, "quarantine", "discard", task_id).failed(1, "is in quarantine")
    assert on_both.counts()["released"] == 1
    told = run(on_both.app, "explain", task_id).facts["state"].strip()
    assert told == "released: unpublishable, discarded"


def test_a_requeued_one_is_told_in_json(shop: Shop, run: Run) -> None:
    task_id = isolate(shop)
    found = run(shop.app, "quarantine", "requeue", task_id, "--json").json
    assert found == {"requeued": task_id}


@pytest.mark.parametrize(
    "args", [["requeue"], ["discard"], ["list", "--limit", "0"], ["lost"], ["list", "more"]]
)
def test_a_wrong_command_line_is_told_in_one_line(shop: Shop, run: Run, args: list[str]) -> None:
    assert run(shop.app, "quarantine", *args).failed(2, "--help")
