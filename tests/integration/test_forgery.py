"""Messages that somebody else has written, or altered: the ledger decides, not their headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from celery_budget import UnknownRequest, budgeted, usage
from celery_budget.integration.context import HEADER
from celery_budget.store import schema
from tests.integration.delivering import delivered
from tests.integration.support import Shop

ran: list[tuple[Any, ...]] = []


@pytest.fixture(autouse=True)
def _ran() -> None:
    ran.clear()


@pytest.fixture
def shop(on_both: Shop) -> Shop:
    """On either store: an application of two tenants, the other one has budget as well."""
    on_both.budget.set("tenant:b", limit=10, unit="tokens")

    def draft(tenant: str, text: str = "") -> str:
        ran.append((tenant, text))
        usage.record(1)
        return f"secret of {tenant}"

    def other(tenant: str, text: str = "") -> None:
        ran.append(("other", tenant, text))

    for name, body in (("forged.draft", draft), ("forged.other", other)):
        task = on_both.app.task(name=name, shared=False)(body)
        budgeted(budget="tenant:{tenant}", estimate=4)(task)
    return on_both


def sent(shop: Shop, tenant: str = "a", **options: Any) -> Any:
    """The message of an admitted call, as it is in the queue."""
    shop.task("forged.draft").apply_async((tenant,), **options)
    shop.relay()
    [message] = shop.received()
    return message


def with_body(message: Any, args: list[Any], **embed: Any) -> None:
    before = json.loads(message.body)
    message.body = json.dumps([args, before[1], {**before[2], **embed}])
    message._decoded_cache = None


def argued(message: Any) -> None:
    with_body(message, ["a", "altered"])


def of_another(message: Any) -> None:
    with_body(message, ["b"])


def followed(message: Any) -> None:
    step = {"task": "forged.draft", "args": ["b"], "kwargs": {}, "options": {}, "immutable": True}
    with_body(message, ["a"], chain=[step])


def renamed(message: Any) -> None:
    message.headers["task"] = "forged.other"


ALTERED: dict[str, Callable[[Any], None]] = {
    "other arguments": argued,
    "another tenant's": of_another,
    "another successor": followed,
    "another task": renamed,
}


@pytest.mark.parametrize("how", ALTERED)
def test_an_altered_message_runs_nothing_and_changes_nothing(shop: Shop, how: str) -> None:
    message = sent(shop)
    before = shop.ledger()
    ALTERED[how](message)
    message.headers["budget_digest"] = None
    delivered(shop, message)
    assert ran == []
    assert shop.ledger() == before
    assert shop.app.AsyncResult(message.headers["id"]).state == "PENDING"
    # The one that was admitted runs all the same.
    shop.sql(schema.outbox.update().values(state="due", due_us=0))
    shop.relay()
    [again] = shop.received()
    delivered(shop, again)
    assert ran == [("a", "")]
    assert shop.amounts("tenant:a") == (0, 1, 9)


@pytest.mark.parametrize("how", ["as it was", *ALTERED])
def test_a_replay_after_the_end_runs_nothing(shop: Shop, how: str) -> None:
    message = sent(shop)
    delivered(shop, message)
    ran.clear()
    before, result = shop.ledger(), shop.app.AsyncResult(message.headers["id"])
    ALTERED.get(how, lambda _: None)(message)
    delivered(shop, message)
    assert ran == []
    assert shop.ledger() == before
    assert (result.state, result.result) == ("SUCCESS", "secret of a")
    assert shop.amounts("tenant:a") == (0, 1, 9)


def test_a_compressed_message_runs_and_another_task_does_not(shop: Shop) -> None:
    message = sent(shop, compression="zlib")
    message.headers["task"] = "forged.other"
    delivered(shop, message)
    assert ran == []
    message.headers["task"] = "forged.draft"
    delivered(shop, message)
    assert ran == [("a", "")]


def test_a_renamed_task_is_known_by_its_old_name(shop: Shop) -> None:
    """Messages that were sent before a task was renamed come to its alias; it may try again."""
    message = sent(shop)

    def renamed(self: Any, tenant: str, text: str = "") -> None:
        ran.append((self.name, tenant, self.request.retries))
        if self.request.retries == 0:
            raise self.retry(countdown=0)

    task = shop.app.task(name="forged.renamed", bind=True, shared=False)(renamed)
    budgeted(budget="tenant:{tenant}", estimate=4)(task)
    shop.app.tasks["forged.draft"] = shop.app.tasks["forged.renamed"]
    delivered(shop, message)
    shop.make_due()
    shop.relay()
    [again] = shop.received()
    delivered(shop, again)
    assert ran == [("forged.renamed", "a", 0), ("forged.renamed", "a", 1)]
    assert shop.amounts("tenant:a") == (0, 4, 6)


def test_another_tenants_reservation_pays_for_nothing(shop: Shop) -> None:
    """A message with the reservation of another request is admitted by what it asks itself."""
    theirs, mine = sent(shop, "b"), sent(shop, "a")
    mine.headers[HEADER] = theirs.headers[HEADER]
    mine.headers["id"] = "mine"
    delivered(shop, mine)
    assert ran == [("a", "")]
    assert shop.amounts("tenant:b") == (4, 0, 6)
    assert shop.amounts("tenant:a") == (4, 1, 5)
    delivered(shop, theirs)
    assert shop.amounts("tenant:b") == (0, 1, 9)


@pytest.mark.parametrize("value", ["", "x", "default/x", "default/" + "0" * 32, 7, None, ["x"]])
def test_a_header_that_is_none_is_as_no_header(shop: Shop, value: Any) -> None:
    message = sent(shop)
    message.headers[HEADER] = value
    message.headers["id"] = "elsewhere"
    delivered(shop, message)
    assert ran == [("a", "")]
    assert shop.amounts("tenant:a") == (4, 1, 5)


@pytest.mark.parametrize("header", ["theirs", None])
@pytest.mark.parametrize("request_id", [None, "order-1"])
def test_the_id_of_another_task_gives_nothing(
    shop: Shop, header: str | None, request_id: str | None
) -> None:
    """Not its budget, nor its result, which stays what it is."""
    theirs = sent(shop, "b", request_id=request_id)
    delivered(shop, theirs)
    before = shop.ledger("budget_refusals")
    ran.clear()
    mine = sent(shop, "a")
    before_mine = shop.ledger("budget_refusals")
    mine.headers["id"] = theirs.headers["id"]
    mine.headers[HEADER] = theirs.headers[HEADER] if header else None
    delivered(shop, mine)
    assert ran == []
    assert shop.ledger("budget_refusals") == before_mine
    assert before != before_mine
    result = shop.app.AsyncResult(theirs.headers["id"])
    assert (result.state, result.result) == ("SUCCESS", "secret of b")


def test_amounts_and_attempts_are_not_the_headers(shop: Shop) -> None:
    message = sent(shop)
    message.headers |= {
        "budget_lines": {"tenant:a": 0}, "budget_estimate": 0, "estimate": 0, "budget": "tenant:b",
        "finishing": True, "budget_planned": message.headers[HEADER], "budget_lane": "none",
        "request_id": "x", "deadline": 1,
    }  # fmt: skip
    delivered(shop, message)
    assert ran == [("a", "")]
    assert shop.amounts("tenant:a") == (0, 1, 9)
    assert shop.amounts("tenant:b") == (0, 0, 10)


@pytest.mark.parametrize("retries", [1, 7, -1])
def test_another_attempt_than_the_ledgers_runs_nothing(shop: Shop, retries: int) -> None:
    message = sent(shop)
    message.headers["retries"] = retries
    delivered(shop, message)
    assert ran == []
    assert shop.amounts("tenant:a") == (4, 0, 6)


def test_a_raised_nesting_draws_on_what_it_asks_for(shop: Shop) -> None:
    """Replaced by itself it would be another request: it is not the message that was admitted."""
    message = sent(shop)
    message.headers["replaced_task_nesting"] = 1
    delivered(shop, message)
    reserved, spent, _ = shop.amounts("tenant:a")
    assert len(ran) in (0, 1)
    assert (reserved, spent) in ((4, 0), (4, 1))


def test_a_result_is_its_owners(shop: Shop) -> None:
    message = sent(shop, "b", request_id="order-1")
    delivered(shop, message)
    task_id = message.headers["id"]
    assert shop.budget.result(task_id, owner="tenant:b") == "secret of b"
    for ask in (shop.budget.result, shop.budget.job):
        with pytest.raises(UnknownRequest):
            ask(task_id, owner="tenant:a")
    # The same request id of another owner is another request.
    mine = shop.task("forged.draft").apply_async(("a",), request_id="order-1")
    assert mine.id != task_id
