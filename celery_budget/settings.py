"""The settings, read once from the application's configuration and checked there.

Each setting is a field of :class:`Settings`; its key in the configuration is ``budget_`` and the
field's name (``CELERY_BUDGET_…`` under the ``CELERY`` namespace, as for Celery's own).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from decimal import Decimal, InvalidOperation
from typing import Any

from celery_budget.core.alerts import parse_thresholds
from celery_budget.core.budgets import MILLION, MOST_STRIPES, check_name, check_unit
from celery_budget.core.reservations import Again
from celery_budget.core.usage import MONEY
from celery_budget.errors import ConfigurationError, InvalidBudget

__all__ = ["ANY_STAGE", "HOOKS", "PREFIX", "Settings", "check_callable", "shown"]

PREFIX = "budget_"

#: Stands for all stages that are not named.
ANY_STAGE = "*"

#: How soon a rejected message comes again, in microseconds; doubled each time.
REJECTED_US = 1_000_000
#: A lease is renewed so often while it lasts.
RENEWALS_PER_LEASE = 4
#: What another broker may be called.
NAME = re.compile(r"[\w.-]{1,255}", re.ASCII)
#: What names a callable in a module.
IMPORTED = re.compile(r"[\w.]+[:.]\w[\w.]*")
#: No number of a setting makes sense above this: seconds of thirty years.
MOST = 1_000_000_000
#: Locks are waited for within a statement, whose time-out PostgreSQL keeps in 31 bits; a statement
#: names each message of a batch.
MOST_OF = {
    "lock_seconds": 86_400,
    "batch_size": 10_000,
    "metrics_port": 65_535,
    "metrics_labels": 10_000,
}
#: Numbers that may be 0, which stands for none.
OR_NONE = ("metrics_port",)

#: Texts that may be empty, and then are none.
OPTIONAL = ("listen_url", "report_url", "dashboard_token")

#: Callables, and what each takes.
HOOKS = {"authorize": "a Draw", "on_alert": "an alert"}

#: Which are switched off by 0.
OFF = {
    "alert_parked_seconds",
    "alert_quarantine",
    "alert_drift_requests",
    "alert_overdue_seconds",
    "alert_reconcile_seconds",
}

#: What a driver takes as a password from the end of a URL.
_QUERIED = re.compile(r"((?:password|sslpassword)=)[^&#]*", re.IGNORECASE)

#: Texts that may hold a password, or are one, and are not shown where they cannot be used.
SECRET = ("database_url", "listen_url", "report_url", "dashboard_token")

_URL_FORMS = (
    "'postgresql+psycopg://user@host/name' for PostgreSQL, or 'sqlite:////absolute/path.db' "
    "for the embedded default"
)


@dataclass(frozen=True)
class Settings:
    """Everything that can be set.

    :ivar database_url: SQLAlchemy URL of the ledger. Required.
    :ivar listen_url: SQLAlchemy URL by which a relay listens for notifications, past a proxy that
        pools transactions; by default that of the ledger (PostgreSQL only).
    :ivar report_url: SQLAlchemy URL of a replica of the ledger's database, which all is read from
        that is only shown; by default that of the ledger (PostgreSQL only).
    :ivar root: first part of every key; applications that share budgets share it.
    :ivar lease_seconds: how long a worker may be silent before its attempt counts as lapsed.
    :ivar unreserved: what a worker does with a message of a budgeted task that came without a
        reservation: ``admit`` it (and park what does not fit) or ``reject`` it.
    :ivar enforce: whether what does not fit its budget is refused, or parked. Where not, it is
        admitted over the limit and counted; a task's ``enforce=`` says otherwise for its calls.
    :ivar max_deliveries: how many attempts one message gets before it counts as lost.
    :ivar max_publishes: how often one message is published (or tried) before its hold is released.
    :ivar poll_seconds: how often an idle relay looks for due messages.
    :ivar batch_size: how many messages a relay takes at a time.
    :ivar brokers: names and URLs of other brokers that tasks are sent to by ``connection=`` or
        ``producer=``; the ledger keeps the name, not the URL.
    :ivar max_outbox: how many messages may wait to be published; beyond that nothing new is
        admitted.
    :ivar max_quarantine: how much is kept in quarantine; beyond that requests that fail for good
        are not.
    :ivar publish_seconds: for how long a message that a relay took is not taken by another.
    :ivar sweep_seconds: how often recovery is looked at, and parked work while there is none.
    :ivar auto_stripes: over how many rows the counters of a budget are spread at most by the sweep,
        where admissions wait for one another; 1 for none, 128 at most.
    :ivar republish_seconds: after this time a published message that was never started is looked
        for, and published again where it is lost; doubled each time it was.
    :ivar park_seconds: how long a parked request waits for budget.
    :ivar max_parked: how much may be parked; beyond that new requests are refused. What continues
        running work is parked all the same.
    :ivar overtake_seconds: for how long a parked request is passed by others that fit; after that
        it goes ahead of them.
    :ivar effect_retention_seconds: how long the proofs of a request's effects are kept after its
        end; at least as long as any message of it may still come.
    :ivar lookup_seconds: for how long a task is asked what became of a lost attempt, and for as
        long again its ``compensate`` is tried.
    :ivar outcome_bytes: up to this size a return value is kept until its attempt is closed, so
        that a crash in between can be made good; and of a task with ``reuse=`` for its time.
    :ivar result_seconds: how long after its end ``budget.result`` gives what a job came to; the
        result backend has to keep it as long.
    :ivar spool: folder for what a worker could not tell the ledger before it had to stop; a
        relative one is in the worker's working directory.
    :ivar lock_seconds: how long a statement waits for a lock before it fails as retryable.
    :ivar answer_seconds: how long a statement may be without an answer before PostgreSQL's server
        is asked, by another connection, whether it still answers.
    :ivar money_unit: the unit of budgets in money: millionths of a dollar.
    :ivar prices: prices of models by their names, before those of the genai-prices package; each
        by that package's names, in dollars.
    :ivar drift_ceilings: up to which ratio of actual to estimated an estimator is good enough, by
        stage; ``*`` for all others. Above it reports advise to mend the estimator.
    :ivar dashboard_token: what opens ``budget dashboard``; none by default, which will do on a
        loopback address alone.
    :ivar metrics_port: where a relay serves its metrics; 0 for nowhere.
    :ivar metrics_host: on which address it does.
    :ivar metrics_seconds: for how long one reading of the ledger answers all scrapes.
    :ivar metrics_labels: how many budgets, stages and lanes have series of their own, of each; all
        others are summed.
    :ivar tracing: whether spans and metrics are made where OpenTelemetry is set up.
    :ivar authorize: what is asked, for all tasks, whether a caller may draw on the budgets that
        it names: ``module:name``, or the callable itself; none to allow all.
    :ivar on_alert: what is called with each alert: ``module:name``, or the callable itself; none
        to call nothing.
    :ivar alert_at: at which parts of its limit a budget gives an alert, unless it has its own.
    :ivar alert_seconds: how often budgets are looked at for alerts.
    :ivar alert_parked_seconds: how long a request may be parked before that is an alert; 0 for
        none, as of those that follow.
    :ivar alert_quarantine: more than so many that are new in quarantine within an hour are one.
    :ivar alert_drift_requests: by so many measured requests a stage above its ceiling is one.
    :ivar alert_overdue_seconds: how long a message may be due and not published before that is one.
    :ivar alert_reconcile_seconds: how often it is proved that the ledger adds up.
    :ivar alert_call_seconds: how long ``on_alert`` may take before it counts as hanging.
    :ivar beat_scheduler: the scheduler that ``beat -S budget`` runs beside the relay.
    """

    database_url: str = field(repr=False)
    listen_url: str = field(default="", repr=False)
    report_url: str = field(default="", repr=False)
    root: str = "default"
    lease_seconds: float = 60.0
    unreserved: str = "admit"
    enforce: bool = True
    max_deliveries: int = 10
    max_publishes: int = 12
    poll_seconds: float = 0.1
    batch_size: int = 500
    brokers: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_outbox: int = 1_000_000
    max_quarantine: int = 10_000
    publish_seconds: float = 30.0
    sweep_seconds: float = 1.0
    auto_stripes: int = 64
    republish_seconds: float = 300.0
    park_seconds: float = 86_400.0
    max_parked: int = 10_000
    overtake_seconds: float = 60.0
    effect_retention_seconds: float = 604_800.0
    lookup_seconds: float = 3600.0
    outcome_bytes: int = 1_048_576
    result_seconds: float = 86_400.0
    spool: str = "budget-spool"
    lock_seconds: float = 5.0
    answer_seconds: float = 10.0
    money_unit: str = MONEY
    prices: Mapping[str, Mapping[str, Decimal]] = field(default_factory=dict)
    drift_ceilings: Mapping[str, float] = field(default_factory=lambda: {ANY_STAGE: 1.5})
    dashboard_token: str = field(default="", repr=False)
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_seconds: float = 5.0
    metrics_labels: int = 200
    tracing: bool = True
    authorize: Callable[..., Any] | str | None = None
    on_alert: Callable[..., Any] | str | None = None
    alert_at: tuple[float, ...] = (0.8, 0.95, 1.0)
    alert_seconds: float = 5.0
    alert_parked_seconds: float = 3600.0
    alert_quarantine: int = 10
    alert_drift_requests: int = 20
    alert_overdue_seconds: float = 60.0
    alert_reconcile_seconds: float = 86_400.0
    alert_call_seconds: float = 30.0
    beat_scheduler: str = "celery.beat:PersistentScheduler"

    @property
    def lock_ms(self) -> int:
        """:attr:`lock_seconds` in milliseconds; at least one, as 0 would mean for ever."""
        return max(1, int(self.lock_seconds * 1000))

    @property
    def lease_us(self) -> int:
        """:attr:`lease_seconds` in microseconds."""
        return int(self.lease_seconds * 1_000_000)

    @property
    def renew_seconds(self) -> float:
        """How often a lease is renewed, in seconds: two renewals may fail before it lapses."""
        return self.lease_seconds / RENEWALS_PER_LEASE

    @property
    def renew_us(self) -> int:
        """:attr:`renew_seconds` in microseconds."""
        return int(self.renew_seconds * 1_000_000)

    @property
    def lookup_us(self) -> int:
        """:attr:`lookup_seconds` in microseconds."""
        return int(self.lookup_seconds * 1_000_000)

    @property
    def park_us(self) -> int:
        """:attr:`park_seconds` in microseconds."""
        return int(self.park_seconds * 1_000_000)

    @property
    def overtake_us(self) -> int:
        """:attr:`overtake_seconds` in microseconds."""
        return int(self.overtake_seconds * 1_000_000)

    @property
    def publish_us(self) -> int:
        """:attr:`publish_seconds` in microseconds."""
        return int(self.publish_seconds * 1_000_000)

    @property
    def republish_us(self) -> int:
        """:attr:`republish_seconds` in microseconds."""
        return int(self.republish_seconds * 1_000_000)

    @property
    def effect_retention_us(self) -> int:
        """:attr:`effect_retention_seconds` in microseconds."""
        return int(self.effect_retention_seconds * 1_000_000)

    @property
    def alert_parts(self) -> tuple[int, ...]:
        """:attr:`alert_at` in parts per million."""
        return parse_thresholds(self.alert_at, f"{PREFIX}alert_at") or ()

    @property
    def result_us(self) -> int:
        """:attr:`result_seconds` in microseconds."""
        return int(self.result_seconds * 1_000_000)

    @property
    def again(self) -> Again:
        """How a rejected message may come again."""
        return Again(self.max_deliveries, REJECTED_US, self.park_us)

    @classmethod
    def read(cls, get: Callable[[str], Any]) -> Settings:
        """Build the settings from ``get(key)``, which gives none for a key that is not set.

        :raises ConfigurationError: naming the key, its value and what it may be.
        """
        values: dict[str, Any] = {}
        for one in fields(cls):
            value = get(PREFIX + one.name)
            if value is not None:
                values[one.name] = _convert(one.name, str(one.type), value)
            elif one.default is MISSING and one.default_factory is MISSING:
                raise ConfigurationError(
                    f"{PREFIX}{one.name} is not set "
                    f"(CELERY_{PREFIX.upper()}{one.name.upper()} under the CELERY namespace); "
                    f"give {_URL_FORMS}"
                )
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if "://" not in self.database_url:
            raise ConfigurationError(
                f"{PREFIX}database_url is {shown(self.database_url)!r}; give {_URL_FORMS}"
            )
        if self.listen_url and not self.listen_url.startswith(("postgresql://", "postgresql+")):
            raise ConfigurationError(
                f"{PREFIX}listen_url is {shown(self.listen_url)!r}; give a URL of the ledger's "
                "PostgreSQL: 'postgresql+psycopg://user@host/name'"
            )
        postgresql = ("postgresql://", "postgresql+")
        if self.report_url and not (
            self.report_url.startswith(postgresql) and self.database_url.startswith(postgresql)
        ):
            raise ConfigurationError(
                f"{PREFIX}report_url is {shown(self.report_url)!r}, and the ledger in "
                f"{shown(self.database_url)!r}; give the URL of a replica of the ledger's "
                "PostgreSQL: 'postgresql+psycopg://user@replica/name'"
            )
        if self.unreserved not in ("admit", "reject"):
            raise ConfigurationError(
                f"{PREFIX}unreserved is {self.unreserved!r}; give 'admit' or 'reject'"
            )
        for name, check in (("root", check_name), ("money_unit", check_unit)):
            try:
                check(getattr(self, name))
            except ValueError as exc:
                raise ConfigurationError(f"{PREFIX}{name}: {exc}") from exc
        if self.auto_stripes > MOST_STRIPES:
            raise ConfigurationError(
                f"{PREFIX}auto_stripes is {self.auto_stripes}; give an integer from 1 to "
                f"{MOST_STRIPES}"
            )
        if self.lease_seconds < 1:
            raise ConfigurationError(
                f"{PREFIX}lease_seconds is {self.lease_seconds}; a lease shorter than a second "
                "lapses under a worker that runs"
                "; give 1 or more"
            )
        for name, why in (
            ("publish_seconds", "a message that comes again may wait that long at a relay"),
            ("lock_seconds", "a renewal may wait that long for the ledger"),
        ):
            if self.lease_seconds < getattr(self, name):
                raise ConfigurationError(
                    f"{PREFIX}lease_seconds is {self.lease_seconds}, shorter than {PREFIX}{name} "
                    f"({getattr(self, name)}): {why}, and the lease would lapse meanwhile; give a "
                    "longer lease, or less for that"
                )
        for name in ("lease_seconds", "park_seconds", "republish_seconds"):
            self.check_retention(PREFIX + name, getattr(self, name))

    def check_retention(self, name: str, seconds: float) -> None:
        """Check that effects are kept for as long as a message may come again.

        :param name: the setting after whose ``seconds`` it may.
        :raises ConfigurationError: where they are not.
        """
        if self.effect_retention_seconds < seconds:
            raise ConfigurationError(
                f"{PREFIX}effect_retention_seconds is {self.effect_retention_seconds}, and by "
                f"{name} a message may come again after {seconds} s; give at least that"
            )


def shown(url: str) -> str:
    """Return a URL without its password, for messages."""
    url = _QUERIED.sub(r"\1***", url)
    before, at, place = url.rpartition("@")
    scheme, slashes, user = before.rpartition("://")
    return f"{scheme}{slashes}{user.partition(':')[0]}{at}{place}" if at else url


def _convert(name: str, kind: str, value: Any) -> Any:
    """Return ``value`` as the field's type, numbers being above 0."""
    if kind == "str":
        if isinstance(value, str) and (value or name in OPTIONAL):
            return value
        said = "" if name in SECRET else f" is {value!r}"
        raise ConfigurationError(f"{PREFIX}{name}{said}; give text")
    if kind == "bool":
        if isinstance(value, bool):
            return value
        raise ConfigurationError(f"{PREFIX}{name} is {value!r}; give True or False")
    if name == "brokers":
        return _brokers(value)
    if name == "prices":
        return _prices(value)
    if name == "drift_ceilings":
        return _ceilings(value)
    if name == "alert_at":
        return _thresholds(value)
    if name in HOOKS:
        return _callable(name, value)
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if number and value == 0 and name in OFF:
        return 0 if kind == "int" else 0.0
    most = MOST_OF.get(name, MOST)
    if number and value == 0 and name in OR_NONE:
        return 0
    if not number or not 0 < value <= most or (kind == "int" and value != int(value)):
        raise ConfigurationError(
            f"{PREFIX}{name} is {value!r}; give {'an integer' if kind == 'int' else 'a number'} "
            f"above 0, at most {most}{', or 0 for none' if name in OR_NONE else ''}"
        )
    return int(value) if kind == "int" else float(value)


def _brokers(value: Any) -> dict[str, str]:
    """Return names and URLs as a copy; what is said of a wrong one does not show its password."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{PREFIX}brokers is no mapping of names to URLs; give one")
    for name, url in value.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigurationError(
                f"{PREFIX}brokers has the name {name!r}; give 1 to 255 letters, digits, '.', '_' "
                "or '-'"
            )
        if not isinstance(url, str) or "://" not in url:
            raise ConfigurationError(
                f"{PREFIX}brokers has no URL for {name!r}; give one like 'amqp://user@host//'"
            )
    return dict(value)


def _prices(value: Any) -> dict[str, dict[str, Decimal]]:
    """Return prices of models as a copy; which names a price may have is seen where it is used."""
    form = "give {'MODEL': {'input_mtok': 0.15, 'output_mtok': 0.6}}"
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{PREFIX}prices is no mapping of models to prices; {form}; write it so"
        )
    prices: dict[str, dict[str, Decimal]] = {}
    for model, given in value.items():
        if not isinstance(model, str) or not isinstance(given, Mapping) or not given:
            raise ConfigurationError(f"{PREFIX}prices has {model!r}: {given!r}; {form}; correct it")
        prices[model] = {name: _price(model, name, one) for name, one in given.items()}
    return prices


def _thresholds(value: Any) -> tuple[float, ...]:
    """Return shares of a limit, rising."""
    try:
        parts = parse_thresholds(value, f"{PREFIX}alert_at")
    except InvalidBudget as exc:
        raise ConfigurationError(str(exc)) from exc
    if parts is None:
        raise ConfigurationError(f"{PREFIX}alert_at is {value!r}; give shares such as (0.8, 1.0)")
    return tuple(one / MILLION for one in parts)


def _callable(name: str, value: Any) -> Any:
    """Return a callable, or text that names one; whether that is there is seen at the start."""
    if isinstance(value, str):
        if IMPORTED.fullmatch(value):
            return value
    elif callable(value):
        check_callable(name, value)
        return value
    raise ConfigurationError(
        f"{PREFIX}{name} is {value!r}; give 'module:name', or a callable that takes {HOOKS[name]}"
    )


def check_callable(name: str, found: Any) -> None:
    """Check that what one of :data:`HOOKS` names can be called, and is over when it returns.

    :raises ConfigurationError: where it cannot be called, or is a coroutine function.
    """
    if not callable(found):
        raise ConfigurationError(
            f"{PREFIX}{name} is {found!r}, which cannot be called; give a function that takes "
            f"{HOOKS[name]}"
        )
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004 - an object whose call is asynchronous
    ):
        raise ConfigurationError(
            f"{PREFIX}{name} is {found!r}, a coroutine function; it is called in a thread: give "
            "a function that is not async, or one that runs it by asyncio.run()"
        )


def _ceilings(value: Any) -> dict[str, float]:
    """Return ceilings by stage as a copy, with that of all others where it is not given."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{PREFIX}drift_ceilings is no mapping of stages to ratios; give {{'STAGE': 1.2}}, "
            f"with {ANY_STAGE!r} for all others"
        )
    for stage, ratio in value.items():
        number = not isinstance(ratio, bool) and isinstance(ratio, (int, float))
        if not isinstance(stage, str) or not number or not 0 < ratio <= MOST:
            raise ConfigurationError(
                f"{PREFIX}drift_ceilings has {ratio!r} for {stage!r}; give a stage and a number "
                f"above 0, at most {MOST}"
            )
    return {ANY_STAGE: 1.5, **{stage: float(ratio) for stage, ratio in value.items()}}


def _price(model: str, name: Any, value: Any) -> Decimal:
    try:
        price = None if isinstance(value, bool) else Decimal(str(value))
    except InvalidOperation:
        price = None
    if not isinstance(name, str) or price is None or not price.is_finite() or price < 0:
        raise ConfigurationError(
            f"{PREFIX}prices has {value!r} for {name!r} of {model!r}; give a number of dollars "
            "from 0, such as 0.15 or '0.15'"
        )
    return price
