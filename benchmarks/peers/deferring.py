"""procrastinate, in its own environment: a job deferred to its queue."""

from __future__ import annotations

import json
import sys
import time

from procrastinate import App, SyncPsycopgConnector

CONF = json.loads(sys.argv[1])

app = App(connector=SyncPsycopgConnector(conninfo=CONF["conninfo"]))


@app.task(name="bench.plain")
def plain(size: int, tenant: str) -> None:
    pass


with app.open():
    app.schema_manager.apply_schema()
    for _ in sys.stdin:
        samples = []
        for _ in range(CONF["calls"]):
            begin = time.perf_counter_ns()
            plain.defer(size=5, tenant="bench")
            samples.append((time.perf_counter_ns() - begin) / 1000)
        print(json.dumps(samples), flush=True)
