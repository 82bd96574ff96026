"""Every way to publish a task: what is called, and how many bodies run for it.

Each is called once with the tasks of a plain application and once with those of one with budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery import Celery, chain, chord, group, signature
from celery.beat import ScheduleEntry, Scheduler
from celery.canvas import StampingVisitor

from tests.integration.publication.tasks import Tasks

HEADERS = {"traceparent": "00-4bf92f-00f067-01", "tracestate": "a=1,b=2", "x_request": "r-1"}


@dataclass(frozen=True)
class Path:
    """One way to publish.

    :ivar publish: does it and returns the result, if it gives one.
    :ivar runs: how many bodies run for it in all.
    """

    publish: Callable[[Tasks], Any]
    runs: int


PATHS: dict[str, Path] = {}


def path(*, runs: int = 1) -> Callable[[Any], Any]:
    """Add a function to :data:`PATHS`, by its name."""

    def add(publish: Callable[[Tasks], Any]) -> Callable[[Tasks], Any]:
        PATHS[publish.__name__.strip("_").replace("_", " ")] = Path(publish, runs)
        return publish

    return add


# One task.


@path()
def delay(t: Tasks) -> Any:
    return t.work.delay(1, t.tenant)


@path()
def a_signature(t: Tasks) -> Any:
    return t.work.s(tenant=t.tenant).set(priority=3).apply_async((1,))


@path()
def an_immutable_signature(t: Tasks) -> Any:
    return t.work.si(1, t.tenant).apply_async(("ignored",))


@path()
def a_signature_as_a_dictionary(t: Tasks) -> Any:
    return signature(dict(t.work.s(1, t.tenant)), app=t.app).delay()


@path()
def send_task(t: Tasks) -> Any:
    return t.app.send_task("paths.work", (1,), {"tenant": t.tenant})


@path()
def send_task_without_the_code(t: Tasks) -> Any:
    """An application that knows neither the task nor its budget."""
    with stranger(t.app) as app:
        sent = app.send_task("paths.work", (1,), {"tenant": t.tenant})
        return t.app.AsyncResult(sent.id)


@path()
def beat(t: Tasks) -> Any:
    return beaten(t.app, t.tenant, {"priority": 3, "expires": 86_400})


@path()
def beat_without_the_code(t: Tasks) -> Any:
    """Beat runs in an application that does not know the task."""
    with stranger(t.app) as app:
        return t.app.AsyncResult(beaten(app, t.tenant, {}).id)


def beaten(app: Celery, tenant: str, options: dict[str, Any]) -> Any:
    """Have beat send an entry of its schedule."""
    every = timedelta(days=1)
    entry = ScheduleEntry(
        "entry", "paths.work", schedule=every, args=(1, tenant), options=options, app=app
    )
    return Scheduler(app, lazy=True).apply_async(entry, advance=False)


@contextmanager
def stranger(app: Celery) -> Any:
    """An application with the same broker and queues, and no tasks."""
    other = Celery("stranger", set_as_current=False)
    names = ("broker_url", "broker_transport_options", "result_backend", "task_queues")
    defaults = [f"task_default_{name}" for name in ("queue", "exchange", "routing_key")]
    other.conf.update({name: app.conf[name] for name in (*names, *defaults)})
    other.now = app.now
    other._local.oid = app.thread_oid
    with other:
        yield other


# Many at once.


@path(runs=3)
def a_group(t: Tasks) -> Any:
    return group(t.work.s(number, t.tenant) for number in range(3)).apply_async()


@path(runs=3)
def a_group_with_an_unbudgeted_member(t: Tasks) -> Any:
    return group(t.work.s(1, t.tenant), t.plain.s(2), t.work.s(3, t.tenant)).apply_async()


@path(runs=3)
def a_chain(t: Tasks) -> Any:
    return chain(t.work.s(1, t.tenant), t.work.s(t.tenant), t.work.s(t.tenant)).apply_async()


@path(runs=3)
def a_chain_with_an_unbudgeted_step(t: Tasks) -> Any:
    return (t.work.s(1, t.tenant) | t.plain.s() | t.work.s(t.tenant)).apply_async()


@path(runs=3)
def a_chain_with_an_unbudgeted_head(t: Tasks) -> Any:
    return (t.plain.s(1) | t.work.s(t.tenant) | t.plain.s()).apply_async()


@path(runs=2)
def a_chain_with_immutable_steps(t: Tasks) -> Any:
    return chain(t.work.si(1, t.tenant), t.work.si(2, t.tenant)).apply_async()


@path(runs=2)
def a_chain_that_fails(t: Tasks) -> Any:
    """The second step is never published; the errback is, by the first."""
    steps = chain(t.fail.s("no", t.tenant), t.work.s(t.tenant))
    return steps.apply_async(link_error=t.caught.s(tenant=t.tenant))


@path(runs=3)
def a_chord(t: Tasks) -> Any:
    return chord([t.work.s(1, t.tenant), t.work.s(2, t.tenant)])(t.total.s(t.tenant))


@path(runs=4)
def a_chord_with_unbudgeted_members(t: Tasks) -> Any:
    header = [t.plain.s(1), t.work.s(2, t.tenant), t.plain.s(3)]
    return chord(header)(t.total.s(t.tenant))


@path(runs=3)
def a_chord_with_an_unbudgeted_body(t: Tasks) -> Any:
    return chord([t.work.s(1, t.tenant), t.work.s(2, t.tenant)])(t.plain.si(3))


@path(runs=2)
def a_chord_that_fails(t: Tasks) -> Any:
    return chord([t.work.s(1, t.tenant), t.fail.s("no", t.tenant)])(t.total.s(t.tenant))


@path(runs=5)
def a_chain_in_a_group(t: Tasks) -> Any:
    return group(
        t.work.s(1, t.tenant) | t.work.s(t.tenant),
        t.work.s(2, t.tenant),
        t.plain.s(3) | t.work.s(t.tenant),
    ).apply_async()


@path(runs=4)
def a_group_in_a_chain(t: Tasks) -> Any:
    """Celery makes a chord of the group and what follows it."""
    members = group(t.work.s(t.tenant), t.work.s(t.tenant))
    return (t.work.s(1, t.tenant) | members | t.total.s(t.tenant)).apply_async()


@path(runs=3)
def a_group_at_the_end_of_a_chain(t: Tasks) -> Any:
    return (t.work.s(1, t.tenant) | group(t.work.s(t.tenant), t.plain.s())).apply_async()


@path(runs=5)
def a_chord_in_a_chord(t: Tasks) -> Any:
    inner = chord([t.work.s(1, t.tenant), t.work.s(2, t.tenant)], t.total.s(t.tenant))
    return chord([inner, t.work.s(3, t.tenant)])(t.total.s(t.tenant))


@path(runs=4)
def a_chord_whose_body_is_a_chain(t: Tasks) -> Any:
    header = [t.work.s(1, t.tenant), t.work.s(2, t.tenant)]
    return chord(header)(t.total.s(t.tenant) | t.work.s(t.tenant))


@path(runs=4)
def a_chord_after_a_chain(t: Tasks) -> Any:
    header = [t.work.s(t.tenant), t.work.s(t.tenant)]
    return chain(t.work.s(1, t.tenant), chord(header, t.total.s(t.tenant))).apply_async()


@path(runs=3)
def map_(t: Tasks) -> Any:
    return t.mapped.map([(number, t.tenant) for number in range(3)]).apply_async()


@path(runs=3)
def starmap(t: Tasks) -> Any:
    return t.work.starmap([(number, t.tenant) for number in range(3)]).apply_async()


@path(runs=5)
def chunks(t: Tasks) -> Any:
    return t.work.chunks([(number, t.tenant) for number in range(5)], 2).apply_async()


# What follows a task.


@path(runs=3)
def callbacks(t: Tasks) -> Any:
    return t.work.apply_async((1, t.tenant), link=[t.work.s(t.tenant), t.plain.s()])


@path(runs=3)
def callbacks_of_a_task_without_a_budget(t: Tasks) -> Any:
    return t.plain.apply_async((1,), link=[t.work.s(t.tenant), t.plain.s()])


@path(runs=3)
def a_chain_as_a_callback(t: Tasks) -> Any:
    return t.work.apply_async((1, t.tenant), link=t.work.s(t.tenant) | t.plain.s())


@path(runs=3)
def errbacks(t: Tasks) -> Any:
    links = [t.caught.s(tenant=t.tenant), t.plain.si("failed")]
    return t.fail.apply_async(("no", t.tenant), link_error=links)


@path(runs=2)
def a_retry(t: Tasks) -> Any:
    return t.retried.delay(1, t.tenant, countdown=0)


@path(runs=2)
def a_retry_with_a_countdown(t: Tasks) -> Any:
    return t.retried.delay(1, t.tenant, countdown=0.2)


@path(runs=2)
def a_retry_with_an_eta(t: Tasks) -> Any:
    return t.retried.delay(1, t.tenant, eta=0.2)


@path(runs=2)
def a_retry_with_other_arguments(t: Tasks) -> Any:
    return t.retried.delay(1, t.tenant, args=[2, t.tenant], kwargs={}, countdown=0)


@path(runs=2)
def a_retry_to_another_queue(t: Tasks) -> Any:
    return t.retried.delay(1, t.tenant, queue="other", countdown=0)


@path(runs=2)
def a_retry_with_a_priority(t: Tasks) -> Any:
    kwargs = {"tenant": t.tenant, "countdown": 0}
    return t.retried.apply_async((1,), kwargs, queue=t.queue("ranked"), priority=7)


@path(runs=2)
def a_retry_with_headers(t: Tasks) -> Any:
    return t.retried.apply_async((1, t.tenant), {"countdown": 0}, headers=HEADERS)


@path(runs=3)
def a_retry_in_a_chain(t: Tasks) -> Any:
    return (t.retried.s(1, t.tenant, countdown=0) | t.work.s(t.tenant)).apply_async()


@path(runs=4)
def a_retry_in_a_chord(t: Tasks) -> Any:
    header = [t.retried.s(1, t.tenant, countdown=0), t.work.s(2, t.tenant)]
    return chord(header)(t.total.s(t.tenant))


@path(runs=3)
def autoretry(t: Tasks) -> Any:
    return t.autoretried.apply_async((1, t.tenant), headers=HEADERS)


@path(runs=2)
def replaced_by_a_budgeted_task(t: Tasks) -> Any:
    return t.replaced.apply_async(("budgeted", t.tenant), headers=HEADERS)


@path(runs=2)
def replaced_by_an_unbudgeted_task(t: Tasks) -> Any:
    return t.replaced.delay("unbudgeted", t.tenant)


@path(runs=3)
def replaced_by_a_group(t: Tasks) -> Any:
    return t.replaced.delay("group", t.tenant)


@path(runs=4)
def replaced_by_a_chain(t: Tasks) -> Any:
    return t.replaced.delay("chain", t.tenant)


@path(runs=4)
def replaced_by_a_chord(t: Tasks) -> Any:
    return t.replaced.delay("chord", t.tenant)


@path(runs=3)
def replaced_in_a_chain(t: Tasks) -> Any:
    return (t.replaced.s("unbudgeted", t.tenant) | t.work.s(t.tenant)).apply_async()


@path(runs=4)
def replaced_in_a_chord(t: Tasks) -> Any:
    header = [t.replaced.s("budgeted", t.tenant), t.work.s(2, t.tenant)]
    return chord(header)(t.total.s(t.tenant))


# Options that tests/integration/test_capture.py does not send already, and those of a canvas.


class Stamps(StampingVisitor):
    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"tenant_stamp": "a", "stamped_headers": ["tenant_stamp"]}


@path(runs=4)
def stamps(t: Tasks) -> Any:
    steps = t.work.s(1, t.tenant) | group(t.work.s(t.tenant), t.work.s(t.tenant))
    steps |= t.total.s(t.tenant)
    steps.stamp(Stamps())
    return steps.apply_async()


@path(runs=3)
def headers(t: Tasks) -> Any:
    """Of a chain its first step gets them."""
    steps = chain(t.work.s(1, t.tenant), t.plain.s(), t.work.s(t.tenant))
    return steps.apply_async(headers=HEADERS)


@path(runs=2)
def a_group_with_options(t: Tasks) -> Any:
    members = group(t.work.s(number, t.tenant) for number in range(2))
    return members.apply_async(queue=t.queue("ranked"), priority=7, headers=HEADERS)


def given(**options: Any) -> Callable[[Tasks], Any]:
    return lambda t: t.work.apply_async((1,), {"tenant": t.tenant}, **options)


for name in ("json", "pickle", "yaml", "msgpack"):
    PATHS[f"serializer {name}"] = Path(given(serializer=name), 1)
for name in ("zlib", "gzip", "bzip2", "lzma"):
    PATHS[f"compression {name}"] = Path(given(compression=name), 1)


# What apply_async takes, for those that run it; test_capture.py sends the same and more.

OPTIONS: dict[str, Path] = {
    "countdown": Path(given(countdown=0.2), 1),
    "expires": Path(given(expires=3600), 1),
    "priority": Path(lambda t: given(queue=t.queue("ranked"), priority=7)(t), 1),
    "queue": Path(lambda t: given(queue=t.queue("topic"))(t), 1),
    "headers": Path(given(headers=HEADERS), 1),
    "reply_to": Path(given(reply_to="somewhere"), 1),
    "shadow": Path(given(shadow="another name"), 1),
    "time limits": Path(given(time_limit=60, soft_time_limit=50), 1),
    "retry": Path(given(retry=True, retry_policy={"max_retries": 2}), 1),
    "no retry": Path(given(retry=False), 1),
    "stamped headers": Path(given(stamped_headers=["stamp"], stamp="a"), 1),
    "task id": Path(lambda t: given(task_id=f"task-{t.tenant}")(t), 1),
}


def option(*, runs: int = 1) -> Callable[[Any], Any]:
    """As :func:`path`, for :data:`OPTIONS`."""

    def add(publish: Callable[[Tasks], Any]) -> Callable[[Tasks], Any]:
        OPTIONS[publish.__name__.removesuffix("_")] = Path(publish, runs)
        return publish

    return add


@option()
def eta(t: Tasks) -> Any:
    return given(eta=t.app.now() + timedelta(seconds=0.2))(t)


@option()
def exchange(t: Tasks) -> Any:
    return given(exchange=t.app.conf.task_default_exchange, routing_key=t.queue("other"))(t)


@option(runs=2)
def link(t: Tasks) -> Any:
    return given(link=t.work.s(t.tenant))(t)


@option(runs=2)
def link_error(t: Tasks) -> Any:
    return t.fail.apply_async(("no", t.tenant), link_error=t.caught.s(tenant=t.tenant))


@option()
def apply(t: Tasks) -> Any:
    """Runs where it is called."""
    return t.work.apply((1, t.tenant))


@option()
def task_always_eager(t: Tasks) -> Any:
    t.app.conf.task_always_eager = True
    try:
        return t.work.delay(1, t.tenant)
    finally:
        t.app.conf.task_always_eager = False


@option(runs=2)
def apply_of_a_chain(t: Tasks) -> Any:
    return chain(t.work.s(1, t.tenant), t.work.s(t.tenant)).apply()


@option(runs=2)
def apply_with_a_retry(t: Tasks) -> Any:
    return t.retried.apply((1, t.tenant), {"countdown": 0})


@option()
def ignore_result(t: Tasks) -> None:
    given(ignore_result=True)(t)


@option()
def connection(t: Tasks) -> Any:
    with t.app.connection_for_write() as own:
        return given(connection=own)(t)


@option()
def producer(t: Tasks) -> Any:
    with t.app.connection_for_write() as own, own.channel() as channel:
        return given(producer=t.app.amqp.Producer(channel, auto_declare=False))(t)
