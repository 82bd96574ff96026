"""One soak: servers, processes, clients for each tenant, trouble, and the wait for the end."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sa
from typing_extensions import Self

from celery_budget.core.lanes import Load
from celery_budget.core.reservations import TERMINAL
from celery_budget.errors import BudgetExceeded
from celery_budget.store.schema import now_us, reservations
from tests.cluster import Cluster, eventually
from tests.services.base import Service
from tests.services.postgres import PostgresServer
from tests.services.rabbitmq import RabbitServer
from tests.services.redis import RedisServer
from tests.soak import app as soaking
from tests.soak.app import QUEUE
from tests.soak.chaos import Chaos
from tests.soak.plan import TENANTS, Job, Tenant, plan
from tests.soak.verdict import Verdict, judge

__all__ = ["Soak"]

#: Seconds after which a soak that does not come to its end has failed, for each hundred jobs.
WAIT = 120
#: Between two looks of a client whose budget is held, or who has enough open.
PAUSE = 0.05
#: How often in a row it is asked for a job: what holds the budget may wait for some itself.
TRIES = 200
#: What the lane lets go: less than the workers could take, so that what waits is chosen from.
LANE = {"max_running_jobs": 8, "max_queued_jobs": 6, "max_running_units": 40_000}
SETTINGS = {
    "budget_max_deliveries": 100,
    # By which a lane asks whether its workers are there.
    "worker_enable_remote_control": True,
    "worker_prefetch_multiplier": 4,
    "worker_lost_wait": 0.2,
}


class Client:
    """Asks for the jobs of one tenant, in their order.

    Where its budget is held by what runs it asks again; where that is used up the job is refused.

    :ivar refused: the numbers of jobs that were refused for good.
    :ivar refusals: how often it was refused, by the reason.
    :ivar ids: by request id the ids of tasks it was answered with.
    """

    def __init__(self, cluster: Cluster, tenant: Tenant, jobs: Sequence[Job]) -> None:
        self._cluster = cluster
        self._tenant = tenant
        self._jobs = jobs
        self.refused: set[int] = set()
        self.refusals: Counter[str] = Counter()
        self.ids: dict[str, set[str]] = {}

    def run(self) -> None:
        """Ask for all of them."""
        for job in self._jobs:
            while self._tenant.open is not None and self._open() >= self._tenant.open:
                time.sleep(PAUSE)
            for _ in range(1 + job.repeated):
                self._ask(job)

    def _ask(self, job: Job) -> None:
        task = self._cluster.app.tasks[f"soak.{job.stage}"]
        given = (job.tenant, job.number, job.estimate, job.actual, job.fate)
        for left in reversed(range(TRIES)):
            if job.number in self.refused:
                return
            try:
                result = task.apply_async(given, request_id=job.request_id)
            except BudgetExceeded as error:
                self.refusals[error.reason] += 1
                if error.reason != "held" or not left:
                    self.refused.add(job.number)
                time.sleep(PAUSE)
            else:
                self.ids.setdefault(job.request_id, set()).add(result.id)
                return

    def _open(self) -> int:
        query = (
            sa.select(sa.func.count())
            .select_from(reservations)
            .where(
                reservations.c.root == self._cluster.budget.settings.root,
                reservations.c.owner == f"tenant:{self._tenant.name}",
                reservations.c.state.not_in(TERMINAL),
            )
        )
        return self._cluster.budget.store.read(
            lambda connection: int(connection.execute(query).scalar_one())
        )


class Soak(AbstractContextManager["Soak"]):
    """A soak, with servers and processes of its own, which end with it.

    :param broker: ``redis`` or ``rabbitmq``.
    :param workers: how many, with two processes each.
    :param stripes: how many rows each budget has.
    :ivar planned: its jobs.
    """

    def __init__(
        self, jobs: int, seed: int, broker: str = "redis", workers: int = 2, stripes: int = 1
    ) -> None:
        self.planned = plan(jobs, seed)
        self._seed = seed
        self._broker = broker
        self._workers = workers
        self._stripes = stripes
        self._stack = ExitStack()
        self.cluster: Cluster
        self._clients: dict[str, Client] = {}
        self._ceilings: Ceilings
        self._chaos: Chaos
        self._most = Load()
        self._seconds = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            postgres, redis = PostgresServer(), RedisServer()
            self._start(stack, postgres)
            self._start(stack, redis)
            broker = redis.url
            if self._broker == "rabbitmq":
                rabbitmq = RabbitServer()
                self._start(stack, rabbitmq)
                broker = rabbitmq.url
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="budget-soak-"))
            conf = {
                "broker_url": broker,
                "result_backend": redis.database_url(1),
                "budget_database_url": postgres.create_database(),
                "soak_folder": folder,
                **SETTINGS,
            }
            self.cluster = Cluster(Path(folder), conf, soaking)
            stack.callback(self.cluster.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack, server: Service) -> None:
        stack.callback(server.stop)
        server.start()

    def run(self) -> None:
        """Have all jobs asked for, and wait until nothing is open.

        :raises AssertionError: where that does not come; with the ends of all logs.
        """
        _declare(self.cluster, self.planned, self._stripes)
        self._ceilings = Ceilings(self.cluster)
        self._chaos = Chaos(self.cluster, self.cluster.conf["result_backend"], self._seed)
        self._clients = {
            one.name: Client(
                self.cluster, one, [job for job in self.planned if job.tenant == one.name]
            )
            for one in TENANTS
        }
        began = time.monotonic()
        try:
            with ThreadPoolExecutor() as pool:
                self._chaos.start_processes(self._workers)
                trouble = pool.submit(self._chaos.run)
                try:
                    asking = {
                        name: pool.submit(client.run) for name, client in self._clients.items()
                    }
                    self._wait(asking)
                finally:
                    self._chaos.stop()
                trouble.result()
            # What the last trouble has left.
            self.cluster.settle(WAIT)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{_logs(self.cluster)}") from error
        self._seconds = time.monotonic() - began

    def _wait(self, asking: Mapping[str, Future[None]]) -> None:
        """Wait until everybody has asked for everything and nothing is open."""
        budget, jobs = self.cluster.budget, len(self.planned)
        shown = 0.0

        def look() -> dict[str, Any]:
            nonlocal shown
            lane = budget.lanes.show(QUEUE)
            both = lane.queued + lane.running
            self._most = Load(max(self._most.jobs, both.jobs), max(self._most.units, both.units))
            if time.monotonic() > shown + 5 and sys.stderr.isatty():
                shown = time.monotonic()
                counts = budget.report().counts
                sys.stderr.write(f"\r{counts['state_settled']} of {jobs} settled ")
                sys.stderr.flush()
            busy: dict[str, Any] = {name: "asks" for name, one in asking.items() if not one.done()}
            work = budget.reconcile().open_work
            if not busy and work["parked"]:
                self._ceilings.raise_once()
            return busy | {name: count for name, count in work.items() if count}

        eventually(look, lambda busy: not busy, WAIT + WAIT * jobs / 100, "the end of the soak")
        for one in asking.values():
            one.result()

    def judge(self) -> Verdict:
        """Compare what the ledger says, and what the work left behind, with the plan."""
        return judge(
            self.cluster,
            self.planned,
            self._clients,
            self._ceilings.of,
            (self._most, Load(LANE["max_running_jobs"], LANE["max_running_units"])),
            self._chaos.done,
            self._seconds,
        )


def _declare(cluster: Cluster, planned: Sequence[Job], stripes: int) -> None:
    budget = cluster.budget
    with budget.store.transaction() as connection:
        connection.exec_driver_sql("CREATE TABLE work (job integer NOT NULL)")
    for tenant in TENANTS:
        used = sum(job.charged for job in planned if job.tenant == tenant.name)
        heaviest = max(job.estimate for job in planned)
        limit = max(used * tenant.funded // 100, heaviest)
        budget.set(f"tenant:{tenant.name}", limit=limit, unit="units", stripes=stripes)
    budget.lanes.set(QUEUE, queues=(QUEUE,), **LANE)


class Ceilings:
    """The limits, which are raised once: for retries that wait for budget when all else is over.

    :ivar of: from which time by the ledger's clock which budget has which limit.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.of: list[tuple[int, dict[str, int]]] = []
        self._note(0)

    def _note(self, since_us: int) -> None:
        limits = {one.budget: int(one.limit or 0) for one in self._cluster.budget.balances()}
        self.of.append((since_us, limits))

    def raise_once(self) -> None:
        """Raise all limits, if that was not done before."""
        if len(self.of) > 1:
            return
        with self._cluster.budget.store.snapshot() as connection:
            now = int(connection.execute(sa.select(now_us())).scalar_one())
        for budget, limit in self.of[0][1].items():
            self._cluster.budget.set(budget, limit=10 * limit)
        self._note(now)


def _logs(cluster: Cluster) -> str:
    return "\n".join(
        f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
        for log in sorted(cluster.folder.glob("*.log"))
    )
