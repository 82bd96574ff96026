"""Rules of the ledger's database and of relays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from celery_budget.core.checkup import Facts
from celery_budget.core.rules.rule import (
    RELAY_SECONDS,
    Seen,
    Skipped,
    named,
    of_postgresql,
    of_sqlite,
    of_store,
    of_tables,
    off,
    rule,
)

__all__: list[str] = []

#: What has been due for so long is not about to be published.
OVERDUE_SECONDS = 60.0
OLDEST_SERVER = 140_000
#: What a full disk is near to.
LITTLE_BYTES = 100 * 1024 * 1024
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs", "ceph", "glusterfs")


@rule(
    "ledger",
    "error",
    "the ledger answers",
    "nothing is admitted, claimed or settled while the ledger cannot be reached",
    "start the database, or correct budget_database_url",
)
def _ledger(facts: Facts) -> list[Seen]:
    return [facts.store.error] if facts.store.error else []


@rule(
    "migrations",
    "error",
    "the ledger's tables are of this release",
    "a process of this release does not start on tables of another one",
    "run 'celery -A PROJ budget init'",
)
@of_store
def _migrations(facts: Facts) -> list[Seen]:
    return [facts.store.schema_error] if facts.store.schema_error else []


@rule(
    "read-only",
    "error",
    "the ledger can be written",
    "every admission, claim and settlement writes",
    "connect to the primary; turn default_transaction_read_only off for this role; let this user "
    "write the file and its folder; free some disk",
)
@of_tables
def _read_only(facts: Facts) -> list[Seen]:
    return [facts.store.write_error] if facts.store.write_error else []


@rule(
    "disk",
    "warning",
    "there is room for the ledger",
    "nothing is admitted once the disk is full",
    "free some disk, or move the file",
)
@of_sqlite
def _disk(facts: Facts) -> list[Seen]:
    free = facts.store.free_bytes
    if free is None or free >= LITTLE_BYTES:
        return []
    return [f"{free // (1024 * 1024):,} MiB are free where the ledger is"]


@rule(
    "sqlite-network",
    "error",
    "SQLite's file is on a local disk",
    "locks of SQLite do not hold on network file systems: two may write at once",
    "put the file on a local disk, or the ledger into PostgreSQL",
)
@of_sqlite
def _network(facts: Facts) -> list[Seen]:
    kind = facts.store.file_system
    return [f"the ledger's file is on {kind}"] if kind in NETWORK else []


@rule(
    "sqlite-hosts",
    "error",
    "SQLite is used by one host",
    "a host with a file of its own by that name has budgets of its own; one file for several is "
    "for containers on one machine, and its locks hold on a local disk only",
    "put the ledger into PostgreSQL: budget_database_url = 'postgresql+psycopg://...'",
)
@of_sqlite
def _hosts(facts: Facts) -> Iterator[Seen]:
    workers = [one for one in facts.workers or () if one.host and one.host != facts.host]
    apart = {one.host for one in workers if one.mark != facts.store.mark}
    # A relay that is seen is seen in this very file.
    relays = {one.host for one in facts.store.relays if one.seconds <= RELAY_SECONDS}
    beside = ({one.host for one in workers} | relays) - apart - {facts.host}
    if apart:
        yield f"the ledger is in SQLite, and {named(apart)} has another file"
    if beside:
        yield "warning", f"the ledger is in SQLite, and its file is used on {named(beside)} as well"


@rule(
    "distributed",
    "error",
    "the ledger is distributed by root, with all of its tables",
    "a table that is on the coordinator alone cannot be joined to those that are distributed",
    "run 'celery -A PROJ budget init --distributed'",
)
@of_tables
def _distributed(facts: Facts) -> Iterable[Seen] | Skipped:
    if not facts.store.distributed:
        return Skipped("does not apply: the ledger is on one server", applies=False)
    missing = facts.store.undistributed
    return [f"not distributed: {named(missing)}"] if missing else []


@rule(
    "durability",
    "error",
    "what the ledger commits is on disk",
    "a server that crashes forgets what was committed: a message that was published, or budget "
    "that was spent",
    "set synchronous_commit, fsync and full_page_writes to on",
)
@of_postgresql
def _durability(facts: Facts) -> Iterator[Seen]:
    for name in ("synchronous_commit", "fsync", "full_page_writes"):
        if facts.store.settings.get(name) == "off":
            yield f"{name} is off"


@rule(
    "standbys",
    "warning",
    "what the ledger commits is on a standby as well, where it has any",
    "a standby that takes over may lack the last requests that were accepted, and what was spent",
    "name one in synchronous_standby_names, and set synchronous_commit to on or remote_apply (see "
    "docs/high-availability.md)",
)
@of_postgresql
def _standbys(facts: Facts) -> list[Seen] | Skipped:
    if facts.store.standbys is None:
        return Skipped("this user may not see whether the server has standbys")
    standbys, synchronous = facts.store.standbys
    level = facts.store.settings.get("synchronous_commit")
    has = f"the server has {standbys} standby{'s' if standbys > 1 else ''}"
    if standbys and not synchronous:
        return [f"{has}, and no commit waits for one"]
    if standbys and level in ("local", "off"):
        return [f"{has}, and synchronous_commit is {level}"]
    return []


@rule(
    "server-version",
    "error",
    "the server is of a version that is supported",
    "the ledger's functions are tested from PostgreSQL 14 on",
    "upgrade the server to PostgreSQL 14 or later",
)
@of_postgresql
def _version(facts: Facts) -> list[Seen]:
    version = facts.store.version
    if version is None or version >= OLDEST_SERVER:
        return []
    return [f"the server is PostgreSQL {version // 10_000}"]


@rule(
    "statement-timeout",
    "warning",
    "the server lets statements wait as long as budget_lock_seconds",
    "a statement that waits for a lock is broken off before that, and fails as if the server did",
    "set statement_timeout (transaction_timeout) for this role above budget_lock_seconds, or to 0",
)
@of_postgresql
def _timeouts(facts: Facts) -> Iterator[Seen]:
    for name in ("statement_timeout", "transaction_timeout"):
        milliseconds = int(facts.store.settings.get(name) or 0)
        if 0 < milliseconds <= facts.lock_seconds * 1000:
            yield (
                f"{name} is {milliseconds} ms, and budget_lock_seconds is {facts.lock_seconds:g}"
            )


@rule(
    "clock",
    "warning",
    "this host's clock is the database's",
    "countdowns, expiry and deadlines are worked out by the clocks of callers and workers; leases "
    "and windows by that of the database",
    "keep the clocks of all hosts in step by NTP",
)
@of_store
def _clock(facts: Facts) -> Iterator[Seen]:
    store = facts.store
    if store.clock_seconds is not None:
        yield from off("the database's clock", store.clock_seconds, store.round_trip_seconds)


@rule(
    "time-zones",
    "error",
    "this host knows the time zones of all budgets",
    "no window can be made for such a budget by this host, and nothing be admitted to it",
    "install the system's time zones, or the package tzdata",
)
@of_tables
def _zones(facts: Facts) -> list[Seen]:
    missing = facts.store.zones_missing
    return [f"time zones that this host does not know: {named(missing)}"] if missing else []


@rule(
    "relay",
    "warning",
    "a relay runs",
    "nothing that is admitted is published without a relay",
    "start one: 'celery -A PROJ budget relay', 'celery -A PROJ beat -S budget' or 'celery -A PROJ "
    "worker --budget-relay'",
)
@of_tables
def _relay(facts: Facts) -> Iterator[Seen]:
    overdue = facts.store.overdue_seconds
    if not any(relay.seconds <= RELAY_SECONDS for relay in facts.store.relays):
        if overdue > RELAY_SECONDS:
            yield "error", f"no relay was seen, and a message has been due for {overdue:,.0f} s"
        else:
            yield f"no relay was seen in the last {RELAY_SECONDS:g} s"
    elif overdue > OVERDUE_SECONDS:
        yield f"a relay runs, and a message has been due for {overdue:,.0f} s"
