"""What the readers of pages have already: names that fragments of code use and do not make.

A fragment is checked as the body of a function beneath this module's text and, where its page
needs more, beneath what :data:`OF_PAGES` adds. What is ours has its type here; what is the
reader's own, or a provider's, is anything.
"""

from __future__ import annotations

#: Beneath all.
COMMON = """
from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from sqlalchemy import create_engine, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from celery_budget import (
    BudgetedTask, BudgetError, BudgetExceeded, BudgetLine, CeleryBudget, StoreError, budgeted,
    usage,
)

app = Celery("shop")
budget = CeleryBudget(app)
log = logging.getLogger("shop")


@budgeted(budget="tenant:{tenant}", estimate=800)
@app.task
def draft(prompt: str, tenant: str = "acme") -> str:
    return prompt


prompt: str
prompts: list[str]
tenant: str
url: str
first: str
second: str
texts: list[str]
pages: list[str]
task_id: str
args: tuple[str, ...]
result: Any
# The reader's own: models, tables, tasks, providers.
fetch: Any
check: Any
notify: Any
invoice: Any
bonus: Any
order: Any
orders: Any
Order: Any
engine: Any
session: Any
connection: Any
client: Any
reply: Any
chunks: Any
model: Any
asked: dict[str, Any]
"""

#: Beneath what is common, by page.
OF_PAGES: dict[str, str] = {
    "README.md": "drafts: list[Any]",
    "docs/alerts.md": "pager: Any",
    "docs/backpressure.md": """
application: Any
web: Any
from fastapi import FastAPI
api = FastAPI()
def later(*, seconds: float) -> None: ...
from django.http import HttpResponse
""",
    "docs/budgets.md": """
def price(prompt: str) -> int: ...
def cost_of(reply: Any) -> int: ...
""",
    "docs/cancelling.md": "done: Any",
    "docs/dashboard.md": """
from fastapi import FastAPI
async def user_of(cookie: str | None) -> Any: ...
""",
    "docs/effects.md": """
stripe: Any
def write_invoice(session: Session, order_id: int) -> Any: ...
""",
    "docs/fairness.md": "def estimate(text: str) -> int: ...",
    "docs/fallback.md": "small_model: Any\nlarge_model: Any",
    "docs/howto/fastapi.md": """
from typing import Annotated
from fastapi import Depends, FastAPI
from pydantic import BaseModel
api = FastAPI()
OrderRow: Any
def tenant_of() -> str: ...
Tenant = Annotated[str, Depends(tenant_of)]
class Order(BaseModel):
    prompt: str
""",
    "docs/howto/alerts.md": "pager: Any",
    "docs/howto/streaming.md": "channel: Any\nengine: Any\nsend: Any\nstream: Any",
    "docs/log-events.md": "import pythonjsonlogger.json, structlog\nhandler: logging.Handler",
    "docs/lost-workers.md": "provider: Any",
    "docs/retries.md": "class BadPrompt(Exception): ...\nclass AccountClosed(Exception): ...",
    "docs/reuse.md": "summary: Any",
    "docs/testing.md": """
rows: str
@budgeted(budget="tenant:{tenant}", estimate=500)
@app.task(name="shop.written")
def draft(prompt: str, tenant: str) -> str: ...
def order(prompt: str, tenant: str) -> int: ...
""",
    "docs/tracing.md": "exporter: Any",
    "docs/transactions.md": "transaction: Any",
}
