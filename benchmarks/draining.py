"""A relay in a process of its own: each line that it is told has it empty the outbox.

It says how much that was. Its application is that of ``BENCH_CONF``.
"""

from __future__ import annotations

import sys

from benchmarks.application import app
from benchmarks.relaying import drain
from celery_budget.integration.publisher import KombuPublisher


def main() -> None:
    """Go on until the line that says so."""
    publisher = KombuPublisher(app)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        print(drain(app, publisher), flush=True)
    publisher.reset()


if __name__ == "__main__":
    main()
