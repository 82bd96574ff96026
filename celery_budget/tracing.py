"""Spans and metrics by OpenTelemetry, where the application has set it up; nothing elsewhere.

The only module that knows OpenTelemetry, of which it needs the API (extra ``otel``) and imports it
when it is first asked. Without it, without a provider, or with ``budget_tracing`` off, a span is
:data:`NOTHING` and a count is dropped.

A message carries the context of the span that reserved it, by whatever propagator the application
has set, in its headers; so one trace leads from the caller by relay and worker to the settlement.

Nothing that fails in here reaches the work: it is logged once, as ``tracing.failed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from celery_budget.errors import BudgetExceeded, QueueFull
from celery_budget.events import Logger
from celery_budget.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["METRICS", "NOTHING", "Kind", "Span", "Tracing", "let_through", "of"]

R = TypeVar("R")

logger = Logger(__name__)

#: What spans and metrics are made by.
SCOPE = "celery_budget"

#: Whose context a message carries is a producer's; see OpenTelemetry's conventions for messaging.
Kind = Literal["producer", "client", "consumer", "internal"]

#: The metrics: what kind, in which unit, and what of.
METRICS: Mapping[str, tuple[Literal["counter", "histogram"], str, str]] = {
    "celery_budget.admissions": ("counter", "{request}", "requests by what came of them"),
    "celery_budget.refused": ("counter", "{unit}", "what was asked for and refused, by unit"),
    "celery_budget.waived": (
        "counter",
        "{unit}",
        "what was admitted though it would be refused were it enforced, by unit",
    ),
    "celery_budget.estimated": ("counter", "{unit}", "what settled requests had estimated"),
    "celery_budget.used": ("counter", "{unit}", "what settled requests have used"),
    "celery_budget.charged": ("counter", "{unit}", "what settled requests were charged"),
    "celery_budget.admission.duration": ("histogram", "s", "how long an admission takes"),
    "celery_budget.wait.duration": ("histogram", "s", "from admission to the first claim"),
    "celery_budget.run.duration": ("histogram", "s", "how long an attempt runs"),
}

_MAX_LINKS = 128

_through: tuple[type[BaseException], ...] = ()
_told: set[str] = set()


def let_through(*errors: type[BaseException]) -> None:
    """Name errors that are no fault of telemetry's where they come up in it, as a time limit."""
    global _through  # noqa: PLW0603
    _through = errors


class Span:
    """A span, or nothing: what it is told then is dropped.

    As a context it is the current one, and ends with it. An error that leaves it is its error, by
    its class only, but for refusals, which are an outcome, and what was said to be expected.
    """

    #: Whether anything is kept of what it is told.
    recording = False

    def set(self, **attributes: Any) -> None:
        """Set attributes, ``celery_budget.`` before each of their names; none is left out."""

    def set_named(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes by their whole names."""

    def carrier(self) -> dict[str, str]:
        """Return its context as headers."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it."""


#: The span that is none.
NOTHING = Span()


class Tracing:
    """Spans and metrics that are none."""

    def is_on(self) -> bool:
        """Tell whether anybody keeps spans."""
        return False

    def span(
        self,
        name: str,
        kind: Kind,
        *,
        parent: Mapping[str, Any] | None = None,
        inner: bool = False,
        only_within: bool = False,
        links: Iterable[Mapping[str, Any]] = (),
        start_ns: int | None = None,
        expected: tuple[type[BaseException], ...] = (),
    ) -> Span:
        """Return a new span, to be entered.

        :param parent: headers with the context of what led to it. The span that is current counts
            where it is of the same trace, as that of an instrumentation of Celery's is.
        :param inner: the span that is current counts in any case, if there is one.
        :param only_within: none where no context is found: it would be a trace of its own.
        :param links: headers with contexts that it has to do with.
        :param expected: errors that are outcomes.
        """
        return NOTHING

    def count(self, name: str, amount: int, **attributes: Any) -> None:
        """Add to a counter of :data:`METRICS`."""

    def measure(self, name: str, seconds: float, **attributes: Any) -> None:
        """Record a time in a histogram of :data:`METRICS`."""


_OFF = Tracing()


def of(settings: Settings) -> Tracing:
    """Return what makes spans and metrics, as the settings have it."""
    return _loaded() if settings.tracing else _OFF


@cache
def _loaded() -> Tracing:
    try:
        from opentelemetry import metrics, propagate, trace
    except ImportError:
        return _OFF
    return _On(trace, metrics, propagate)


def _guarded(step: str, otherwise: R, function: Callable[[], R]) -> R:
    """Call ``function``; where it fails, say so once and return ``otherwise``."""
    try:
        return function()
    except _through:
        raise
    except Exception as error:
        if step not in _told:
            _told.add(step)
            with suppress(Exception):
                kind = type(error).__name__
                logger.exception("tracing.failed", step=step, error_type=kind)
        return otherwise


class _On(Tracing):
    """Spans and metrics of OpenTelemetry, if a provider is set; looked for each time."""

    def __init__(self, trace: Any, metrics: Any, propagate: Any) -> None:
        self.trace = trace
        self.propagate = propagate
        self._metrics = metrics
        self._tracer = trace.get_tracer(SCOPE)
        self._instruments: dict[str, Any] = {}

    def is_on(self) -> bool:
        return not isinstance(self.trace.get_tracer_provider(), self.trace.ProxyTracerProvider)

    def span(
        self,
        name: str,
        kind: Kind,
        *,
        parent: Mapping[str, Any] | None = None,
        inner: bool = False,
        only_within: bool = False,
        links: Iterable[Mapping[str, Any]] = (),
        start_ns: int | None = None,
        expected: tuple[type[BaseException], ...] = (),
    ) -> Span:
        if not self.is_on():
            return NOTHING
        of = (parent, inner, only_within, links, start_ns, expected)
        make = partial(self._span, name, kind, *of)
        return _guarded("span", NOTHING, make)

    def _span(
        self,
        name: str,
        kind: Kind,
        parent: Mapping[str, Any] | None,
        inner: bool,
        only_within: bool,
        links: Iterable[Mapping[str, Any]],
        start_ns: int | None,
        expected: tuple[type[BaseException], ...],
    ) -> Span:
        current = self.trace.get_current_span().get_span_context()
        context, found = None, []
        if parent and not (inner and current.is_valid):
            extracted = self.propagate.extract(_texts(parent))
            led = self.trace.get_current_span(extracted).get_span_context()
            if led.is_valid and current.trace_id == led.trace_id:
                found.append(led)
            elif led.is_valid:
                context = extracted
        if only_within and context is None and not current.is_valid:
            return NOTHING
        for one in list(links)[:_MAX_LINKS]:
            led = self.trace.get_current_span(self.propagate.extract(_texts(one)))
            found.append(led.get_span_context())
        span = self._tracer.start_span(
            name,
            context=context,
            kind=getattr(self.trace.SpanKind, kind.upper()),
            links=[self.trace.Link(led) for led in found if led.is_valid and led != current],
            start_time=start_ns,
        )
        return _OnSpan(self, span, expected)

    def count(self, name: str, amount: int, **attributes: Any) -> None:
        _guarded("count", None, lambda: self._instrument(name).add(amount, _said(attributes)))

    def measure(self, name: str, seconds: float, **attributes: Any) -> None:
        _guarded("measure", None, lambda: self._instrument(name).record(seconds, _said(attributes)))

    def _instrument(self, name: str) -> Any:
        """Return an instrument, which serves a provider that is set later as well."""
        found = self._instruments.get(name)
        if found is None:
            kind, unit, description = METRICS[name]
            meter = self._metrics.get_meter(SCOPE)
            make = meter.create_counter if kind == "counter" else meter.create_histogram
            found = self._instruments[name] = make(name, unit=unit, description=description)
        return found


class _OnSpan(Span):
    recording = True

    def __init__(self, on: _On, span: Any, expected: tuple[type[BaseException], ...]) -> None:
        self._on = on
        self._span = span
        self._expected = expected
        self._made_current: Any = None

    def set(self, **attributes: Any) -> None:
        self.set_named({f"{SCOPE}.{key}": value for key, value in attributes.items()})

    def set_named(self, attributes: Mapping[str, Any]) -> None:
        _guarded("attributes", None, lambda: self._span.set_attributes(_said(attributes)))

    def carrier(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        context = self._on.trace.set_span_in_context(self._span)
        _guarded("inject", None, lambda: self._on.propagate.inject(carrier, context))
        return _texts(carrier)

    def __enter__(self) -> Self:
        self._made_current = self._on.trace.use_span(
            self._span, record_exception=False, set_status_on_exception=False
        )
        _guarded("enter", None, self._made_current.__enter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        made, self._made_current = self._made_current, None
        if error is not None:
            _guarded("error", None, partial(self._fail, error))
        if made is not None:
            _guarded("exit", None, lambda: made.__exit__(None, None, None))
        _guarded("end", None, self._span.end)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, BudgetExceeded):
            self.set(
                outcome="refused",
                reason=error.reason,
                budget=error.budget,
                unit=error.unit,
                requested=error.requested,
                available=error.available,
            )
        elif isinstance(error, QueueFull):
            self.set(outcome="refused", reason="queue_full")
        elif not isinstance(error, self._expected):
            self._span.set_attribute("error.type", type(error).__qualname__)
            self._span.set_status(self._on.trace.StatusCode.ERROR)


def _texts(carrier: Mapping[str, Any]) -> dict[str, str]:
    """Return what of some headers is text: a propagator reads and writes nothing else."""
    return {key: value for key, value in carrier.items() if isinstance(value, str)}


def _said(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}
