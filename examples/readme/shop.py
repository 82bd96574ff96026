"""The README's application, ready to run.

As written it wants RabbitMQ, Redis and PostgreSQL on this machine. With a folder in ``SHOP_FOLDER``
it keeps everything there instead: SQLite, Celery's filesystem transport, results in files. In this
folder:

    mkdir -p /tmp/shop && export SHOP_FOLDER=/tmp/shop
    celery -A shop budget init
    celery -A shop budget set tenant:acme --limit 2000 --unit tokens
    celery -A shop worker            # in one terminal
    celery -A shop beat -S budget    # in another
    celery -A shop call shop.draft --args='["Write a haiku.", "acme"]'
    celery -A shop budget report

The ``client`` below is a local stand-in for a model provider's: it has the shape the README's task
needs and calls nobody. Put the real one in its place.
"""
# The README's functions carry no annotations.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from celery import Celery

from celery_budget import CeleryBudget, budgeted, usage


@dataclass(frozen=True)
class Usage:
    """What a reply has used."""

    total_tokens: int


@dataclass(frozen=True)
class Reply:
    """What the stand-in answers."""

    id: str
    output_text: str
    usage: Usage


class Responses:
    """Answers with the prompt in capitals, at a token a word."""

    def create(self, *, model: str, input: str) -> Reply:  # noqa: A002 - the provider's name for it
        text = input.upper()
        used = len(input.split()) + len(text.split())
        return Reply(f"reply-{hashlib.sha256(input.encode()).hexdigest()[:16]}", text, Usage(used))


@dataclass(frozen=True)
class Client:
    """A stand-in for the provider's client."""

    responses: Responses = field(default_factory=Responses)


client = Client()

app = Celery("shop", broker="amqp://localhost", backend="redis://localhost")
app.conf.budget_database_url = "postgresql+psycopg://localhost/shop"
budget = CeleryBudget(app)


@budgeted(
    budget="tenant:{tenant}", estimate=lambda prompt, tenant: len(prompt) // 3 + 800, stage="draft"
)
@app.task(acks_late=True)
def draft(prompt, tenant):
    reply = client.responses.create(model="…", input=prompt)
    usage.record(reply.usage.total_tokens, key=reply.id)
    return reply.output_text


def keep_in(folder: Path) -> None:
    """Use no server: keep ledger, messages and results in ``folder``."""
    messages, results = folder / "messages", folder / "results"
    for path in (messages, results):
        path.mkdir(parents=True, exist_ok=True)
    app.conf.update(
        broker_url="filesystem://",
        broker_transport_options={
            "data_folder_in": str(messages),
            "data_folder_out": str(messages),
            "processed_folder": str(folder / "processed"),
            "control_folder": str(folder / "control"),
            "polling_interval": 0.05,
        },
        result_backend=f"file://{results}",
        worker_enable_remote_control=False,
        beat_schedule_filename=str(folder / "schedule"),
        budget_database_url=f"sqlite:///{folder / 'ledger.db'}",
    )


if "SHOP_FOLDER" in os.environ:
    keep_in(Path(os.environ["SHOP_FOLDER"]).resolve())
