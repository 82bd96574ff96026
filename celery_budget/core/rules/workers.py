"""Rules of workers, and of what is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from celery_budget.core.checkup import Facts, WorkerSeen
from celery_budget.core.rules.rule import Seen, Skipped, of_workers, off, rule

__all__: list[str] = []

#: Pools whose tasks share the connections of one process.
SHARING = ("threads", "thread", "gevent", "eventlet")


@rule(
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


@rule(
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


@rule(
    "workers-ledger",
    "error",
    "all workers use this ledger",
    "a worker with another root or ledger does not find the reservations of what it is sent, and "
    "waits or rejects it",
    "give all processes the same budget_database_url and budget_root",
)
@of_workers
def _same_ledger(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    for one in workers:
        if one.root != facts.root:
            yield f"{one.name} has the root {one.root!r}, and here it is {facts.root!r}"
        elif one.error:
            yield f"{one.name} cannot ask its ledger: {one.error}"
        elif _is_other(facts, one):
            yield f"{one.name} has another ledger"


def _is_other(facts: Facts, worker: WorkerSeen) -> bool:
    """Tell whether a worker's ledger is another one: by its first budget, else by where it is.

    One database may have several names, and one name, such as localhost, several databases. Of
    SQLite's files by one name on several hosts another rule tells.
    """
    same_place = worker.ledger == facts.ledger
    if worker.mark is None or facts.store.mark is None:
        return not same_place
    return worker.mark != facts.store.mark and not (same_place and facts.store.dialect == "sqlite")


@rule(
    "workers-version",
    "warning",
    "all workers have this release",
    "releases are to be mixed for the time of an upgrade only; tables of another version are not "
    "for a worker of this one",
    "upgrade the workers",
)
@of_workers
def _same_version(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    for one in workers:
        if one.schema != facts.schema:
            yield "error", f"{one.name} needs schema {one.schema}, and here it is {facts.schema}"
        elif one.version != facts.version:
            yield f"{one.name} has version {one.version}, and here it is {facts.version}"


@rule(
    "workers-lease",
    "warning",
    "all workers have this lease",
    "who renews less often than others look loses its claims",
    "give all processes the same budget_lease_seconds",
)
@of_workers
def _same_lease(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    for one in workers:
        if one.lease_seconds != facts.lease_seconds:
            yield f"{one.name} has {one.lease_seconds:g} s, and here it is {facts.lease_seconds:g}"


@rule(
    "workers-clock",
    "warning",
    "the clocks of all workers are this host's",
    "countdowns, expiry and deadlines are worked out by the clocks of callers and workers",
    "keep the clocks of all hosts in step by NTP",
)
@of_workers
def _worker_clocks(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    for one in workers:
        if one.clock_seconds is not None:
            yield from off(f"the clock of {one.name}", one.clock_seconds, one.round_trip_seconds)


@rule(
    "pool-size",
    "warning",
    "workers have as many connections as they run tasks",
    "tasks of one process wait for each other's connections to the ledger, and so may renewals",
    "lower the worker's concurrency, or start more workers",
)
@of_workers
def _pool_size(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    if facts.store.dialect == "postgresql":
        for one in workers:
            if one.pool in SHARING and one.concurrency > facts.pool_size:
                yield (
                    f"{one.name} runs {one.concurrency} tasks at once in one process, which has "
                    f"{facts.pool_size} connections"
                )


@rule(
    "max-connections",
    "warning",
    "the server takes the connections of all workers",
    "a process that gets no connection neither claims nor settles until another one leaves",
    "raise max_connections, or pool transactions by a proxy (see docs/running.md)",
)
@of_workers
def _max_connections(facts: Facts, workers: tuple[WorkerSeen, ...]) -> Iterator[Seen]:
    most = facts.store.max_connections
    # A process of its own needs one, its main process and a relay a few.
    wanted = sum(one.concurrency + 3 for one in workers)
    if most is not None and wanted > most:
        yield f"workers need some {wanted:,} connections, and max_connections is {most:,}"


@rule(
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


@rule(
    "authorize",
    "error",
    "what is asked whether callers may draw can be called",
    "nothing is admitted with a budget_authorize that cannot be called",
    "set budget_authorize to 'module:name' of a function that takes a Draw",
)
def _authorize(facts: Facts) -> list[Seen]:
    return [facts.authorize_error] if facts.authorize_error else []


@rule(
    "on-alert",
    "error",
    "what is called with alerts can be called",
    "a relay does not start with a budget_on_alert that it cannot call",
    "set budget_on_alert to 'module:name' of a function that takes an alert",
)
def _on_alert(facts: Facts) -> list[Seen]:
    return [facts.alert_error] if facts.alert_error else []


@rule(
    "prices",
    "warning",
    "configured prices are those of genai-prices, or of models that it does not know",
    "budget_prices come before those of the package, which are newer where that was upgraded since",
    "correct budget_prices, or take the model out",
)
def _prices(facts: Facts) -> list[Seen]:
    return list(facts.prices_differ)
