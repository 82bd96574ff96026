"""The application in a process to which something may happen, as ``CRASH_CONF`` says."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.crash.entry import CONF
from tests.crash.faults import Trap
from tests.crash.points import Fault
from tests.crash.tasks import make_app

_given = json.loads(os.environ[CONF])
trap = Trap(_given["role"], Path(_given["folder"]), [Fault(**one) for one in _given["faults"]])
trap.arm()
app = make_app(_given["conf"], trap)
