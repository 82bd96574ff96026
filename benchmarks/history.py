"""What everything costs on top of a long history, beside a short one."""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.histories import History, fill, filling
from benchmarks.measure import Comparison, Effort, Side, Target, compare
from benchmarks.operations import OPERATIONS, Operations, make_ledger, open_ledger
from benchmarks.servers import Servers
from tests.services.postgres import PostgresServer

__all__ = ["SETTINGS", "run"]

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
    short, long = (
        Operations(servers.enter_context(open_ledger(url)), TENANTS) for url in urls
    )
    sides = []
    for name, told in OPERATIONS.items():
        base = f"{told}, after {SHORT:,}"
        sides += [
            Side(base, getattr(short, name)),
            Side(f"{told}, after {sizes[1]:,}", getattr(long, name), (Target(base, at_most=MOST),)),
        ]
    return compare(
        "history",
        f"each operation with {sizes[1]:,} settled requests in the store, and with {SHORT:,}",
        "us",
        "a block of each operation on both, on one PostgreSQL with fsync.\n"
        f"{TENANTS} tenants, 60 days, each with line, attempt, usage, journal and tallies.",
        sides,
        replace(effort, seconds=max(effort.seconds, SECONDS)),
    )
