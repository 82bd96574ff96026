"""OpenTelemetry: one trace from the caller to the settlement, metrics, and what fails in them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from celery import chain, group, signals
from celery.exceptions import SoftTimeLimitExceeded
from celery.worker.request import Request
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import _internal as metrics_internal
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_budget import BudgetedTask, BudgetExceeded, tracing, usage
from celery_budget.integration.context import HEADER
from celery_budget.store import schema
from tests.apps import traced
from tests.cluster import Cluster, eventually
from tests.integration.support import Shop, current

BUDGET = {"budget": "tenant:{tenant}", "estimate": 6}
#: What a span of ours is made by.
tracer = trace.get_tracer


class Traces:
    """The spans and metrics of this process."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans of one name, in the order in which they began."""
        found = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return sorted(found, key=lambda span: span.start_time or 0)

    def only(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def metric(self, name: str) -> list[tuple[Mapping[str, Any], Any]]:
        """Return the points of a metric, with their attributes."""
        data = self.reader.get_metrics_data()
        return (
            []
            if data is None
            else [
                (
                    dict(point.attributes),
                    getattr(point, "value", None) or getattr(point, "count", None),
                )
                for resource in data.resource_metrics
                for scope in resource.scope_metrics
                for metric in scope.metrics
                if metric.name == name
                for point in metric.data.data_points
            ]
        )


def installed(monkeypatch: pytest.MonkeyPatch, provider: Any, meters: Any) -> None:
    """Have these be the providers, as the application sets them; of which there is one try."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(metrics_internal, "_METER_PROVIDER", meters)
    tracing._loaded.cache_clear()
    tracing._told.clear()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """Have OpenTelemetry set up in this process."""
    made = Traces()
    installed(monkeypatch, made.provider, made.meters)
    yield made
    tracing._loaded.cache_clear()
    tracing._told.clear()


@pytest.fixture
def tasks(shop: Shop) -> Shop:
    """A shop with tasks, and a budget that has room for them."""
    shop.app.conf.update(worker_hijack_root_logger=False)
    shop.budget.set("tenant:a", limit=100, unit="tokens")
    with current(shop.app):

        @shop.app.task(name="spend", base=BudgetedTask, **BUDGET)
        def spend(tenant: str, used: int = 4) -> int:
            with trace.get_tracer("shop").start_as_current_span("a call to a model"):
                usage.record(used)
            return used

        @shop.app.task(name="untraced", base=BudgetedTask, **BUDGET)
        def untraced(tenant: str) -> None:
            usage.record(4)

        @shop.app.task(name="ask", base=BudgetedTask, **BUDGET)
        def ask(tenant: str) -> None:
            usage.record(1)
            empty = trace.set_span_in_context(trace.INVALID_SPAN)
            with trace.get_tracer("shop").start_as_current_span("its own trace", context=empty):
                untraced.delay(tenant)

        @shop.app.task(name="again", base=BudgetedTask, bind=True, max_retries=1, **BUDGET)
        def again(self: Any, tenant: str) -> int:
            usage.record(1)
            if self.request.retries == 0:
                raise self.retry(countdown=0)
            return 1

        @shop.app.task(name="fail", base=BudgetedTask, **BUDGET)
        def fail(tenant: str) -> None:
            raise ValueError(f"a secret of {tenant}")

        yield shop


def work(shop: Shop, until: Callable[[], bool]) -> None:
    """Relay, and run what comes in this thread, as a worker's pool does, until it is done."""

    def step() -> bool:
        shop.relay()
        with current(shop.app):
            for message in shop.received():
                request = Request(
                    message,
                    app=shop.app,
                    hostname="w@test",
                    task=shop.task(message.headers["task"]),
                )
                request.execute()
        return until()

    eventually(step)


def settled(shop: Shop, count: int = 1) -> Callable[[], bool]:
    return lambda: shop.counts()["settled"] >= count and shop.amounts("tenant:a")[0] == 0


def context(span: ReadableSpan) -> trace.SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def follows(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == context(parent).span_id


def ours(span: ReadableSpan) -> dict[str, Any]:
    """Return the attributes of our own, by their short names."""
    return {
        key.removeprefix("celery_budget."): value
        for key, value in (span.attributes or {}).items()
        if key.startswith("celery_budget.")
    }


def test_one_trace_from_the_caller_to_the_settlement(tasks: Shop, traces: Traces) -> None:
    with tracer("web").start_as_current_span("POST /documents"):
        result = tasks.task("spend").delay("a", used=8)
    work(tasks, settled(tasks))
    web, reserve = traces.only("POST /documents"), traces.only("budget.reserve")
    publish, run = traces.only("budget.publish"), traces.only("budget.run")
    settle, model = traces.only("budget.settle"), traces.only("a call to a model")
    assert follows(reserve, web)
    assert follows(publish, reserve)
    assert follows(run, reserve)
    assert follows(model, run)
    assert follows(settle, run)
    [row] = tasks.rows(schema.reservations)
    of = {"reservation_id": str(row.reservation_id)}
    assert ours(reserve) == of | {
        "request_id": result.id,
        "root": "default",
        "stage": "spend",
        "estimator": f"{row.estimator}:{row.estimator_version}",
        "budgets": ("tenant:a",),
        "estimates": (6,),
        "outcome": "admitted",
    }
    assert ours(publish) == of
    assert ours(run) == of | {"attempt": 1, "outcome": "returned"}
    assert ours(settle) == {
        "state": "settled",
        "outcome": "returned",
        "budgets": ("tenant:a",),
        "units": ("tokens",),
        "estimated": (6,),
        "used": (8,),
        "charged": (8,),
        "over": True,
        "unmetered": False,
    }
    kinds = [span.kind.name for span in (reserve, publish, run, settle)]
    assert kinds == ["PRODUCER", "CLIENT", "CONSUMER", "INTERNAL"]
    for span in (reserve, publish, run):
        assert span.attributes is not None
        assert span.attributes["messaging.message.id"] == result.id
        assert span.attributes["celery.task_name"] == "spend"
        assert span.attributes["messaging.system"] == "celery"
    assert publish.attributes is not None
    assert publish.attributes["messaging.destination.name"] == tasks.app.conf.task_default_queue
    assert all(span.status.is_unset for span in traces.exporter.get_finished_spans())


def test_a_refusal_is_an_outcome_and_no_error(tasks: Shop, traces: Traces) -> None:
    tasks.budget.set("tenant:a", limit=5, unit="tokens")
    with pytest.raises(BudgetExceeded):
        tasks.task("spend").delay("a")
    span = traces.only("budget.reserve")
    assert span.status.is_unset
    told = ours(span)
    assert (told["outcome"], told["reason"], told["budget"]) == ("refused", "exhausted", "tenant:a")
    assert (told["unit"], told["requested"], told["available"]) == ("tokens", 6, 5)
    [(attributes, count)] = traces.metric("celery_budget.admissions")
    assert (attributes["outcome"], attributes["reason"], count) == ("refused", "exhausted", 1)
    assert traces.metric("celery_budget.refused") == [
        ({"unit": "tokens", "reason": "exhausted"}, 6)
    ]


def test_an_error_is_told_by_its_class_only(tasks: Shop, traces: Traces) -> None:
    result = tasks.task("fail").delay("a")
    work(tasks, settled(tasks))
    run = traces.only("budget.run")
    assert run.attributes is not None
    assert (run.status.status_code.name, run.status.description) == ("ERROR", None)
    assert run.attributes["error.type"] == "ValueError"
    assert ours(run)["outcome"] == "raised"
    assert not any("secret" in span.to_json() for span in traces.exporter.get_finished_spans())
    assert result.state == "FAILURE"
    with pytest.raises(Exception, match="nobody"):
        tasks.task("spend").delay("nobody")
    [*_, reserve] = traces.named("budget.reserve")
    assert reserve.attributes is not None
    assert reserve.attributes["error.type"] == "UnknownBudget"


def test_a_retry_is_a_child_of_the_run_it_follows(tasks: Shop, traces: Traces) -> None:
    tasks.task("again").delay("a")
    work(tasks, settled(tasks))
    first, second = traces.named("budget.run")
    reserve, retried = traces.named("budget.reserve")
    assert follows(first, reserve)
    assert follows(retried, first)
    assert follows(second, retried)
    assert [ours(span)["attempt"] for span in (first, second)] == [1, 2]
    assert [ours(span)["outcome"] for span in (first, second)] == ["retried", "returned"]
    assert first.status.is_unset
    assert ours(retried)["retries"] == 1
    assert [ours(span)["state"] for span in traces.named("budget.settle")] == ["waiting", "settled"]


def test_what_a_task_publishes_is_a_child_of_the_span_that_it_is_in(
    tasks: Shop, traces: Traces
) -> None:
    tasks.task("ask").delay("a")
    work(tasks, settled(tasks, 2))
    _, inner = traces.named("budget.reserve")
    assert follows(inner, traces.only("its own trace"))


def test_a_chain_is_one_trace(tasks: Shop, traces: Traces) -> None:
    spend = tasks.task("spend")
    chain(spend.si("a"), spend.si("a")).delay()
    work(tasks, settled(tasks, 2))
    first, second = traces.named("budget.run")
    reserve, step = traces.named("budget.reserve")
    assert follows(first, reserve)
    assert follows(step, first)
    assert follows(second, step)
    assert context(second).trace_id == context(reserve).trace_id


def test_a_parked_request_goes_on_in_its_trace(tasks: Shop, traces: Traces) -> None:
    tasks.budget.set("tenant:a", limit=1, unit="tokens")
    tasks.task("spend").apply_async(("a",), on_refused="park")
    assert ours(traces.only("budget.reserve"))["outcome"] == "parked"
    tasks.budget.set("tenant:a", limit=100, unit="tokens")
    tasks.sweep()
    work(tasks, settled(tasks))
    assert follows(traces.only("budget.run"), traces.only("budget.reserve"))


def test_a_group_is_admitted_in_a_span_with_links(tasks: Shop, traces: Traces) -> None:
    group([tasks.task("spend").s("a") for _ in range(3)]).delay()
    reserves, admit = traces.named("budget.reserve"), traces.only("budget.admit")
    assert [ours(span)["outcome"] for span in reserves] == ["collected"] * 3
    assert {link.context.span_id for link in admit.links} == {
        context(span).span_id for span in reserves
    }
    assert ours(admit) == {"messages": 3, "admitted": 3}


def test_a_repeat_from_another_trace_is_the_same_request(tasks: Shop, traces: Traces) -> None:
    def ask() -> str:
        with tracer("web").start_as_current_span("POST /documents"):
            result = tasks.task("spend").apply_async(("a",), request_id="doc-1")
        return str(result.id)

    first = ask()
    before = tasks.rows(schema.outbox)
    assert "traceparent" in before[0].envelope
    assert ask() == first
    assert tasks.rows(schema.outbox) == before
    outcomes = [ours(span)["outcome"] for span in traces.named("budget.reserve")]
    assert outcomes == ["admitted", "repeated"]
    [(row,)] = [tuple(tasks.rows(schema.reservations))]
    assert row.request_id == "doc-1"


def test_the_fingerprint_is_that_of_an_untraced_request(
    tasks: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Traces()
    installed(monkeypatch, made.provider, made.meters)
    tasks.task("spend").apply_async(("a",), request_id="doc-1")
    installed(monkeypatch, None, None)
    tasks.task("spend").apply_async(("a",), request_id="doc-1")
    tasks.task("spend").apply_async(("a",), request_id="doc-2")
    with_trace, without = sorted(tasks.rows(schema.outbox), key=lambda row: row.created_us)
    assert ("traceparent" in with_trace.envelope, "traceparent" in without.envelope) == (
        True,
        False,
    )
    one, other = tasks.rows(schema.reservations)
    assert one.fingerprint == other.fingerprint
    tracing._loaded.cache_clear()


def test_a_publish_starts_no_trace_of_its_own(tasks: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the caller has no OpenTelemetry and the relay has."""
    tasks.task("spend").delay("a")
    made = Traces()
    installed(monkeypatch, made.provider, made.meters)
    assert tasks.relay().published == 1
    assert made.exporter.get_finished_spans() == ()
    tracing._loaded.cache_clear()


def test_the_setting_switches_it_off(make_shop: Callable[..., Shop], traces: Traces) -> None:
    shop = make_shop(budget_tracing=False)
    with current(shop.app):

        @shop.app.task(name="spend", base=BudgetedTask, **BUDGET)
        def spend(tenant: str) -> None:
            """Do nothing."""

        spend.delay("a")
    shop.relay()
    [message] = shop.received()
    assert "traceparent" not in message.headers
    assert traces.exporter.get_finished_spans() == ()
    assert traces.metric("celery_budget.admissions") == []


def test_without_the_package_nothing_is_made(tasks: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracing._loaded.cache_clear()
    assert type(tracing._loaded()) is tracing.Tracing
    tasks.task("spend").delay("a")
    assert tasks.counts()["admitted"] == 1
    tracing._loaded.cache_clear()


def test_the_package_is_imported_when_it_is_first_needed() -> None:
    code = "import sys, celery_budget.cli; print('opentelemetry' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_metrics(tasks: Shop, traces: Traces) -> None:
    tasks.task("spend").delay("a", used=8)
    tasks.task("fail").delay("a")
    work(tasks, settled(tasks, 2))
    assert sorted(
        (one["outcome"], one["stage"], count)
        for one, count in traces.metric("celery_budget.admissions")
    ) == [("admitted", "fail", 1), ("admitted", "spend", 1)]
    unit = {"unit": "tokens"}
    assert traces.metric("celery_budget.estimated") == [(unit, 12)]
    assert traces.metric("celery_budget.used") == [(unit, 8)]
    assert traces.metric("celery_budget.charged") == [(unit, 8)]
    assert traces.metric("celery_budget.wait.duration") == [({}, 2)]
    assert sorted(one["outcome"] for one, _ in traces.metric("celery_budget.run.duration")) == [
        "raised",
        "returned",
    ]
    assert traces.metric("celery_budget.admission.duration") == [({"outcome": "admitted"}, 2)]


class Broken(SpanProcessor):
    """Fails wherever it is asked."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        raise RuntimeError("on_start")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("on_end")


class Ends(SpanProcessor):
    """Fails where a span ends, as an exporter that is waited for does."""

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("on_end")


class Propagator(TextMapPropagator):
    """Fails wherever it is asked."""

    fields = frozenset({"traceparent"})

    def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Context:
        raise RuntimeError("extract")

    def inject(self, carrier: Any, context: Any = None, setter: Any = None) -> None:
        raise RuntimeError("inject")


@pytest.mark.parametrize("fault", ["start", "end", "propagator"])
def test_what_fails_in_telemetry_is_told_once_and_touches_no_work(
    tasks: Shop,
    traces: Traces,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if fault == "start":
        traces.provider.add_span_processor(Broken())
    elif fault == "end":
        traces.provider.add_span_processor(Ends())
    else:
        monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", Propagator())

    for task in ("untraced", "fail", "again"):
        tasks.task(task).delay("a")
    with pytest.raises(Exception, match="nobody"):
        tasks.task("spend").delay("nobody")
    work(tasks, settled(tasks, 3))
    assert tasks.counts()["settled"] == 3
    assert tasks.amounts("tenant:a") == (0, 6, 94)
    told = [
        vars(record)["budget_step"]
        for record in caplog.records
        if vars(record).get("budget_event") == "tracing.failed"
    ]
    assert told
    assert len(told) == len(set(told))


def test_a_meter_that_fails_touches_no_work(
    tasks: Shop, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no meter")

    monkeypatch.setattr(metrics, "get_meter", fail)
    tasks.task("spend").delay("a")
    work(tasks, settled(tasks))
    assert tasks.amounts("tenant:a") == (0, 4, 96)


def test_a_propagator_cannot_change_a_message(
    tasks: Shop, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Greedy(Propagator):
        def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Context:
            return Context()

        def inject(self, carrier: Any, context: Any = None, setter: Any = None) -> None:
            carrier.update(id="another", task="another", own="kept", number=7)
            carrier[HEADER] = "another"

    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", Greedy())
    result = tasks.task("spend").delay("a")
    tasks.relay()
    [message] = tasks.received()
    headers = message.headers
    assert (headers["id"], headers["task"], headers["own"]) == (result.id, "spend", "kept")
    assert "number" not in headers
    assert str(tasks.rows(schema.reservations)[0].reservation_id) in headers[HEADER]


def test_celerys_own_instrumentation_beside_it(tasks: Shop, traces: Traces) -> None:
    """As it does: a span by signals around the publication and the run, in the same headers."""
    opened: list[Any] = []

    def publishing(headers: dict[str, Any], **_: Any) -> None:
        opened.append(tracer("celery").start_as_current_span("apply_async/spend"))
        opened[-1].__enter__()
        propagate.inject(headers)

    def published(**_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    def starts(task: Any, **_: Any) -> None:
        led = propagate.extract(
            {key: one for key, one in vars(task.request).items() if isinstance(one, str)}
        )
        opened.append(tracer("celery").start_as_current_span("run/spend", context=led))
        opened[-1].__enter__()

    signals.before_task_publish.connect(publishing, weak=False)
    signals.after_task_publish.connect(published, weak=False)
    signals.task_prerun.connect(starts, weak=False)
    signals.task_postrun.connect(published, weak=False)
    try:
        tasks.task("spend").delay("a")
        work(tasks, settled(tasks))
    finally:
        signals.before_task_publish.disconnect(publishing)
        signals.after_task_publish.disconnect(published)
        signals.task_prerun.disconnect(starts)
        signals.task_postrun.disconnect(published)
    theirs, their_run = traces.only("apply_async/spend"), traces.only("run/spend")
    run = traces.only("budget.run")
    assert follows(theirs, traces.only("budget.reserve"))
    assert follows(traces.only("budget.publish"), theirs)
    assert follows(their_run, theirs)
    assert follows(run, their_run)
    assert [link.context.span_id for link in run.links] == [context(theirs).span_id]


def test_one_trace_over_processes(
    tmp_path: Path, embedded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller, a relay and a pool worker, each with a provider of its own."""
    cluster = Cluster(tmp_path, embedded, traced)
    spans = tmp_path / "spans"
    try:
        cluster.budget.set("tenant:a", limit=10, unit="tokens")
        installed(monkeypatch, traced.set_up(cluster.conf), None)
        with tracer("web").start_as_current_span("POST /documents"):
            cluster.task("traced").delay("a")
        cluster.relay()
        cluster.worker(concurrency=1)
        found = eventually(
            lambda: {one["name"]: one for one in map(json.loads, spans.read_text().splitlines())},
            lambda found: {"budget.run", "budget.publish"} <= set(found),
        )
    finally:
        cluster.stop()
        tracing._loaded.cache_clear()
    assert len({one["trace"] for one in found.values()}) == 1
    assert (
        len({found[name]["pid"] for name in ("budget.reserve", "budget.publish", "budget.run")})
        == 3
    )
    parents = {
        "POST /documents": None,
        "budget.reserve": "POST /documents",
        "budget.publish": "budget.reserve",
        "budget.run": "budget.reserve",
        "a call to a model": "budget.run",
        "budget.settle": "budget.run",
    }
    assert set(found) == set(parents)
    for name, parent in parents.items():
        assert found[name]["parent"] == (None if parent is None else found[parent]["span"])
    assert found["budget.settle"]["attributes"]["celery_budget.charged"] == [4]


def test_a_time_limit_that_strikes_in_telemetry_is_the_tasks(traces: Traces, shop: Shop) -> None:
    def strike() -> None:
        raise SoftTimeLimitExceeded

    with pytest.raises(SoftTimeLimitExceeded):
        tracing._guarded("span", None, strike)
