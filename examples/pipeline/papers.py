"""Papers in three stages: sections are drafted and reviewed side by side, then finished as one."""

from __future__ import annotations

from typing import Any

from celery import Celery, chain, chord

from celery_budget import CeleryBudget, budgeted, usage
from examples import local

app = Celery("papers")
# How often the chord's end is looked for; of use only with backends that cannot count, as files.
app.conf.result_chord_retry_interval = 0.2
budget = CeleryBudget(app)
local.keep_in(app)  # Put your broker, result backend and database here.


def declare() -> None:
    """Make the ledger and its budget."""
    budget.init()
    # New papers get 8,000 of these; the last 2,000 are for the stages of those that were begun.
    budget.set("tenant:acme", limit=10_000, unit="tokens", soft_stop=0.8)


@budgeted(budget="tenant:{tenant}", estimate=1_000, stage="draft")
@app.task(acks_late=True)
def draft(title: str, tenant: str) -> str:
    """Draft one section."""
    usage.record(850, key=usage.idempotency_key("draft"))
    return f"{title}: drafted"


@budgeted(budget="tenant:{tenant}", estimate=300, stage="review")
@app.task(acks_late=True)
def review(text: str, tenant: str) -> str:
    """Review what was drafted."""
    usage.record(250, key=usage.idempotency_key("review"))
    return f"{text}, reviewed"


@budgeted(budget="tenant:{tenant}", estimate=500, stage="finish")
@app.task(acks_late=True)
def finish(texts: str | list[str], tenant: str) -> str:
    """Make one text of the sections."""
    usage.record(450, key=usage.idempotency_key("finish"))
    sections = [texts] if isinstance(texts, str) else texts
    return f"{'; '.join(sections)}; finished"


def paper(title: str, sections: int, tenant: str) -> Any:
    """Start a paper: its drafts are reserved together, or refused together.

    Reviews and the finish follow from them and are never refused: they are admitted up to the hard
    stop, and wait where they do not fit even that.
    """
    drafts = [
        chain(draft.s(f"{title} {number}", tenant), review.s(tenant))
        for number in range(1, sections + 1)
    ]
    return chord(drafts, finish.s(tenant)).apply_async()


def note(title: str, tenant: str) -> Any:
    """Start a paper of one section: all its stages are reserved before the first one runs."""
    stages = chain(draft.s(title, tenant), review.s(tenant), finish.s(tenant))
    return stages.apply_async(reserve="chain")
