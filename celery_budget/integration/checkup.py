"""Collects what ``budget check`` judges by: from configuration, tasks, brokers, ledger, workers."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery.backends.base import DisabledBackend

from celery_budget import reconcile
from celery_budget.core.checkup import (
    BrokerSeen,
    Checkup,
    Facts,
    RelayHost,
    ReplicaSeen,
    StoreSeen,
    TaskSeen,
    WorkerSeen,
)
from celery_budget.core.periods import Period
from celery_budget.core.prices import Unpriced
from celery_budget.core.rules import judge
from celery_budget.errors import BudgetError, SchemaError, StoreError
from celery_budget.integration.hooks import hook_of
from celery_budget.integration.info import (
    COMMAND,
    ledger_digest,
    package_version,
    spool_error,
)
from celery_budget.integration.queues import KombuQueues
from celery_budget.integration.task import BudgetedTask, policy_of, upgrade_marked
from celery_budget.metering import price
from celery_budget.store import checkup as seen
from celery_budget.store import distributed, migrate, read_from
from celery_budget.store.windows import read_now

if TYPE_CHECKING:
    from celery_budget.integration.install import CeleryBudget

__all__ = ["ASK_SECONDS", "check_up", "collect"]

#: How long workers are given to answer.
ASK_SECONDS = 2.0
#: After how many seconds a transport delivers again, unless it is told.
VISIBILITY = {"redis": 3600.0, "sqs": 1800.0}
#: Connections that a process has: SQLAlchemy's pool, and what it may go beyond it.
POOL_SIZE = 15


def check_up(budget: CeleryBudget, timeout: float = ASK_SECONDS) -> Checkup:
    """Return what all rules find; see :meth:`CeleryBudget.checkup`."""
    return judge(collect(budget, timeout))


def collect(budget: CeleryBudget, timeout: float = ASK_SECONDS) -> Facts:
    """Look at all there is to be seen; what cannot be reached is noted, and not raised.

    :raises ConfigurationError: where the settings themselves cannot work.
    """
    app, settings = budget.app, budget.settings
    app.loader.import_default_modules()
    upgrade_marked(app)
    brokers = tuple(_brokers(budget))
    workers, why = _workers(budget, brokers, timeout)
    return Facts(
        host=socket.gethostname(),
        pid=os.getpid(),
        version=package_version(),
        schema=migrate.head(),
        root=settings.root,
        ledger=ledger_digest(budget),
        lease_seconds=settings.lease_seconds,
        lock_seconds=settings.lock_seconds,
        result_seconds=settings.result_seconds,
        brokers=brokers,
        tasks=tuple(_tasks(budget)),
        store=_store(budget),
        replica=_replica(budget),
        workers=workers,
        workers_why=why,
        backend=_backend(budget),
        result_expires=_seconds(app.conf.result_expires),
        task_time_limit=_seconds(app.conf.task_time_limit),
        prefetch=int(app.conf.worker_prefetch_multiplier or 0),
        remote_control=bool(app.conf.worker_enable_remote_control),
        gate_error=_error(budget.check_gate),
        authorize_error=_error(lambda: hook_of(budget, "authorize")),
        alert_error=_error(lambda: hook_of(budget, "on_alert")),
        spool=settings.spool,
        spool_error=spool_error(budget),
        prices_differ=tuple(_prices(budget)),
        pool_size=POOL_SIZE,
    )


def _error(look: Any) -> str:
    try:
        look()
    # Whatever an application's own parts raise where they cannot be made.
    except Exception as error:  # noqa: BLE001
        return _said(error)
    return ""


def _seconds(value: Any) -> float | None:
    """Return a time of Celery's configuration in seconds; none for none, or for ever."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    return float(value) if value else None


def _backend(budget: CeleryBudget) -> str:
    try:
        backend = budget.app.backend
    # Whatever a backend lacks.
    except Exception:  # noqa: BLE001
        return ""
    return "disabled" if isinstance(backend, DisabledBackend) else type(backend).__name__


def _brokers(budget: CeleryBudget) -> Iterator[BrokerSeen]:
    queues = KombuQueues(budget.app)
    for name in budget.brokers.names:
        try:
            connection = budget.brokers.connection(name)
            transport = connection.transport
        # Whatever a URL or a transport lacks.
        except Exception as error:  # noqa: BLE001
            yield BrokerSeen(name, "", error=_said(error))
            continue
        options = connection.transport_options or {}
        kind = str(transport.driver_type)
        visible = options.get("visibility_timeout") or VISIBILITY.get(kind)
        yield BrokerSeen(
            name,
            kind,
            str(transport.driver_name),
            bool(options.get("confirm_publish", True)),
            float(visible) if kind in VISIBILITY and visible else None,
            _reach(queues, name),
        )


def _reach(queues: KombuQueues, name: str) -> str:
    """Return why a broker cannot be reached; empty where it can."""
    try:
        with queues.opened(name) as connection:
            connection.default_channel  # noqa: B018 - opens it
    # Whatever a transport raises.
    except Exception as error:  # noqa: BLE001
        return _said(error)
    return ""


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)


def _tasks(budget: CeleryBudget) -> Iterator[TaskSeen]:
    for name, task in sorted(budget.app.tasks.items()):
        if name.startswith("celery."):
            continue
        budgeted = isinstance(task, BudgetedTask)
        policy = policy_of(budget.app, name) if budgeted else None
        reuse = None if policy is None else policy.reuse
        yield TaskSeen(
            name,
            budgeted,
            any(getattr(task, option, None) is not None for option in ("budget", "estimate")),
            bool(task.acks_late),
            bool(task.reject_on_worker_lost),
            bool(task.acks_on_failure_or_timeout),
            bool(task.ignore_result),
            _seconds(task.time_limit),
            None if reuse is None else reuse.kept_us / 1_000_000,
            budget.settings.enforce if policy is None or policy.enforce is None else policy.enforce,
        )


def _store(budget: CeleryBudget) -> StoreSeen:
    store, root = budget.store, budget.settings.root
    found = StoreSeen(store.dialect)
    try:
        begun = time.time()
        now = store.read(read_now) / 1_000_000
        took = time.time() - begun
        server = store.read(seen.read_server)
    except BudgetError as error:
        return replace(found, error=str(error))
    found = replace(
        found,
        clock_seconds=now - (begun + took / 2),
        round_trip_seconds=took,
        settings=server.settings,
        version=_number(server.settings.get("server_version_num")),
        max_connections=_number(server.settings.get("max_connections")),
        standbys=server.standbys,
        file_system=_file_system(server.path),
        free_bytes=None
        if server.path is None
        else shutil.disk_usage(Path(server.path).parent).free,
    )
    try:
        budget.check()
        tables = store.read(seen.read_tables, root)
        relays = reconcile.relays(store, budget.settings)
        spread = store.read(distributed.is_distributed)
        missing = store.read(distributed.missing) if spread else ()
    except (SchemaError, StoreError) as error:
        return replace(found, schema_error=str(error))
    return replace(
        found,
        write_error=_write_error(budget),
        zones_missing=tuple(zone for zone in tables.zones if not _is_known(zone)),
        overdue_seconds=tables.overdue_us / 1_000_000,
        mark=tables.mark,
        distributed=spread,
        undistributed=missing,
        relays=tuple(RelayHost(one.host, one.pid, one.seconds) for one in relays),
    )


def _replica(budget: CeleryBudget) -> ReplicaSeen | None:
    replica, root = budget.replica, budget.settings.root
    if replica is None:
        return None
    found = ReplicaSeen(replica.url)
    try:
        source = read_from(replica)
        replica.read(migrate.check)
        return replace(
            found,
            mark=replica.read(seen.mark, root),
            follows=source.follows,
            writable=replica.read(seen.is_writable),
            behind_seconds=source.behind_seconds,
        )
    except (SchemaError, StoreError) as error:
        return replace(found, error=str(error))


def _write_error(budget: CeleryBudget) -> str:
    # By a connection that is new: one that was used to read says READ WRITE from then on, which a
    # new one of a read-only role does not.
    fresh = budget.store.beside()
    try:
        fresh.run(seen.try_writing, budget.settings.root)
    except seen.Undone:
        return ""
    except BudgetError as error:
        return str(error)
    finally:
        fresh.dispose()
    raise AssertionError("a trial has no other end")  # pragma: no cover


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _is_known(zone: str) -> bool:
    try:
        Period("day", zone)
    except BudgetError:
        return False
    return True


def _file_system(path: str | None) -> str | None:
    """Return the type of the file system that has a file; none where the system does not say."""
    if path is None:
        return None
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    where, best, kind = os.path.realpath(path), "", None
    for line in mounts.splitlines():
        _, mounted, of_type, *_ = line.split(" ")
        mounted = mounted.replace("\\040", " ")
        inside = mounted == "/" or where == mounted or where.startswith(f"{mounted}/")
        if inside and len(mounted) >= len(best):
            best, kind = mounted, of_type
    return kind


def _workers(
    budget: CeleryBudget, brokers: tuple[BrokerSeen, ...], timeout: float
) -> tuple[tuple[WorkerSeen, ...] | None, str]:
    """Return the workers that answered; none, and why, where they could not be asked."""
    if brokers[0].error:
        return None, "the broker cannot be reached, so that no worker could be asked"
    answers: list[tuple[dict[str, Any], float]] = []
    try:
        with KombuQueues(budget.app).opened(brokers[0].name) as connection:
            begun = time.time()
            budget.app.control.broadcast(
                COMMAND,
                reply=True,
                timeout=timeout,
                connection=connection,
                callback=lambda answer: answers.append((answer, time.time())),
            )
    # Whatever a transport raises.
    except Exception as error:  # noqa: BLE001
        return None, f"workers cannot be asked: {_said(error)}"
    return tuple(
        _worker(name, told, begun, heard)
        for answer, heard in answers
        for name, told in sorted(answer.items())
    ), ""


def _worker(name: str, told: Any, begun: float, heard: float) -> WorkerSeen:
    if not isinstance(told, dict) or "version" not in told:
        return WorkerSeen(name, knows=False)
    known = {one.name for one in fields(WorkerSeen)}
    return WorkerSeen(
        name,
        clock_seconds=told["now"] - (begun + heard) / 2,
        round_trip_seconds=heard - begun,
        **{key: value for key, value in told.items() if key in known},
    )


def _prices(budget: CeleryBudget) -> Iterator[str]:
    """Yield the models whose configured price is another than the package's."""
    million = {"input_tokens": 1_000_000, "output_tokens": 1_000_000}
    for model in sorted(budget.settings.prices):
        asked = Unpriced(model, million)
        try:
            here, there = price(asked, budget.settings.prices), price(asked, {})
        except BudgetError:
            # The package does not know it, or one of the two has no price for both.
            continue
        if here.amount != there.amount:
            yield (
                f"budget_prices has {model!r} at {here.amount:,} micro-dollars for a million "
                f"tokens in and out, and genai-prices at {there.amount:,}"
            )
