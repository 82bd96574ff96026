"""``usage``: what the running task really uses, and what is left of its hold."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar, overload

from celery_budget import metering
from celery_budget.core.amounts import check_amount
from celery_budget.core.budgets import check_text, check_unit
from celery_budget.core.deadlines import moment
from celery_budget.core.reservations import AlreadyExtended, Closed, Extended, Refused
from celery_budget.core.usage import Used
from celery_budget.errors import ClaimLost, InvalidAmount, PolicyError
from celery_budget.events import Logger
from celery_budget.integration.authority import may_turn
from celery_budget.integration.context import current, current_attempt, installed_on
from celery_budget.integration.effects import step_key
from celery_budget.integration.replies import record_reply
from celery_budget.integration.streams import Either, Reading, pass_on, pass_on_async
from celery_budget.settlement import Attempt

__all__ = [
    "cancelled",
    "check",
    "deadline",
    "extend",
    "idempotency_key",
    "record",
    "remaining",
    "seconds_left",
    "stream",
    "turn_to",
]

logger = Logger(__name__)

T = TypeVar("T")


def record(
    used: Any,
    key: str | None = None,
    unit: str | None = None,
    *,
    provider: str | None = None,
    api_flavor: str | None = None,
    model: str | None = None,
) -> bool:
    """Record what the task that this thread runs has used.

    It is in the ledger when this returns, whatever becomes of the task. A fault of the ledger's
    database is waited out; where the worker has to stop meanwhile, it is on disk, for the next one.
    More than was reserved is recorded in full, added to the hold at once and flagged.

    :param used: an integer from 0 to 2^63-1; a mapping of units to such amounts, all recorded or
        none; or a provider's reply, as a dictionary or its client's object, which is counted in
        every unit that the task draws on: ``tokens``, ``requests``, money, or one named as the
        genai-prices package names a reply's numbers. Several records add up. A reply that does not
        tell what it used is charged the estimate, and flagged ``unmetered``.
    :param key: what makes this record one and the same when it is made again: best the provider's
        id of the response, which a reply brings along. Text of 1 to 255 characters. Without it
        each call counts anew. One key may have a record in each unit.
    :param unit: which of the units is counted that the task's budgets count; that of the first
        budget that is charged by use unless given. Every budget in it is charged that the task
        draws on.
    :param provider: whose reply it is, by the package's id, where that cannot be told.
    :param api_flavor: the package's name of the reply's shape, where that cannot be told.
    :param model: by whose price the reply is charged, where it does not name its model.
    :return: false where ``key`` was recorded before, and nothing was added. Also false, with a
        warning in the log, where no budgeted task runs (a task's function called directly).
    :raises InvalidAmount: for what is no amount; nothing was recorded.
    :raises InvalidReply: for a reply that cannot be read; nothing was recorded.
    :raises InvalidKey: for what is no key; nothing was recorded.
    :raises PolicyError: for a unit in which the task draws on no budget that is charged by use.
    :raises UnknownPrice: for a reply whose model has no price, where the task draws on money; that
        is charged the estimate, the rest is recorded.
    :raises ReservationExhausted: where the task has ``stop_at_hold`` and has used more than is
        reserved for it; all is recorded.
    :raises MissingExtra: for a reply, where the genai-prices package is not installed.
    """
    attempt = current_attempt()
    if attempt is None:
        logger.event("usage.outside", call="usage.record")
        return False
    is_reply = metering.is_reply(used)
    if unit is not None and (is_reply or isinstance(used, Mapping)):
        raise PolicyError(
            f"unit={unit!r} is for a single amount; a mapping names its units, and a reply is "
            "counted in all that the task draws on"
            "; leave it out"
        )
    if is_reply:
        reply = metering.read(used, provider=provider, flavor=api_flavor, model=model)
        return record_reply(attempt, reply, key)
    if isinstance(used, Mapping):
        return attempt.write(Used(_amounts(used)), key)[0]
    return attempt.record(used, key, unit)


def _amounts(used: Mapping[Any, Any]) -> dict[str | None, int]:
    if not used:
        raise InvalidAmount("recorded usage is an empty mapping; give an amount for each unit")
    return {
        check_unit(unit): check_amount(
            amount, f"recorded usage of unit {unit!r} (as a mapping that is no reply)"
        )
        for unit, amount in used.items()
    }


@overload
def stream(
    chunks: AsyncIterable[T],
    key: str | None = None,
    *,
    provider: str | None = None,
    api_flavor: str | None = None,
    model: str | None = None,
) -> AsyncIterator[T]: ...


@overload
def stream(
    chunks: Iterable[T],
    key: str | None = None,
    *,
    provider: str | None = None,
    api_flavor: str | None = None,
    model: str | None = None,
) -> Iterator[T]: ...


def stream(
    chunks: Any,
    key: str | None = None,
    *,
    provider: str | None = None,
    api_flavor: str | None = None,
    model: str | None = None,
) -> Any:
    """Pass on the chunks of a provider's reply, and record what they tell that it used.

    ::

        for event in usage.stream(client.responses.create(…, stream=True)):
            ...

    It is recorded when the stream ends, raises, or is left: with ``break``, an exception or the end
    of the task's call. What has not told all of its usage by then is charged the estimate at least,
    and flagged ``unmetered``. What is asynchronous gives an asynchronous iterator; what can be read
    in both ways can be afterwards.

    :param key: as for :func:`record`, as are the others; none for the reply's own id.
    :raises InvalidKey: at once, for what is no key.
    :raises BudgetError: at its end, while it is read: as :func:`record`. A reply that cannot be
        read is charged the estimate before. One that is not read to its end raises nothing of ours.
    """
    attempt = current_attempt()
    if attempt is None:
        logger.event("usage.outside", call="usage.stream")
        return chunks
    how = {"provider": provider, "flavor": api_flavor, "model": model}
    reading = Reading(attempt, key, how)
    if hasattr(chunks, "__aiter__") and hasattr(chunks, "__iter__"):
        return Either(reading, chunks)
    if hasattr(chunks, "__aiter__"):
        return pass_on_async(reading, chunks)
    return pass_on(reading, chunks)


def remaining(unit: str | None = None) -> int | None:
    """Return how much the task that this thread runs may still use of what is held for it.

    For ``max_tokens=``. Never negative; of several budgets in one unit that with the least counts.

    :param unit: as for :func:`record`.
    :return: none where no budgeted task runs: nothing limits it.
    :raises PolicyError: as :func:`record`.
    """
    attempt = current_attempt()
    return None if attempt is None else attempt.remaining(unit)


def cancelled() -> bool:
    """Tell whether the request that this thread runs was cancelled since it started.

    For work that can stop between two steps: return or raise, as it suits the task; what it has
    used is charged. A retry is not started. One read of the ledger for each call. False where no
    budgeted task runs.
    """
    attempt = current_attempt()
    return attempt is not None and attempt.is_cancelled()


def deadline() -> datetime | None:
    """Return when all of the request that this thread runs is to be over, in UTC.

    None where it has no deadline, and where no budgeted task runs.
    """
    attempt = current_attempt()
    if attempt is None or attempt.deadline_us is None:
        return None
    return moment(attempt.deadline_us)


def seconds_left() -> float | None:
    """Return how many seconds the request that this thread runs has until its deadline.

    For time-outs of calls to others. By the ledger's clock when the attempt started, and this
    process's since; 0 once it has passed, none as for :func:`deadline`.
    """
    attempt = current_attempt()
    return None if attempt is None else attempt.seconds_left


def check() -> None:
    """Stop here if the task's deadline has passed, or it has gone over its hold.

    :raises DeadlinePassed: where its deadline has passed.
    :raises ReservationExhausted: where it has ``stop_at_hold`` and has used more than is reserved
        for it.
    """
    attempt = current_attempt()
    if attempt is not None:
        attempt.check()


def extend(amount: int, key: str | None = None, unit: str | None = None) -> bool:
    """Reserve ``amount`` more for the task this thread runs, on all of its budgets or on none.

    For work that turns out larger than estimated and would rather stop than go over: what was
    started may use what is above the soft stops. The hold lasts until the attempt ends; then what
    was recorded is charged, as always, and a success that recorded nothing is charged estimate and
    extensions.

    :param key: what makes this extension one and the same when the call is repeated.
    :param unit: as for :func:`record`.
    :return: false where the same extension was made before, and outside of budgeted tasks.
    :raises BudgetExceeded: where it does not fit; nothing was changed.
    :raises ClaimLost: where another attempt has taken this one's place.
    :raises InvalidAmount, PolicyError: as :func:`record`.
    """
    attempt = current_attempt()
    if attempt is None:
        logger.event("usage.outside", call="usage.extend")
        return False
    return _is_new(attempt, attempt.extend(amount, key, unit))


def turn_to(lane: str, estimate: int | None = None) -> bool:
    """Have the task this thread runs draw on the budgets of ``lane`` as well, on all or on none.

    For work that began in a lane without a price and goes on with what costs something: it passes
    the gate of that lane's budgets first. What was started may use what is above their soft stops,
    never what is above their hard stops. What is recorded from then on in their units counts for
    them too, what was recorded before does not; what they charge at a start is charged at once. The
    attempts that follow draw on them from the beginning. The task stays in its queue.

    :param lane: the name of a lane with budgets.
    :param estimate: what is held of those that are charged by use, in their units; none for what
        was estimated of the budget that the task names first.
    :return: false where the request draws on them already, and outside of budgeted tasks.
    :raises BudgetExceeded: where it does not fit; nothing was changed.
    :raises ClaimLost: where another attempt has taken this one's place.
    :raises NotAuthorized: where ``authorize=`` does not allow it; nothing was changed.
    :raises UnknownLane, UnknownBudget: where there is none.
    :raises PolicyError: where the lane has no budgets.
    :raises InvalidAmount: for an estimate that is no amount.
    """
    found = current()
    if found is None:
        logger.event("usage.outside", call="usage.turn_to")
        return False
    attempt = found.attempt
    name = check_text(lane, "a lane's name")
    amount = None if estimate is None else check_amount(estimate, "the estimate")
    may_turn(installed_on(found.task.app), found, name, amount)
    return _is_new(attempt, attempt.turn_to(lane, estimate))


def _is_new(attempt: Attempt, outcome: Extended | AlreadyExtended | Refused | Closed) -> bool:
    """Tell whether an attempt holds more than before.

    :raises BudgetExceeded, ClaimLost: where it could not.
    """
    if isinstance(outcome, Refused):
        raise outcome.error()
    if isinstance(outcome, Closed):
        raise ClaimLost(str(attempt.reservation_id))
    return isinstance(outcome, Extended)


def idempotency_key(step: str) -> str:
    """Return a key for a call to somebody else, by which they know it when it is made again.

    The same one in every attempt and delivery of the request that this thread runs; another one for
    another step, and for another request, one that takes this task's place included. A UUID of
    version 5 as text, over the reservation's id and the step.

    :param step: which of the task's calls it is: text of 1 to 255 characters.
    :raises NotRunning: where this thread runs no task with a budget.
    :raises EffectError: for what is no step.
    """
    return step_key(step)
