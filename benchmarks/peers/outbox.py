"""django-celery-outbox, in its own environment: a task written to its outbox, and its relay."""

from __future__ import annotations

import json
import logging
import sys
import time

import django
import structlog
from django.conf import settings
from django.core.management import call_command

CONF = json.loads(sys.argv[1])

settings.configure(
    INSTALLED_APPS=["django_celery_outbox"],
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **CONF["database"]}},
    MONITORING_METRICS_ENABLED=False,
    USE_TZ=True,
)
django.setup()
# Else it writes to where the figures go, a line for each message.
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

from django_celery_outbox import OutboxCelery  # noqa: E402
from django_celery_outbox.models import CeleryOutbox  # noqa: E402
from django_celery_outbox.relay import Relay, RelayConfig  # noqa: E402

app = OutboxCelery("peer", set_as_current=False)
app.conf.update(broker_url=CONF["broker"], task_default_queue="peer")


@app.task(name="bench.plain")
def plain(size: int, tenant: str) -> None:
    pass


def enqueue() -> list[float]:
    """One row in a transaction of its own for each call, in microseconds."""
    samples = []
    for _ in range(CONF["calls"]):
        begin = time.perf_counter_ns()
        plain.delay(5, tenant="bench")
        samples.append((time.perf_counter_ns() - begin) / 1000)
    CeleryOutbox.objects.all().delete()
    return samples


def relay() -> list[float]:
    """Rows that wait, published by what its relay does in its loop, in messages a second."""
    for _ in range(CONF["calls"]):
        plain.delay(5, tenant="bench")
    begin = time.perf_counter()
    while CeleryOutbox.objects.exists():
        RELAY._processing()
    return [CONF["calls"] / (time.perf_counter() - begin)]


call_command("migrate", verbosity=0)
RELAY = Relay(app=app, config=RelayConfig.init(idle_time=0.0))
BLOCKS = {"enqueue": enqueue, "relay": relay}

for _ in sys.stdin:
    print(json.dumps(BLOCKS[CONF["block"]]()), flush=True)
