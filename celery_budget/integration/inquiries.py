"""Asking tasks about lost attempts: their ``lookup`` and ``compensate``, called with those."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kombu.message import Message
from kombu.serialization import prepare_accept_content

from celery_budget import metering
from celery_budget.core.amounts import check_amount
from celery_budget.core.budgets import check_unit
from celery_budget.core.losses import Losses, LostAttempt
from celery_budget.core.messages import WireMessage
from celery_budget.errors import PolicyError
from celery_budget.integration.capture import read
from celery_budget.integration.inline import gated_task
from celery_budget.integration.replies import record_reply
from celery_budget.settlement import Attempt
from celery_budget.store import inquiries
from celery_budget.store.inquiries import Inquiry

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["TaskInquiries"]


class TaskInquiries:
    """Asks an application's tasks; see :class:`celery_budget.inquiry.Tasks`."""

    def __init__(self, budget: CeleryBudget) -> None:
        self._budget = budget

    def lookup(self, seen: Inquiry) -> bool | None:
        """Ask what an attempt has used and record that; false while nobody can tell.

        :raises LookupError: where this process does not know the task, or its message is gone.
        :raises PolicyError, InvalidAmount, InvalidReply: for an answer that is none.
        """
        losses, lost = self._lost(seen)
        if losses.lookup is None:
            return None
        answer = _called("lookup", losses.lookup, lost)
        if answer is None or (isinstance(answer, (list, tuple, Mapping)) and not answer):
            # No call was found: that tells of none.
            return False
        self._record(seen, answer)
        return True

    def compensate(self, seen: Inquiry) -> bool:
        """Have undone what an attempt may have done.

        :raises LookupError: as :meth:`lookup`.
        :raises PolicyError: where it is asynchronous.
        """
        losses, lost = self._lost(seen)
        if losses.compensate is None:
            return False
        _called("compensate", losses.compensate, lost)
        return True

    def _lost(self, seen: Inquiry) -> tuple[Losses, LostAttempt]:
        task = gated_task(self._budget.app, seen.task_name)
        if task is None:
            raise LookupError(
                f"task {seen.task_name} is not known here; give the relay the modules of all tasks"
            )
        if seen.message is None:
            raise LookupError(f"the message of task {seen.task_id} is gone")
        args, kwargs = self._arguments(seen.message)
        lost = LostAttempt(
            seen.task_id,
            seen.task_name,
            args,
            kwargs,
            seen.attempt,
            seen.used,
            seen.reservation_id,
        )
        return task.budget_losses(args, kwargs), lost

    def _arguments(self, written: WireMessage) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments in a message, of either version of Celery's protocol."""
        envelope = read(written)
        message = Message(
            body=written.body,
            content_type=envelope.content_type,
            content_encoding=envelope.content_encoding,
            headers=envelope.headers,
            accept=prepare_accept_content(self._budget.app.conf.accept_content),
        )
        body = message.decode()
        if isinstance(body, Mapping):
            return tuple(body.get("args") or ()), body.get("kwargs") or {}
        args, kwargs, _ = body
        return tuple(args), kwargs

    def _record(self, seen: Inquiry, answer: Any) -> None:
        budget = self._budget
        attempt = Attempt(
            budget.store,
            budget.settings,
            budget.settings.root,
            seen.reservation_id,
            seen.attempt,
            seen.claim_id,
        )
        answers = answer if isinstance(answer, (list, tuple)) else [answer]
        if len(answers) > 1 and not all(map(metering.is_reply, answers)):
            raise PolicyError(
                f"lookup= of {seen.task_name} returned a list of {len(answers)} with what is no "
                "provider's reply; give one amount or one mapping for all"
            )
        for number, one in enumerate(answers):
            name = f"lookup:{seen.attempt}:{number}"
            if metering.is_reply(one):
                reply = metering.read(one)
                record_reply(attempt, reply, None if reply.id else name)
                continue
            amounts = one if isinstance(one, Mapping) else {None: one}
            budget.store.run(
                inquiries.record_total,
                budget.settings.root,
                seen.reservation_id,
                seen.attempt,
                name,
                {
                    None if unit is None else check_unit(unit): check_amount(
                        amount, f"what lookup= of {seen.task_name} returned"
                    )
                    for unit, amount in amounts.items()
                },
            )


def _called(name: str, function: Callable[[LostAttempt], Any], lost: LostAttempt) -> Any:
    """Call a task's own function.

    :raises PolicyError: for what only begins its work: nobody here would go on with it; and for a
        ``sys.exit`` or the like, by which the thread would end that asks.
    """
    try:
        answer = function(lost)
    except Exception:
        raise
    except BaseException as error:
        raise PolicyError(f"{name}= of {lost.task_name} raised {error!r}; correct it") from error
    if inspect.isawaitable(answer) or inspect.isgenerator(answer):
        if inspect.iscoroutine(answer) or inspect.isgenerator(answer):
            answer.close()
        raise PolicyError(
            f"{name}= of {lost.task_name} returned {answer!r}, which is not run; give a plain "
            "function"
        )
    return answer
