"""What would break the guarantees, rule by rule: pure functions of :class:`Facts`.

A rule returns what it sees that is wrong, nothing where all is right, or :class:`Skipped` with the
reason where it could not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from celery_budget.core.checkup import LEVELS, BrokerSeen, Checkup, Facts, Finding, WorkerSeen

__all__ = ["RULES", "Rule", "Skipped", "judge"]

#: A relay is seen every few seconds.
RELAY_SECONDS = 15.0
#: What a clock may be off, and from where on times are wrong: a lease is renewed within that.
CLOCK_WARN, CLOCK_WRONG = 1.0, 15.0
#: What has been due for so long is not about to be published.
OVERDUE_SECONDS = 60.0
OLDEST_SERVER = 140_000
#: What a full disk is near to.
LITTLE_BYTES = 100 * 1024 * 1024
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs", "ceph", "glusterfs")
#: Pools whose tasks share the connections of one process.
SHARING = ("threads", "thread", "gevent", "eventlet")


@dataclass(frozen=True)
class Skipped:
    """A rule that could not look, and why.

    :ivar applies: whether there is anything to look at; otherwise all is right without.
    """

    why: str
    applies: bool = True


#: A level, where it is another than the rule's, and what was seen.
Seen = str | tuple[str, str]
Look = Callable[[Facts], "Iterable[Seen] | Skipped"]


@dataclass(frozen=True)
class Rule:
    """One thing that is looked at.

    :ivar id: its name, which stays the same.
    :ivar level: ``error`` where it breaks a guarantee, else ``warning``.
    :ivar good: what is said where all is right.
    """

    id: str
    level: str
    good: str
    why: str
    remedy: str
    look: Look


RULES: list[Rule] = []


def judge(facts: Facts) -> Checkup:
    """Return what all rules find, the gravest first, then in the order of the rules."""
    found = [finding for rule in RULES for finding in _apply(rule, facts)]
    return Checkup(tuple(sorted(found, key=lambda one: LEVELS.index(one.level))))


def _apply(rule: Rule, facts: Facts) -> list[Finding]:
    looked = rule.look(facts)
    if isinstance(looked, Skipped):
        return [Finding(rule.id, "skipped" if looked.applies else "ok", looked.why)]
    found = []
    for one in looked:
        level, seen = (rule.level, one) if isinstance(one, str) else one
        found.append(Finding(rule.id, level, seen, rule.why, rule.remedy))
    return found or [Finding(rule.id, "ok", rule.good)]


def _rule(id_: str, level: str, good: str, why: str, remedy: str) -> Callable[[Look], Look]:
    def add(look: Look) -> Look:
        RULES.append(Rule(id_, level, good, why, remedy, look))
        return look

    return add


def _named(names: Iterable[str]) -> str:
    """Return some names, and how many more there are."""
    listed = sorted(names)
    rest = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + rest


def _of_store(look: Look) -> Look:
    """Skip a rule where the ledger cannot be read."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.store.error:
            return Skipped("the ledger cannot be reached")
        return look(facts)

    return looked


def _of_tables(look: Look) -> Look:
    """Skip a rule where the ledger's tables cannot be read."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.store.error or facts.store.schema_error:
            return Skipped("the ledger's tables cannot be read")
        return look(facts)

    return looked


def _of_postgresql(look: Look) -> Look:
    """Skip a rule on SQLite, or where the ledger cannot be reached."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.store.dialect != "postgresql":
            return Skipped("does not apply: the ledger is in SQLite", applies=False)
        return look(facts)

    return _of_store(looked)


def _of_sqlite(look: Look) -> Look:
    """Skip a rule on PostgreSQL, or where the ledger cannot be reached."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.store.dialect != "sqlite":
            return Skipped("does not apply: the ledger is in PostgreSQL", applies=False)
        return look(facts)

    return _of_store(looked)


def _of_workers(look: Callable[[Facts, tuple[WorkerSeen, ...]], Iterable[Seen] | Skipped]) -> Look:
    """Skip a rule where no worker with the extension answered; give it those that did."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.workers is None:
            return Skipped(facts.workers_why)
        answered = tuple(one for one in facts.workers if one.knows and one.installed)
        if not answered:
            return Skipped("no worker with the extension answered")
        return look(facts, answered)

    return looked


# Brokers


@_rule(
    "confirms",
    "error",
    "brokers confirm what they are sent",
    "without confirms nobody knows whether the broker has a message: it may be lost, or sent twice",
    "take confirm_publish out of broker_transport_options, or set it to True; use 'pyamqp://'",
)
def _confirms(facts: Facts) -> Iterator[Seen]:
    for broker in facts.brokers:
        if broker.transport == "amqp" and broker.driver not in ("", "py-amqp"):
            yield f"{broker} is reached by {broker.driver}, which has no confirms"
        elif broker.transport == "amqp" and not broker.confirms:
            yield f"confirm_publish is off for {broker}"


@_rule(
    "broker",
    "error",
    "brokers answer",
    "nothing that is admitted is published while a broker cannot be reached",
    "start the broker, or correct broker_url (budget_brokers)",
)
def _broker(facts: Facts) -> Iterable[Seen] | Skipped:
    if all(broker.error is None for broker in facts.brokers):
        return Skipped("no broker was asked")
    return [f"{one} cannot be reached: {one.error}" for one in facts.brokers if one.error]


@_rule(
    "memory-broker",
    "warning",
    "no broker lives in the memory of one process",
    "what a memory:// broker is sent is seen in that process only: no other one runs it",
    "set broker_url to RabbitMQ, Redis, or 'filesystem://' on one host",
)
def _memory(facts: Facts) -> Iterator[Seen]:
    others = any(
        (relay.host, relay.pid) != (facts.host, facts.pid) and relay.seconds <= RELAY_SECONDS
        for relay in facts.store.relays
    )
    for broker in facts.brokers:
        if broker.transport == "memory" and others:
            yield "error", f"{broker} is memory://, and a relay runs in another process"
        elif broker.transport == "memory":
            yield f"{broker} is memory://"


def _visible(facts: Facts) -> Iterator[tuple[BrokerSeen, float]]:
    for broker in facts.brokers:
        if broker.visibility_seconds is not None:
            yield broker, broker.visibility_seconds


@_rule(
    "visibility-lease",
    "error",
    "brokers deliver again later than leases end",
    "a message that comes again while its task runs finds the lease alive, and is dropped: "
    "afterwards nobody has the message of a worker that is lost, and its task waits for recovery",
    "set broker_transport_options['visibility_timeout'] above budget_lease_seconds",
)
def _visibility_lease(facts: Facts) -> Iterator[Seen]:
    for broker, seconds in _visible(facts):
        if seconds < facts.lease_seconds:
            yield (
                f"{broker} delivers again after {seconds:g} s, and budget_lease_seconds is "
                f"{facts.lease_seconds:g}"
            )


@_rule(
    "visibility-time-limit",
    "warning",
    "brokers deliver again later than tasks may run",
    "a task that is acknowledged late and runs longer is delivered again all the while; each copy "
    "is dropped, and takes the place of other work",
    "set time_limit (task_time_limit) below broker_transport_options['visibility_timeout']",
)
def _visibility_limit(facts: Facts) -> Iterator[Seen]:
    late = [task for task in facts.budgeted if task.acks_late]
    for broker, seconds in _visible(facts):
        limits = {task.name: task.time_limit or facts.task_time_limit for task in late}
        longer = [name for name, limit in limits.items() if limit and limit > seconds]
        if longer:
            yield f"{broker} delivers again after {seconds:g} s; {_named(longer)} may run longer"


# Tasks


@_rule(
    "gate",
    "error",
    "publications pass the gate",
    "what passes by the gate is published without a budget",
    "set amqp_cls before 'CeleryBudget(app)'",
)
def _gate(facts: Facts) -> list[Seen]:
    return [facts.gate_error] if facts.gate_error else []


@_rule(
    "other-base",
    "error",
    "tasks that name a budget have one",
    "Celery keeps budget= and estimate= as plain attributes of a task with another base class: its "
    "calls are published without a budget",
    "use @budgeted(...), or base=BudgetedTask on the task",
)
def _other_base(facts: Facts) -> list[Seen]:
    wrong = [task.name for task in facts.tasks if task.says_budget and not task.budgeted]
    return [f"{_named(wrong)}: budget= with a base class that does not know it"] if wrong else []


@_rule(
    "early-rerun",
    "error",
    "tasks that are to run again on a lost worker are acknowledged late",
    "the message of a task that is acknowledged early is gone with its worker: it is charged as "
    "lost, and does not run again",
    "set acks_late=True (task_acks_late) on the task, or take reject_on_worker_lost out",
)
def _early_rerun(facts: Facts) -> list[Seen]:
    wrong = [
        task.name for task in facts.budgeted if task.reject_on_worker_lost and not task.acks_late
    ]
    return [f"{_named(wrong)}: reject_on_worker_lost without acks_late"] if wrong else []


@_rule(
    "acks-on-failure",
    "warning",
    "failed tasks are acknowledged",
    "the broker is given back the message of a task that has failed, of which the ledger says that "
    "it has ended: it comes again and again, and is dropped each time",
    "set task_acks_on_failure_or_timeout to True; for other attempts use retries",
)
def _acks_on_failure(facts: Facts) -> list[Seen]:
    wrong = [task.name for task in facts.budgeted if task.acks_late and not task.acks_on_failure]
    return [f"{_named(wrong)}: acks_on_failure_or_timeout is off"] if wrong else []


@_rule(
    "prefetch",
    "warning",
    "workers take few messages ahead",
    "what a worker has taken waits in its memory: limits of lanes, fair shares and priorities do "
    "not reach it, and it waits for that worker alone",
    "set worker_prefetch_multiplier to 1",
)
def _prefetch(facts: Facts) -> Iterator[Seen]:
    if facts.prefetch == 0 or facts.prefetch > 16:
        most = facts.prefetch or "without a bound"
        yield f"worker_prefetch_multiplier is {facts.prefetch}: taken ahead by a process: {most}"
    for worker in facts.workers or ():
        if worker.prefetch > 1000:
            yield f"{worker.name} takes {worker.prefetch:,} messages at a time"


# Results


@_rule(
    "result-backend",
    "warning",
    "results are stored",
    "budget.result() and chords need a result backend; what a request came to is not told without",
    "set result_backend",
)
def _backend(facts: Facts) -> list[Seen]:
    return [] if facts.backend not in ("", "disabled") else ["there is no result_backend"]


def _expires(facts: Facts) -> float | None:
    """Return when results expire; none where they never do, or there are none."""
    return facts.result_expires if facts.backend not in ("", "disabled") else None


@_rule(
    "result-expires",
    "error",
    "results are kept as long as they are given",
    "budget.result() is to give a result for budget_result_seconds, and nobody has it any more",
    "set result_expires to budget_result_seconds at least",
)
def _result_expires(facts: Facts) -> list[Seen]:
    expires = _expires(facts)
    if expires is None or expires >= facts.result_seconds:
        return []
    return [
        f"result_expires is {expires:g} s, and budget_result_seconds is {facts.result_seconds:g}"
    ]


@_rule(
    "reuse-expires",
    "error",
    "results are kept as long as runs are joined",
    "a call that joins a run which has ended gets its task id, and nobody has a result for it any "
    "more",
    "set result_expires to the longest reuse= at least",
)
def _reuse_expires(facts: Facts) -> list[Seen]:
    expires = _expires(facts)
    longer = [
        task.name
        for task in facts.budgeted
        if expires is not None and task.reuse_seconds is not None and task.reuse_seconds > expires
    ]
    return (
        [f"result_expires is {expires:g} s; {_named(longer)}: reuse= is longer"] if longer else []
    )


@_rule(
    "ignore-result",
    "warning",
    "tasks with a budget store their results",
    "budget.job() and budget.result() have nothing to tell of what such a task returned",
    "set ignore_result=False (task_ignore_result) where results are asked for",
)
def _ignore_result(facts: Facts) -> list[Seen]:
    wrong = [task.name for task in facts.budgeted if task.ignore_result]
    if not wrong or facts.backend in ("", "disabled"):
        return []
    return [f"{_named(wrong)}: ignore_result"]


# The ledger


@_rule(
    "ledger",
    "error",
    "the ledger answers",
    "nothing is admitted, claimed or settled while the ledger cannot be reached",
    "start the database, or correct budget_database_url",
)
def _ledger(facts: Facts) -> list[Seen]:
    return [facts.store.error] if facts.store.error else []


@_rule(
    "migrations",
    "error",
    "the ledger's tables are of this release",
    "a process of this release does not start on tables of another one",
    "run 'celery -A PROJ budget init'",
)
@_of_store
def _migrations(facts: Facts) -> list[Seen]:
    return [facts.store.schema_error] if facts.store.schema_error else []


@_rule(
    "read-only",
    "error",
    "the ledger can be written",
    "every admission, claim and settlement writes",
    "connect to the primary; turn default_transaction_read_only off for this role; let this user "
    "write the file and its folder; free some disk",
)
@_of_tables
def _read_only(facts: Facts) -> list[Seen]:
    return [facts.store.write_error] if facts.store.write_error else []


@_rule(
    "disk",
    "warning",
    "there is room for the ledger",
    "nothing is admitted once the disk is full",
    "free some disk, or move the file",
)
@_of_sqlite
def _disk(facts: Facts) -> list[Seen]:
    free = facts.store.free_bytes
    if free is None or free >= LITTLE_BYTES:
        return []
    return [f"{free // (1024 * 1024):,} MiB are free where the ledger is"]


@_rule(
    "sqlite-network",
    "error",
    "SQLite's file is on a local disk",
    "locks of SQLite do not hold on network file systems: two may write at once",
    "put the file on a local disk, or the ledger into PostgreSQL",
)
@_of_sqlite
def _network(facts: Facts) -> list[Seen]:
    kind = facts.store.file_system
    return [f"the ledger's file is on {kind}"] if kind in NETWORK else []


@_rule(
    "sqlite-hosts",
    "error",
    "SQLite is used by one host",
    "each host has a file of its own by that name, and so a budget of its own",
    "put the ledger into PostgreSQL: budget_database_url = 'postgresql+psycopg://...'",
)
@_of_sqlite
def _hosts(facts: Facts) -> list[Seen]:
    relays = {relay.host for relay in facts.store.relays}
    workers = {worker.host for worker in facts.workers or () if worker.host}
    others = (relays | workers) - {facts.host}
    return [f"the ledger is in SQLite, and used on {_named(others)} as well"] if others else []


@_rule(
    "durability",
    "error",
    "what the ledger commits is on disk",
    "a server that crashes forgets what was committed: a message that was published, or budget "
    "that was spent",
    "set synchronous_commit, fsync and full_page_writes to on",
)
@_of_postgresql
def _durability(facts: Facts) -> Iterator[Seen]:
    for name in ("synchronous_commit", "fsync", "full_page_writes"):
        if facts.store.settings.get(name) == "off":
            yield f"{name} is off"


@_rule(
    "server-version",
    "error",
    "the server is of a version that is supported",
    "the ledger's functions are tested from PostgreSQL 14 on",
    "upgrade the server to PostgreSQL 14 or later",
)
@_of_postgresql
def _version(facts: Facts) -> list[Seen]:
    version = facts.store.version
    if version is None or version >= OLDEST_SERVER:
        return []
    return [f"the server is PostgreSQL {version // 10_000}"]


@_rule(
    "statement-timeout",
    "warning",
    "the server lets statements wait as long as budget_lock_seconds",
    "a statement that waits for a lock is broken off before that, and fails as if the server did",
    "set statement_timeout (transaction_timeout) for this role above budget_lock_seconds, or to 0",
)
@_of_postgresql
def _timeouts(facts: Facts) -> Iterator[Seen]:
    for name in ("statement_timeout", "transaction_timeout"):
        milliseconds = int(facts.store.settings.get(name) or 0)
        if 0 < milliseconds <= facts.lock_seconds * 1000:
            yield (
                f"{name} is {milliseconds} ms, and budget_lock_seconds is {facts.lock_seconds:g}"
            )


@_rule(
    "clock",
    "warning",
    "this host's clock is the database's",
    "countdowns, expiry and deadlines are worked out by the clocks of callers and workers; leases "
    "and windows by that of the database",
    "keep the clocks of all hosts in step by NTP",
)
@_of_store
def _clock(facts: Facts) -> Iterator[Seen]:
    store = facts.store
    if store.clock_seconds is not None:
        yield from _off("the database's clock", store.clock_seconds, store.round_trip_seconds)


def _off(whose: str, seconds: float, round_trip: float) -> Iterator[Seen]:
    """Tell of a clock that is off by more than the time that it took to ask."""
    least = max(0.0, abs(seconds) - round_trip / 2)
    if least >= CLOCK_WARN:
        level = "error" if least >= CLOCK_WRONG else "warning"
        yield level, f"{whose} is {seconds:+.1f} s off this host's"


@_rule(
    "time-zones",
    "error",
    "this host knows the time zones of all budgets",
    "no window can be made for such a budget by this host, and nothing be admitted to it",
    "install the system's time zones, or the package tzdata",
)
@_of_tables
def _zones(facts: Facts) -> list[Seen]:
    missing = facts.store.zones_missing
    return [f"time zones that this host does not know: {_named(missing)}"] if missing else []


# Relays


@_rule(
    "relay",
    "warning",
    "a relay runs",
    "nothing that is admitted is published without a relay",
    "start one: 'celery -A PROJ budget relay', 'celery -A PROJ beat -S budget' or 'celery -A PROJ "
    "worker --budget-relay'",
)
@_of_tables
def _relay(facts: Facts) -> Iterator[Seen]:
    overdue = facts.store.overdue_seconds
    if not any(relay.seconds <= RELAY_SECONDS for relay in facts.store.relays):
        if overdue > RELAY_SECONDS:
            yield "error", f"no relay was seen, and a message has been due for {overdue:,.0f} s"
        else:
            yield f"no relay was seen in the last {RELAY_SECONDS:g} s"
    elif overdue > OVERDUE_SECONDS:
        yield f"a relay runs, and a message has been due for {overdue:,.0f} s"


# Workers


@_rule(
    "workers",
    "warning",
    "workers answer",
    "what is published waits until a worker runs it; what could not be asked was not checked",
    "start a worker, or turn worker_enable_remote_control on; a busy one may need more '--timeout'",
)
def _workers(facts: Facts) -> Iterable[Seen] | Skipped:
    if facts.workers is None:
        return Skipped(facts.workers_why)
    if facts.workers:
        return []
    off = "" if facts.remote_control else " (worker_enable_remote_control is off)"
    return [f"no worker answered{off}"]


@_rule(
    "workers-extension",
    "error",
    "all workers have the extension",
    "a worker without it runs tasks without claiming them: twice where a message comes twice, and "
    "nothing that they use is charged",
    "install celery-budget there and make 'CeleryBudget(app)' where the application is made",
)
def _extension(facts: Facts) -> Iterable[Seen] | Skipped:
    if facts.workers is None:
        return Skipped(facts.workers_why)
    if not facts.workers:
        return Skipped("no worker answered")
    found: list[Seen] = [
        f"{one.name} does not know the extension" for one in facts.workers if not one.knows
    ]
    return found + [
        f"{one.name} runs an application without CeleryBudget"
        for one in facts.workers
        if one.knows and not one.installed
    ]


@_rule(
    "workers-ledger",
    "error",
    "all workers use this ledger",
    "a worker with another root or ledger does not find the reservations of what it is sent, and "
    "waits or rejects it",
    "give all processes the same budget_database_url and budget_root",
)
@_of_workers
def _same_ledger(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    for one in workers:
        if one.root != facts.root:
            yield f"{one.name} has the root {one.root!r}, and here it is {facts.root!r}"
        elif one.error:
            yield f"{one.name} cannot ask its ledger: {one.error}"
        elif one.ledger != facts.ledger and one.mark != facts.store.mark:
            yield f"{one.name} has another ledger"


@_rule(
    "workers-version",
    "warning",
    "all workers have this release",
    "releases are to be mixed for the time of an upgrade only; tables of another version are not "
    "for a worker of this one",
    "upgrade the workers",
)
@_of_workers
def _same_version(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    for one in workers:
        if one.schema != facts.schema:
            yield "error", f"{one.name} needs schema {one.schema}, and here it is {facts.schema}"
        elif one.version != facts.version:
            yield f"{one.name} has version {one.version}, and here it is {facts.version}"


@_rule(
    "workers-lease",
    "warning",
    "all workers have this lease",
    "who renews less often than others look loses its claims",
    "give all processes the same budget_lease_seconds",
)
@_of_workers
def _same_lease(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    for one in workers:
        if one.lease_seconds != facts.lease_seconds:
            yield f"{one.name} has {one.lease_seconds:g} s, and here it is {facts.lease_seconds:g}"


@_rule(
    "workers-clock",
    "warning",
    "the clocks of all workers are this host's",
    "countdowns, expiry and deadlines are worked out by the clocks of callers and workers",
    "keep the clocks of all hosts in step by NTP",
)
@_of_workers
def _worker_clocks(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    for one in workers:
        if one.clock_seconds is not None:
            yield from _off(f"the clock of {one.name}", one.clock_seconds, one.round_trip_seconds)


@_rule(
    "pool-size",
    "warning",
    "workers have as many connections as they run tasks",
    "tasks of one process wait for each other's connections to the ledger, and so may renewals",
    "lower the worker's concurrency, or start more workers",
)
@_of_workers
def _pool_size(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    if facts.store.dialect == "postgresql":
        for one in workers:
            if one.pool in SHARING and one.concurrency > facts.pool_size:
                yield (
                    f"{one.name} runs {one.concurrency} tasks at once in one process, which has "
                    f"{facts.pool_size} connections"
                )


@_rule(
    "max-connections",
    "warning",
    "the server takes the connections of all workers",
    "a process that gets no connection neither claims nor settles until another one leaves",
    "raise max_connections, or pool transactions by a proxy (see docs/running.md)",
)
@_of_workers
def _max_connections(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    most = facts.store.max_connections
    # A process of its own needs one, its main process and a relay a few.
    wanted = sum(one.concurrency + 3 for one in workers)
    if most is not None and wanted > most:
        yield f"workers need some {wanted:,} connections, and max_connections is {most:,}"


@_rule(
    "spool",
    "error",
    "what a worker cannot tell the ledger can be written down",
    "a worker that stops while the ledger is down loses what its tasks have used",
    "set budget_spool to a folder that the worker may write, on a disk that outlives it",
)
def _spool(facts: Facts) -> Iterator[Seen]:
    if facts.spool_error:
        yield "warning", f"here, {facts.spool}: {facts.spool_error}"
    for one in facts.workers or ():
        if one.spool_error:
            yield f"{one.name}: {one.spool_error}"


# Others


@_rule(
    "on-alert",
    "error",
    "what is called with alerts can be called",
    "a relay does not start with a budget_on_alert that it cannot call",
    "set budget_on_alert to 'module:name' of a function that takes an alert",
)
def _on_alert(facts: Facts) -> list[Seen]:
    return [facts.alert_error] if facts.alert_error else []


@_rule(
    "prices",
    "warning",
    "configured prices are those of genai-prices, or of models that it does not know",
    "budget_prices come before those of the package, which are newer where that was upgraded since",
    "correct budget_prices, or take the model out",
)
def _prices(facts: Facts) -> list[Seen]:
    return list(facts.prices_differ)
