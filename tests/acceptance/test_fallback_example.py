"""The example of lanes with and without a price, as it is run by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cluster import WAIT

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fallback" / "ask.py"


def test_the_example_keeps_to_its_stops_and_uses_its_way_out() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=3 * WAIT
    )
    assert (done.returncode, done.stderr) == (0, "")
    # 7 of 100 keep to eighty per cent of 950, 4 to that of 500; the hard one goes above it.
    assert done.stdout.splitlines() == [
        "refused: easy: what is 10 + 1? (paid has 100 left)",
        "admitted in lane free: 7",
        "admitted in lane paid: 4",
        "1 x free, then paid: a good answer",
        "6 x free: an answer",
        "4 x paid: an answer",
        "free: 340 of 950 tokens spent",
        "paid: 220 of 500 tokens spent",
        "the ledger adds up",
    ]
