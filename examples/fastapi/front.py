"""Drafts on demand: what is asked for over HTTP runs in a worker, within the tenant's budget."""

from __future__ import annotations

import time
from typing import Annotated, Any

from celery import Celery
from celery.exceptions import Ignore
from fastapi import Depends, FastAPI, Header, HTTPException, Response

from celery_budget import (
    CeleryBudget,
    RequestRuns,
    ResultGone,
    ResultNotReady,
    UnknownRequest,
    budgeted,
    usage,
)
from celery_budget.http import ASGIRefusals
from examples import local

app = Celery("front")
budget = CeleryBudget(app)
local.keep_in(app)  # Put your broker, result backend and database here.

PAGE_TOKENS = 100
PAGE_SECONDS = 0.1

#: Stands for your authentication: it says whose a request is, never the client.
KEYS = {"key-of-acme": "acme", "key-of-zeta": "zeta"}


@budgeted(budget="tenant:{tenant}", estimate=lambda pages: pages * PAGE_TOKENS, stage="draft")
@app.task(bind=True, acks_late=True)
def draft(self: Any, prompt: str, pages: int, tenant: str) -> str:
    """Write pages, and stop between two of them where nobody wants them any more."""
    written: list[str] = []
    for page in range(1, pages + 1):
        if usage.cancelled():
            # Without a result: what was written so far is charged, and the job is "cancelled".
            raise Ignore
        time.sleep(PAGE_SECONDS)  # Your model thinks here.
        usage.record(PAGE_TOKENS - 10, key=f"page {page}")
        written.append(f"{prompt}, page {page}")
        self.update_state(state="PROGRESS", meta={"pages": page, "of": pages})
    return "\n".join(written)


def tenant_of(x_api_key: Annotated[str, Header()]) -> str:
    """Return whose a request is."""
    if x_api_key not in KEYS:
        raise HTTPException(401, "unknown key")
    return KEYS[x_api_key]


Tenant = Annotated[str, Depends(tenant_of)]

api = FastAPI(title="Drafts")
# BudgetExceeded becomes 429, a full queue or a ledger that is down 503, each with Retry-After.
api.add_middleware(ASGIRefusals)


@api.post("/drafts", status_code=202)
async def ask(
    prompt: str,
    tenant: Tenant,
    response: Response,
    pages: int = 1,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> dict[str, str]:
    """Accept a draft, or answer 429; the same Idempotency-Key is the same draft."""
    options = {} if idempotency_key is None else {"request_id": idempotency_key}
    result = await budget.publish(draft.s(prompt, pages, tenant), **options)
    response.headers["Location"] = f"/drafts/{result.id}"
    return {"id": result.id}


@api.get("/drafts/{task_id}")
def status(task_id: str, tenant: Tenant) -> dict[str, Any]:
    """Say how a draft stands; of somebody else's nothing is known."""
    job = find(task_id, tenant)
    return {"state": job.state, "progress": job.progress, "used": job.usage.get("tokens", 0)}


@api.get("/drafts/{task_id}/text")
def text(task_id: str, tenant: Tenant) -> str:
    """Return the text of a draft; 409 while there is none, or if there will be none."""
    job = find(task_id, tenant)
    if job.has_ended and job.state != "succeeded":
        raise HTTPException(409, job.state)
    try:
        written: str = budget.result(task_id, owner=f"tenant:{tenant}")
    except ResultNotReady as error:
        raise HTTPException(409, error.state, {"Retry-After": "1"}) from error
    except ResultGone as error:
        raise HTTPException(410, "not kept any more") from error
    return written


@api.delete("/drafts/{task_id}", status_code=202)
def cancel(task_id: str, tenant: Tenant) -> dict[str, str]:
    """Cancel a draft: what has not started ends at once, what runs is told."""
    find(task_id, tenant)
    try:
        return {"cancel": budget.cancel(task_id)}
    except RequestRuns as error:
        raise HTTPException(409, "has ended") from error


@api.get("/budget")
def balance(tenant: Tenant) -> dict[str, Any]:
    """Say what a tenant has left."""
    found = budget.balance(f"tenant:{tenant}")
    return {"spent": found.spent, "reserved": found.reserved, "available": found.available}


def find(task_id: str, tenant: str) -> Any:
    """Return a tenant's job, or answer 404."""
    try:
        return budget.job(task_id, owner=f"tenant:{tenant}")
    except UnknownRequest as error:
        raise HTTPException(404, "no such draft") from error
