"""The shop with OpenTelemetry set up: each process appends its spans to the file ``spans``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from celery_budget import budgeted, usage
from tests.apps import shop

CONF = "TRACED_CONF"


class Appended(SpanExporter):
    """Writes each span as a line of JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a") as file:
            for span in spans:
                context = span.get_span_context()
                line = {
                    "name": span.name,
                    "trace": context.trace_id,
                    "span": context.span_id,
                    "parent": None if span.parent is None else span.parent.span_id,
                    "attributes": dict(span.attributes or {}),
                    "pid": os.getpid(),
                }
                file.write(json.dumps(line) + "\n")
        return SpanExportResult.SUCCESS


def make_app(conf: dict[str, Any]) -> Celery:
    app = shop.make_app(conf)

    @budgeted(budget=shop.TENANT, estimate=6)
    @app.task(name="shop.traced", shared=False, acks_late=True)
    def traced(tenant: str) -> None:
        with trace.get_tracer("shop").start_as_current_span("a call to a model"):
            usage.record(4)

    return app


def set_up(conf: dict[str, Any]) -> TracerProvider:
    """Return a provider whose spans go to the file beside the journal."""
    provider = TracerProvider()
    path = Path(conf["shop_journal"]).parent / "spans"
    provider.add_span_processor(SimpleSpanProcessor(Appended(path)))
    return provider


if CONF in os.environ:
    _conf = json.loads(os.environ[CONF])
    trace.set_tracer_provider(set_up(_conf))
    app = make_app(_conf)
