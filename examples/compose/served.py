"""The FastAPI example, with the servers that the environment names."""

from __future__ import annotations

import os

from examples.fastapi.front import api, app, budget

__all__ = ["api", "app", "budget"]

app.conf.update(
    broker_url=os.environ["CELERY_BROKER_URL"],
    result_backend=os.environ["CELERY_RESULT_BACKEND"],
    broker_connection_retry_on_startup=True,
    budget_database_url=os.environ["CELERY_BUDGET_DATABASE_URL"],
    # Where a worker keeps what it could not tell the ledger; on a volume that outlives it.
    budget_spool=os.environ.get("CELERY_BUDGET_SPOOL", "/tmp/budget-spool"),  # noqa: S108
    budget_metrics_host=os.environ.get("CELERY_BUDGET_METRICS_HOST", "127.0.0.1"),
    budget_metrics_port=int(os.environ.get("CELERY_BUDGET_METRICS_PORT", "0")),
)


@api.get("/health")
def health() -> dict[str, int]:
    """Say how many relays there are; 503 while the ledger does not answer."""
    return {"relays": len(budget.relays())}
