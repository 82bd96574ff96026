"""What tasks' own functions may tell of a lost attempt, by real tasks and their messages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest

from celery_budget import LostAttempt, budgeted, inquiry, settlement
from celery_budget.integration.inquiries import TaskInquiries
from celery_budget.settlement import Delivery
from celery_budget.store.schema import attempts
from tests.integration.support import Shop


async def _later(lost: LostAttempt) -> int:
    return 0


def lost(shop: Shop, **options: Any) -> None:
    """Declare a task with these options, and lose an attempt of it that has recorded 2."""

    @budgeted(budget="tenant:{tenant}", estimate=6, **options)
    @shop.app.task(name="asking.draft")
    def draft(name: str, tenant: str) -> None: ...

    result = draft.delay("one", "a")
    [row] = shop.budget.explain(result.id)
    settings = shop.budget.settings
    delivery = Delivery(
        settings.root,
        UUID(row.reservation["reservation_id"]),
        result.id,
        0,
        0,
        "gone@host/1",
        uuid4(),
        late_ack=False,
        inquires=True,
    )
    attempt = settlement.claim(shop.budget.store, settings, delivery, uuid4())
    assert isinstance(attempt, settlement.Attempt)
    attempt.record(2)
    shop.sql(attempts.update().values(lease_until_us=1, suspected_us=1))
    shop.sweep()


def ask(shop: Shop) -> int:
    """Ask once, its time come."""
    due = attempts.c.lease_until_us.is_not(None)
    shop.sql(attempts.update().where(due).values(lease_until_us=1))
    return inquiry.run_once(shop.budget.store, shop.budget.settings, TaskInquiries(shop.budget))


def give_up(shop: Shop) -> None:
    """Let the time for answers be over."""
    for_answers = shop.budget.settings.lookup_us
    shop.sql(attempts.update().values(ended_us=attempts.c.ended_us - for_answers))


@pytest.mark.parametrize(
    ("answer", "spent"),
    [
        (0, 2),
        (5, 5),
        ([5], 5),
        ((5,), 5),
        ({"tokens": 5}, 5),
    ],
    ids=["nothing", "amount", "list", "tuple", "units"],
)
def test_an_answer(shop: Shop, answer: Any, spent: int) -> None:
    lost(shop, lookup=lambda lost: answer)
    assert ask(shop) == 1
    assert shop.counts()["settled"] == 1
    assert shop.amounts("tenant:a") == (0, spent, 10 - spent)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        (),
        {},
        True,
        False,
        -1,
        1.0,
        float("nan"),
        2**63,
        "5",
        b"5",
        object(),
        LostAttempt,
        {"nonsense": 5},
        {"tokens": 5.0},
        {"tokens": None},
        {1: 5},
        [[5]],
        [5, 5],
        [None],
        {"usage": {"strange_tokens": 5}},
        (one for one in (5,)),
        _later,
    ],
    ids=[
        "none",
        "no replies",
        "no calls",
        "no units",
        "true",
        "false",
        "negative",
        "float",
        "nan",
        "too large",
        "text",
        "bytes",
        "object",
        "class",
        "unknown unit",
        "float of a unit",
        "none of a unit",
        "no unit",
        "nested",
        "two amounts",
        "list of none",
        "unknown provider",
        "generator",
        "function",
    ],
)
def test_what_is_no_answer_changes_nothing_and_is_asked_again(shop: Shop, answer: Any) -> None:
    lost(shop, lookup=lambda lost: answer)
    before = shop.rows(attempts)[0]
    assert ask(shop) == 0
    after = shop.rows(attempts)[0]
    assert (after.claim_id, after.outcome) == (before.claim_id, "uncertain")
    assert after.replays == 1, "it is asked again"
    assert shop.amounts("tenant:a") == (6, 0, 4)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_would_end_the_thread_is_an_error_of_the_task(
    shop: Shop, error: BaseException
) -> None:
    def fails(lost: LostAttempt) -> int:
        raise error

    lost(shop, lookup=fails, compensate=fails)
    assert ask(shop) == 0
    give_up(shop)
    assert ask(shop) == 0, "nothing has undone it yet"
    give_up(shop)
    assert ask(shop) == 1
    assert shop.counts()["lost"] == 1


def test_a_task_that_exits_is_asked_again(shop: Shop) -> None:
    answers: list[Callable[[], int]] = [sys.exit, lambda: 3]
    lost(shop, lookup=lambda lost: answers.pop(0)())
    assert ask(shop) == 0
    assert ask(shop) == 1
    assert shop.amounts("tenant:a") == (0, 3, 7)


@pytest.mark.parametrize("name", ["lookup", "compensate"])
def test_what_only_begins_its_work_has_not_done_it(shop: Shop, name: str) -> None:
    """It hides that it is asynchronous, so that its declaration was taken."""

    def hiding(lost: LostAttempt) -> Any:
        return _later(lost)

    lost(shop, **{name: hiding})
    assert ask(shop) == 0
    assert shop.amounts("tenant:a") == (6, 0, 4)


def test_a_task_that_is_not_known_here_is_left_to_others(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    lost(shop, lookup=lambda lost: 3)
    task = shop.app.tasks.pop("asking.draft")
    assert ask(shop) == 0
    assert "give the relay the modules of all tasks" in caplog.text
    shop.app.tasks["asking.draft"] = task
    assert ask(shop) == 1
    assert shop.amounts("tenant:a") == (0, 3, 7)


def test_a_partial_is_called_with_the_attempt(shop: Shop) -> None:
    def of(provider: str, lost: LostAttempt) -> int:
        assert (provider, lost.args, dict(lost.used)) == ("openai", ("one", "a"), {"tokens": 2})
        return 4

    lost(shop, lookup=functools.partial(of, "openai"))
    assert ask(shop) == 1
    assert shop.amounts("tenant:a") == (0, 4, 6)
