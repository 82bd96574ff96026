"""What is looked at to tell whether a running configuration keeps the guarantees: plain facts.

:mod:`celery_budget.integration.checkup` collects them; :mod:`celery_budget.core.rules` judges.
What could not be seen is none, and a rule that needs it is skipped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "LEVELS",
    "BrokerSeen",
    "Checkup",
    "Facts",
    "Finding",
    "RelayHost",
    "StoreSeen",
    "TaskSeen",
    "WorkerSeen",
]

#: What a finding can be, the gravest first.
LEVELS = ("error", "warning", "skipped", "ok")


@dataclass(frozen=True)
class BrokerSeen:
    """One broker, by the configuration.

    :ivar name: empty for the application's own.
    :ivar transport: kombu's ``driver_type``: ``amqp``, ``redis``, ``sqs``, ``memory`` and so on.
    :ivar driver: kombu's ``driver_name``.
    :ivar confirms: whether publisher confirms are on; of others than ``amqp`` it means nothing.
    :ivar visibility_seconds: after which time it delivers again what is not acknowledged; none
        where it does not.
    :ivar error: why it cannot be reached; empty where it can, none where that was not tried.
    """

    name: str
    transport: str
    driver: str = ""
    confirms: bool = True
    visibility_seconds: float | None = None
    error: str | None = None

    def __str__(self) -> str:
        return f"broker {self.name!r}" if self.name else "the broker"


@dataclass(frozen=True)
class TaskSeen:
    """One task, as it is registered here.

    :ivar budgeted: whether it passes the gate.
    :ivar says_budget: whether its options say that it has a budget.
    :ivar reuse_seconds: for how long its runs are joined; none for not at all.
    :ivar enforced: whether its calls are refused where they do not fit.
    """

    name: str
    budgeted: bool = True
    says_budget: bool = False
    acks_late: bool = False
    reject_on_worker_lost: bool = False
    acks_on_failure: bool = True
    ignore_result: bool = False
    time_limit: float | None = None
    reuse_seconds: float | None = None
    enforced: bool = True


@dataclass(frozen=True)
class RelayHost:
    """A relay that was seen."""

    host: str
    pid: int
    seconds: float


@dataclass(frozen=True)
class StoreSeen:
    """The ledger's database, as it answers.

    :ivar error: why it cannot be read; empty where it can.
    :ivar schema_error: why its tables cannot be used; empty where they can.
    :ivar write_error: why nothing can be written to it; empty where it can.
    :ivar settings: those of PostgreSQL that matter here, as text.
    :ivar version: of PostgreSQL's server: 140000 and so on.
    :ivar standbys: how many standbys PostgreSQL has, and how many of them are synchronous.
    :ivar clock_seconds: by how much its clock is ahead of this host's.
    :ivar round_trip_seconds: how long that took to ask: the clock is as uncertain as half of it.
    :ivar file_system: of SQLite's file: its type, such as ``ext4`` or ``nfs4``.
    :ivar free_bytes: what is free where SQLite's file is.
    :ivar zones_missing: time zones of budgets that this host does not know.
    :ivar overdue_seconds: how long a message has been due that was not published; 0 for none.
    :ivar mark: tells this ledger from others; none while it has no budget.
    :ivar distributed: whether its tables are distributed by root.
    :ivar undistributed: tables of such a one that are not.
    """

    dialect: str
    error: str = ""
    schema_error: str = ""
    write_error: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    version: int | None = None
    max_connections: int | None = None
    standbys: tuple[int, int] | None = None
    clock_seconds: float | None = None
    round_trip_seconds: float = 0.0
    file_system: str | None = None
    free_bytes: int | None = None
    zones_missing: tuple[str, ...] = ()
    overdue_seconds: float = 0.0
    mark: str | None = None
    relays: tuple[RelayHost, ...] = ()
    distributed: bool = False
    undistributed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplicaSeen:
    """The database of ``budget_report_url``, as it answers.

    :ivar error: why it cannot be read, or has not the tables of this release; empty where it can.
    :ivar mark: as of :class:`StoreSeen`.
    :ivar follows: whether it follows another server.
    :ivar writable: whether it can be written.
    :ivar behind_seconds: how far it is behind; none where it does not tell.
    """

    server: str
    error: str = ""
    mark: str | None = None
    follows: bool = True
    writable: bool = False
    behind_seconds: float | None = 0.0


@dataclass(frozen=True)
class WorkerSeen:
    """A worker that answered.

    :ivar knows: whether it knows this extension's command.
    :ivar installed: whether its application has a ``CeleryBudget``.
    :ivar clock_seconds: by how much its clock is ahead of this host's; none where it is unknown.
    :ivar ledger: where its ledger is, as a digest; ``mark`` as of :class:`StoreSeen`.
    :ivar error: why it could not ask its ledger; empty where it could.
    """

    name: str
    knows: bool = True
    installed: bool = True
    version: str = ""
    schema: str = ""
    root: str = ""
    ledger: str = ""
    mark: str | None = None
    error: str = ""
    host: str = ""
    lease_seconds: float = 0.0
    pool: str = ""
    concurrency: int = 0
    prefetch: int = 0
    clock_seconds: float | None = None
    round_trip_seconds: float = 0.0
    spool_error: str = ""


@dataclass(frozen=True)
class Facts:
    """All that rules judge by.

    :ivar workers: none where they could not be asked; ``workers_why`` says why.
    :ivar prices_differ: models with two prices, and how much each is.
    :ivar replica: none where nothing is read from one.
    """

    host: str
    pid: int
    version: str
    schema: str
    root: str
    ledger: str
    lease_seconds: float
    lock_seconds: float
    result_seconds: float
    brokers: tuple[BrokerSeen, ...]
    tasks: tuple[TaskSeen, ...]
    store: StoreSeen
    workers: tuple[WorkerSeen, ...] | None = ()
    workers_why: str = ""
    backend: str = ""
    result_expires: float | None = None
    task_time_limit: float | None = None
    prefetch: int = 4
    remote_control: bool = True
    gate_error: str = ""
    alert_error: str = ""
    authorize_error: str = ""
    spool: str = ""
    spool_error: str = ""
    prices_differ: tuple[str, ...] = ()
    pool_size: int = 15
    replica: ReplicaSeen | None = None

    @property
    def budgeted(self) -> tuple[TaskSeen, ...]:
        """The tasks with a budget."""
        return tuple(task for task in self.tasks if task.budgeted)


@dataclass(frozen=True)
class Finding:
    """What a rule has found.

    :ivar id: of the rule, which stays the same.
    :ivar level: one of :data:`LEVELS`; of ``skipped`` ``seen`` says why.
    :ivar seen: what was seen.
    :ivar why: why it matters.
    :ivar remedy: the setting to change, or the command to run.
    """

    id: str
    level: str
    seen: str
    why: str = ""
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Checkup:
    """What all rules have found, the gravest first."""

    findings: tuple[Finding, ...]

    def of(self, level: str) -> tuple[Finding, ...]:
        """Return the findings of a level."""
        return tuple(one for one in self.findings if one.level == level)

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.of("error")

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "ok": self.ok,
            "counts": {level: len(self.of(level)) for level in LEVELS},
            "findings": [one.as_dict() for one in self.findings],
        }
