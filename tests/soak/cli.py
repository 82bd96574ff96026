"""``python -m tests.soak``: a soak of any size, its report, and a verdict with an exit status."""

from __future__ import annotations

import argparse
import sys

from tests.soak.run import Soak
from tests.soak.verdict import Verdict

__all__ = ["main", "told"]


def main() -> int:
    """Run a soak; 1 where something did not end as it was planned."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200, help="how many jobs, at least 20")
    parser.add_argument("--seed", type=int, default=1, help="chooses weights, ends and trouble")
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--workers", type=int, default=2, help="with two processes each")
    parser.add_argument("--stripes", type=int, default=1, help="rows that each budget has")
    given = parser.parse_args()
    if given.jobs < 20 or given.workers < 1:
        parser.error("give --jobs at least 20 and --workers at least 1")
    with Soak(given.jobs, given.seed, given.broker, given.workers, given.stripes) as soaked:
        soaked.run()
        verdict = soaked.judge()
    sys.stdout.write(told(verdict, given.jobs, given.seed) + "\n")
    return int(bool(verdict.problems))


def told(verdict: Verdict, jobs: int, seed: int) -> str:
    """Return a verdict in words."""
    most, limits = verdict.lane
    said = [
        f"{jobs} jobs, seed {seed}, {verdict.seconds:.1f} s",
        f"ended: {_counted(verdict.ended)}",
        f"trouble: {_counted(verdict.trouble)}",
        f"lane: at most {most.jobs} of {limits.jobs} jobs, {most.units} of {limits.units} units",
        "",
        f"{'stage':<10}{'jobs':>8}{'estimated':>14}{'actual':>14}{'drift':>8}",
    ]
    for one in verdict.drift:
        ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
        said.append(
            f"{one.stage:<10}{one.requests:>8}{one.estimated:>14}{one.actual:>14}{ratio:>8}"
        )
    said += ["", f"{'tenant':<16}{'jobs':>8}{'p50 wait':>10}{'p95':>9}{'longest':>10}  refused"]
    for owner, waits in verdict.waits.items():
        refused = verdict.refusals.get(owner.partition(":")[2], {})
        said.append(
            f"{owner:<16}{waits.requests:>8}{waits.p50:>9.2f}s{waits.p95:>8.2f}s"
            f"{waits.longest:>9.2f}s  {_counted(refused) or '-'}"
        )
    said.append("")
    said += [f"WRONG  {problem}" for problem in verdict.problems]
    said.append("all ended as planned" if not verdict.problems else "not all ended as planned")
    return "\n".join(said)


def _counted(counts: object) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(dict(counts).items()))  # type: ignore[call-overload]
