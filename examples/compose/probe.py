"""Ask an address whether it is well, for health checks: ``python -m examples.compose.probe URL``.

The exit status is 0 where it answers with success. The dashboard's token is sent if there is one.
"""

from __future__ import annotations

import os
import sys
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

SECONDS = 8.0


def main(url: str) -> int:
    """Ask once; return the exit status."""
    token = os.environ.get("CELERY_BUDGET_DASHBOARD_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        # No proxy: what is asked is in the same container.
        build_opener(ProxyHandler({})).open(Request(url, headers=headers), timeout=SECONDS).close()  # noqa: S310
    except (URLError, OSError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
