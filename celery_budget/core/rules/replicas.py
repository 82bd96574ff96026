"""Rules of the replica that reports are read from, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from celery_budget.core.checkup import Facts, ReplicaSeen
from celery_budget.core.rules.rule import Look, Seen, Skipped, rule

__all__: list[str] = []

#: A relay is seen every few seconds, and looks gone a little later than that.
LATE_SECONDS = 10.0


def _of_replica(look: Callable[[Facts, ReplicaSeen], Iterable[Seen] | Skipped]) -> Look:
    """Skip a rule where there is no replica, or it does not answer; give it the replica."""

    def looked(facts: Facts) -> Iterable[Seen] | Skipped:
        if facts.replica is None:
            return Skipped("does not apply: budget_report_url is not set", applies=False)
        if facts.replica.error:
            return Skipped("the replica cannot be read")
        return look(facts, facts.replica)

    return looked


@rule(
    "replica",
    "error",
    "the replica of budget_report_url answers, with the tables of this release",
    "reports, the dashboard and metrics are read from it, and from nowhere else while it is set",
    "start the replica, correct budget_report_url or take it out; 'celery -A PROJ budget init' "
    "where the ledger's own tables are old",
)
def _replica(facts: Facts) -> Iterable[Seen] | Skipped:
    if facts.replica is None:
        return Skipped("does not apply: budget_report_url is not set", applies=False)
    return [facts.replica.error] if facts.replica.error else []


@rule(
    "replica-ledger",
    "error",
    "the replica has this ledger",
    "what is shown would be another ledger's budgets",
    "set budget_report_url to a replica of the database of budget_database_url",
)
@_of_replica
def _ledger(facts: Facts, replica: ReplicaSeen) -> Iterator[Seen]:
    if facts.store.error or facts.store.schema_error:
        return
    if replica.mark != facts.store.mark:
        yield f"the first budget in {replica.server} is not that of the ledger"


@rule(
    "replica-read-only",
    "warning",
    "the replica follows the ledger, and cannot be written",
    "a server that was promoted, or is none, shows what the ledger was at some time",
    "make it follow the ledger's database again, or take budget_report_url out",
)
@_of_replica
def _read_only(facts: Facts, replica: ReplicaSeen) -> Iterator[Seen]:
    if not replica.follows:
        yield f"{replica.server} is not in recovery: it follows no other server"
    if replica.writable:
        yield f"{replica.server} can be written"


@rule(
    "replica-lag",
    "warning",
    "the replica keeps up",
    "relays look gone on it, leases look lapsed, and budgets have what was spent since",
    "see why it does not keep up; until then read by 'celery -A PROJ budget --primary ...'",
)
@_of_replica
def _lag(facts: Facts, replica: ReplicaSeen) -> Iterator[Seen]:
    if replica.behind_seconds is None:
        yield f"{replica.server} does not tell how far it is behind"
    elif replica.behind_seconds >= LATE_SECONDS:
        yield f"{replica.server} is {replica.behind_seconds:,.1f} s behind"
