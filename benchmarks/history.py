"""What everything costs on top of a long history, beside a short one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.histories import History, fill, filling
from benchmarks.measure import Comparison, Effort, Side, Target, compare
from benchmarks.operations import OPERATIONS, Operations, make_ledger, open_ledger
from benchmarks.servers import Servers
from tests.contract.support import Ledger
from tests.services.postgres import PostgresServer

__all__ = ["SETTINGS", "on", "run"]

SHORT, LONG = 10_000, 10_000_000
TENANTS = 100
#: What anything may cost more on top of the long one.
MOST = 1.2
#: A server with memory for the pages that are worked on; the rest is in the system's cache.
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "4GB"}
#: So long at the least: a round has a block of each operation on both.
SECONDS = 400.0


def run(servers: Servers, effort: Effort) -> Comparison:
    """Do each operation on a long history and on a short one, in turns."""
    server = servers.enter_context(PostgresServer(settings=SETTINGS))
    sizes = [SHORT, effort.history or LONG]
    urls = [server.create_database() for _ in sizes]
    with filling(server):
        for url, size in zip(urls, sizes, strict=True):
            begin = time.monotonic()
            make_ledger(url, TENANTS)
            with open_ledger(url) as ledger:
                fill(ledger.store, ledger.root, History(size, TENANTS))
            print(f"{size:,} requests written in {time.monotonic() - begin:.0f} s", flush=True)
    ledgers = [servers.enter_context(open_ledger(url)) for url in urls]
    return on(ledgers[0], ledgers[1], sizes, effort)


def on(short: Ledger, long: Ledger, sizes: Sequence[int], effort: Effort) -> Comparison:
    """Do each operation on two ledgers in turns."""
    base_of, name_of = (Operations(ledger, TENANTS) for ledger in (short, long))
    sides = []
    for name, told in OPERATIONS.items():
        base = f"{told}, {sizes[0]:,}"
        against = (Target(base, at_most=MOST),)
        sides.append(Side(base, getattr(base_of, name)))
        sides.append(Side(f"{told}, {sizes[1]:,}", getattr(name_of, name), against))
    return compare(
        "history",
        f"each operation with {sizes[1]:,} settled requests in the store, and with {sizes[0]:,}",
        "us",
        "a block of each operation on both, on one PostgreSQL with fsync.\n"
        f"{TENANTS} tenants, 60 days, each with line, attempt, usage, journal and tallies.",
        sides,
        replace(effort, seconds=max(effort.seconds, SECONDS)),
    )
