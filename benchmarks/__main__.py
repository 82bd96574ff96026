"""``python -m benchmarks``: run them, print a table for each, keep the figures as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks import (
    backlogs,
    caller,
    growth,
    history,
    hot,
    relaying,
    reporting,
    starting,
    waking,
    working,
)
from benchmarks.measure import Comparison, Effort
from benchmarks.peers import comparing
from benchmarks.servers import Servers
from tests.services.base import ServiceUnavailable

#: What ``make bench`` runs.
SHORT = {
    "caller": caller.run,
    "group": caller.run_group,
    "hot": hot.run,
    "latency": starting.run,
    "peers-call": comparing.calls,
    "peers-hold": comparing.holds,
    "peers-relay": comparing.relays,
    "relay": relaying.run,
    "wakeup": waking.run,
    "worker": working.run,
}
#: What ``make bench-long`` runs: histories and backlogs.
LONG = {
    "backlog": backlogs.run,
    "relay-long": relaying.run_long,
    "report": reporting.run,
    "history": history.run,
    "growth": growth.run,
}
BENCHMARKS = {**SHORT, **LONG}
#: Every figure of the last run, with what it was to be.
LATEST = Path(__file__).parent / "results" / "latest.json"
PACKAGES = ("celery-budget", "celery", "kombu", "SQLAlchemy", "psycopg", "redis")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 where a target was missed or a server could not be had."""
    options = _parser().parse_args(arguments)
    names = options.only or list(LONG if options.long else SHORT)
    effort = Effort(options.rounds, options.seconds, options.history)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(f"{platform.platform()}, {cores} cores, load {load:.2f} at the start", flush=True)
    if load > cores / 2:
        print(
            "The machine is busy: trust the ratios and their spread, not the medians.", flush=True
        )
    found: list[Comparison] = []
    missing = False
    for name in names:
        begin = time.monotonic()
        try:
            with Servers() as servers:
                comparison = BENCHMARKS[name](servers, effort)
        except ServiceUnavailable as error:
            missing = True
            print(f"\n{name}: skipped: {error}", file=sys.stderr)
            continue
        found.append(comparison)
        print(f"\n{comparison.as_text()}\n\n  took {time.monotonic() - begin:.0f} s", flush=True)
        _keep(comparison, first=len(found) == 1)
    missed = [check.name for one in found for check in one.checks if not check.ok]
    for name_of in missed:
        print(f"missed: {name_of}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(_document(load, found), indent=2) + "\n")
    return int(missing or bool(missed))


def _keep(comparison: Comparison, *, first: bool) -> None:
    """Append a benchmark's figures to those of this run."""
    LATEST.parent.mkdir(exist_ok=True)
    kept = [] if first else json.loads(LATEST.read_text())
    kept += [asdict(check) for check in comparison.checks]
    LATEST.write_text(json.dumps(kept, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=[*BENCHMARKS], help="run this one; may be repeated"
    )
    parser.add_argument(
        "--long", action="store_true", help="run those with long histories and backlogs instead"
    )
    parser.add_argument(
        "--rounds", type=_positive, default=10, help="blocks of each side (default: 10)"
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=40,
        help="no new round of a benchmark after so many (default: 40)",
    )
    parser.add_argument(
        "--history",
        type=_positive,
        metavar="N",
        help="let the longest history, or backlog, be of so many requests (default: 10,000,000, or "
        "1,000,000)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return number


def _document(load: float, found: list[Comparison]) -> dict[str, object]:
    return {
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "load_before": load,
            "load_after": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "benchmarks": [comparison.as_dict() for comparison in found],
    }


if __name__ == "__main__":
    sys.exit(main())
