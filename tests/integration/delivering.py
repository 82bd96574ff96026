"""Messages as a worker has them: the worker's own code runs them, in this process."""

from __future__ import annotations

from typing import Any

from celery_budget.integration.context import find_installed
from tests.integration.support import Shop


class _Consumer:
    """What a request wants of its worker."""

    hostname = "here@test"
    connection_errors = ()


def delivered(shop: Shop, message: Any) -> Any:
    """Have a message run as a worker does; the request that Celery made of it.

    :param message: as it was taken out of the queue; whatever a test has made of it.
    """
    app = shop.app
    app.finalize()
    task = app.tasks[message.headers["task"]]
    kind = task.Request
    if isinstance(kind, str):
        from celery.utils.imports import symbol_by_name

        kind = symbol_by_name(kind)
    request = kind(
        message, app=app, hostname=_Consumer.hostname, task=task,
        on_ack=lambda *_: None, on_reject=lambda *_: None, eventer=None,
        connection_errors=(), headers=message.headers, body=message.body, decoded=False,
    )  # fmt: skip
    task.__trace__ = None
    request.execute()
    budget = find_installed(app)
    if budget is not None and budget.closings is not None:
        budget.closings.flush()
    return request
