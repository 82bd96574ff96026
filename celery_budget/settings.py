"""The settings, read once from the application's configuration and checked there.

Each setting is a field of :class:`Settings`; its key in the configuration is ``budget_`` and the
field's name (``CELERY_BUDGET_…`` under the ``CELERY`` namespace, as for Celery's own).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from celery_budget.core.budgets import check_name
from celery_budget.core.reservations import Again
from celery_budget.errors import ConfigurationError

__all__ = ["PREFIX", "Settings"]

PREFIX = "budget_"

#: How soon a rejected message comes again, in microseconds; doubled each time.
REJECTED_US = 1_000_000
#: No number of a setting makes sense above this: seconds of thirty years.
MOST = 1_000_000_000
#: Locks are waited for within a statement, whose time-out PostgreSQL keeps in 31 bits.
MOST_LOCK_SECONDS = 86_400

_URL_FORMS = (
    "'postgresql+psycopg://user@host/name' for PostgreSQL, or 'sqlite:////absolute/path.db' "
    "for the embedded default"
)


@dataclass(frozen=True)
class Settings:
    """Everything that can be set.

    :ivar database_url: SQLAlchemy URL of the ledger. Required.
    :ivar root: first part of every key; applications that share budgets share it.
    :ivar lease_seconds: how long a worker may be silent before its attempt counts as lapsed.
    :ivar unreserved: what a worker does with a message of a budgeted task that came without a
        reservation: ``admit`` it (and park what does not fit) or ``reject`` it.
    :ivar max_deliveries: how many attempts one message gets before it counts as lost.
    :ivar max_publishes: how often one message is published (or tried) before its hold is released.
    :ivar poll_seconds: how often an idle relay looks for due messages.
    :ivar batch_size: how many messages a relay takes at a time.
    :ivar publish_seconds: for how long a message that a relay took is not taken by another.
    :ivar sweep_seconds: how often recovery and parked work are looked at.
    :ivar republish_seconds: after this time a published message that was never started is
        published again; doubled each time.
    :ivar park_seconds: how long a parked request waits for budget.
    :ivar outcome_bytes: up to this size a return value is kept until its attempt is closed, so
        that a crash in between can be made good.
    :ivar lock_seconds: how long a statement waits for a lock before it fails as retryable.
    :ivar beat_scheduler: the scheduler that ``beat -S budget`` runs beside the relay.
    """

    database_url: str
    root: str = "default"
    lease_seconds: float = 60.0
    unreserved: str = "admit"
    max_deliveries: int = 10
    max_publishes: int = 12
    poll_seconds: float = 0.1
    batch_size: int = 100
    publish_seconds: float = 30.0
    sweep_seconds: float = 1.0
    republish_seconds: float = 300.0
    park_seconds: float = 86_400.0
    outcome_bytes: int = 1_048_576
    lock_seconds: float = 5.0
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
    def park_us(self) -> int:
        """:attr:`park_seconds` in microseconds."""
        return int(self.park_seconds * 1_000_000)

    @property
    def publish_us(self) -> int:
        """:attr:`publish_seconds` in microseconds."""
        return int(self.publish_seconds * 1_000_000)

    @property
    def republish_us(self) -> int:
        """:attr:`republish_seconds` in microseconds."""
        return int(self.republish_seconds * 1_000_000)

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
        for field in fields(cls):
            value = get(PREFIX + field.name)
            if value is not None:
                values[field.name] = _convert(field.name, str(field.type), value)
            elif field.default is MISSING:
                raise ConfigurationError(
                    f"{PREFIX}{field.name} is not set "
                    f"(CELERY_{PREFIX.upper()}{field.name.upper()} under the CELERY namespace); "
                    f"give {_URL_FORMS}"
                )
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        if "://" not in self.database_url:
            raise ConfigurationError(
                f"{PREFIX}database_url is {self.database_url!r}; give {_URL_FORMS}"
            )
        if self.unreserved not in ("admit", "reject"):
            raise ConfigurationError(
                f"{PREFIX}unreserved is {self.unreserved!r}; give 'admit' or 'reject'"
            )
        try:
            check_name(self.root)
        except ValueError as exc:
            raise ConfigurationError(f"{PREFIX}root: {exc}") from exc
        if self.lease_seconds < 1:
            raise ConfigurationError(
                f"{PREFIX}lease_seconds is {self.lease_seconds}; a lease shorter than a second "
                "lapses under a worker that runs"
            )


def _convert(name: str, kind: str, value: Any) -> Any:
    """Return ``value`` as the field's type, numbers being above 0."""
    if kind == "str":
        if isinstance(value, str) and value:
            return value
        raise ConfigurationError(f"{PREFIX}{name} is {value!r}; give text")
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    most = MOST_LOCK_SECONDS if name == "lock_seconds" else MOST
    if not number or not 0 < value <= most or (kind == "int" and value != int(value)):
        raise ConfigurationError(
            f"{PREFIX}{name} is {value!r}; give {'an integer' if kind == 'int' else 'a number'} "
            f"above 0, at most {most}"
        )
    return int(value) if kind == "int" else float(value)
