"""The spool's files: on disk before they count, and held by whoever waits with them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from celery_budget import spool as module
from celery_budget.core.reservations import Again, Outcome
from celery_budget.core.retries import FAILED, Keep
from celery_budget.core.usage import Used
from celery_budget.spool import ASIDE, Ended, Entry, Lost, Patience, Spool, Usage
from tests.messages import Told

RESERVATION = uuid.UUID(int=1)
CLAIM = uuid.UUID(int=2)
BOOT = uuid.UUID(int=3)

USED = Usage("r", RESERVATION, 1, "key:reply", Used({None: 5}))
ENDED = Ended("r", RESERVATION, 1, CLAIM, Outcome("returned", '"done"'), "task", BOOT)
GONE = Lost("r", RESERVATION, "task", "w@host/17", BOOT, may_rerun=False)

ENTRIES: list[Entry] = [
    USED,
    Usage(
        "r",
        RESERVATION,
        2,
        "key:\u00fc",
        Used({"tokens": 0, "micro-usd": 2**63 - 1, None: 1}, True, ("tokens",), '{"a": 1}'),
    ),
    ENDED,
    Ended("r", RESERVATION, 1, CLAIM, Outcome("raised", "\ud800\x00", None, None), "t", BOOT),
    Ended("r", RESERVATION, 1, CLAIM, Outcome("rejected", again=Again(10, 5, 7)), "t", BOOT),
    Ended("r", RESERVATION, 1, CLAIM, Outcome("raised", keep=Keep(FAILED, "no", 9)), "t", BOOT),
    GONE,
    Lost("r", None, "task", "w@host/17", BOOT, may_rerun=True),
]


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", "ledger")


def put(spool: Spool, *entries: Entry) -> None:
    """Leave entries to whoever replays them."""
    for entry in entries:
        held = spool.put(entry)
        assert held is not None
        held.release()


def taken(spool: Spool, drop: bool = False) -> list[Entry]:
    """The entries that nobody holds, left there unless dropped."""
    found = []
    for entry, held in spool.take():
        found.append(entry)
        if drop:
            held.drop()
        else:
            held.release()
    return found


def files(spool: Spool) -> list[str]:
    return sorted(path.name for path in spool.folder.iterdir())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_an_entry_comes_back_as_it_was(spool: Spool, entry: Entry) -> None:
    put(spool, entry)
    assert taken(spool) == [entry]
    assert taken(spool, drop=True) == [entry]
    assert taken(spool) == []
    assert files(spool) == []


def test_no_folder_is_made_before_it_is_needed(spool: Spool) -> None:
    assert taken(spool) == []
    assert not spool.folder.parent.exists()


def test_usage_before_ends_and_what_is_lost_for_good_before_its_end(spool: Spool) -> None:
    again = Lost("r", RESERVATION, "task", "w@host/17", BOOT, may_rerun=True)
    put(spool, again, ENDED, GONE, USED)
    assert taken(spool) == [USED, GONE, ENDED, again]


def test_the_same_entry_is_the_same_file(spool: Spool) -> None:
    put(spool, USED, USED, ENDED, USED)
    assert len(files(spool)) == 2


def test_two_ledgers_do_not_mix(tmp_path: Path) -> None:
    one, other = Spool(tmp_path, "one"), Spool(tmp_path, "other")
    put(one, USED)
    assert taken(other) == []
    assert taken(one) == [USED]


def test_they_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        spool = Spool(tmp_path / "spool", "ledger")
        put(spool, USED)
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (spool.folder.parent, spool.folder)]
    assert modes == [0o700, 0o700]
    assert [path.stat().st_mode & 0o777 for path in spool.folder.iterdir()] == [0o600]


def test_the_file_is_on_disk_before_it_has_its_name_and_the_name_after(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name[:1]}")

    def renamed(path: Path, target: Path) -> Path:
        # Held before anybody can see it.
        assert _is_locked(path)
        done.append("rename")
        return rename(path, target)

    put(spool, GONE)
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    put(spool, USED)
    assert done == ["flush .", "rename", f"flush {spool.folder.name[0]}"]


def _is_locked(path: Path) -> bool:
    """Whether another process finds a file locked."""
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1])\n"
        "try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: sys.exit(1)\n"
    )
    return subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 1


def test_what_a_living_process_holds_is_left_to_it(spool: Spool) -> None:
    held = spool.put(USED)
    assert held is not None
    put(spool, ENDED)
    assert taken(spool) == [ENDED]
    held.release()
    assert taken(spool) == [USED, ENDED]


def test_what_a_process_held_that_was_killed_is_replayed(spool: Spool, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from tests.unit.test_spool import Spool, USED\n"
        "held = Spool(sys.argv[1], 'ledger').put(USED)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "spool")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert taken(spool) == []
    process.kill()
    process.communicate()
    assert taken(spool) == [USED]


def test_a_child_that_was_forked_meanwhile_does_not_keep_it(spool: Spool) -> None:
    held = spool.put(USED)
    assert held is not None
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        held.release()
        assert taken(spool) == [USED]
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_two_who_replay_share_the_entries(spool: Spool) -> None:
    put(spool, *ENTRIES)
    one, other = spool.take(), Spool(spool.folder.parent, "ledger").take()
    first, held = next(one)
    rest = []
    for entry, other_held in other:
        rest.append(entry)
        other_held.drop()
    held.drop()
    # What the other has deleted since is not found any more.
    assert list(one) == []
    assert len(rest) == len(ENTRIES) - 1
    assert first not in rest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"version": 1, "kind": "usage"}',
        b'{"version": 1, "kind": "other"}',
        b'{"version": 2, "kind": "lost"}',
        b"[" * 100_000,
    ],
    ids=["empty", "torn", "binary", "list", "fields", "kind", "version", "deep"],
)
def test_a_broken_file_is_moved_aside_and_told_once(
    spool: Spool, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    put(spool, USED, GONE)
    name = f"1-{'0' * 32}.json"
    (spool.folder / name).write_bytes(content)
    for _ in range(2):
        assert taken(spool) == [USED, GONE]
    assert name + ASIDE in files(spool)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert (spool.folder / (name + ASIDE)).read_bytes() == content


def test_an_entry_whose_content_was_changed_is_moved_aside(spool: Spool, told: Told) -> None:
    put(spool, USED)
    (path,) = spool.folder.iterdir()
    changed = json.loads(path.read_bytes())
    changed["attempt"] = 2
    path.write_text(json.dumps(changed))
    assert taken(spool) == []
    assert files(spool) == [path.name + ASIDE]
    assert [one["path"] for one in told("spool.invalid")] == [str(path)]


def test_other_files_and_links_are_left_alone(spool: Spool, tmp_path: Path) -> None:
    put(spool, USED)
    (path,) = spool.folder.iterdir()
    (spool.folder / "README").write_text("mine")
    (spool.folder / f"1-{'f' * 32}.json").symlink_to(path)
    (spool.folder / f"2-{'f' * 32}.json").mkdir()
    before = files(spool)
    assert taken(spool) == [USED]
    assert files(spool) == before


@pytest.mark.parametrize("how", ["file", "full", "rename"])
def test_what_cannot_be_written_is_told_once_and_leaves_nothing(
    spool: Spool, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if how == "file":
        spool.folder.parent.write_text("in its place")
    elif how == "full":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "rename", fail)
    opened = len(os.listdir("/proc/self/fd"))
    assert spool.put(USED) is None
    assert spool.put(ENDED) is None
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert len(os.listdir("/proc/self/fd")) == opened
    if how != "file":
        assert files(spool) == []
    # Once it can be written again, the next fault is told again.
    monkeypatch.undo()
    if how == "file":
        spool.folder.parent.unlink()
    put(spool, USED)
    monkeypatch.setattr(os, "fsync", fail)
    assert spool.put(ENDED) is None
    assert len(caplog.records) == 2


class Interrupted(BaseException):
    """A signal's handler."""


def test_an_interrupted_write_leaves_nothing_and_no_lock(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> Any:
        raise Interrupted

    put(spool, GONE)
    opened = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interrupt)
        with pytest.raises(Interrupted):
            spool.put(USED)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert taken(spool) == [GONE]
    assert len(files(spool)) == 1


def test_patience_keeps_first_and_ends_after_some_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    stop, kept, cut = threading.Event(), [], []

    def keep() -> bool:
        kept.append(1)
        return True

    stop.set()
    patience = Patience(stop, keep, lambda: cut.append(1))
    tries = 1
    while not patience.wait(0.01):
        assert kept
        assert not patience.over
        tries += 1
    assert tries == module.FIRST_TRIES
    assert patience.over
    assert cut == [1]


def test_patience_is_endless_without_a_stop_or_what_it_has_to_tell_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    stop = threading.Event()
    stop.set()
    for patience in (Patience(None), Patience(stop, lambda: False)):
        assert not any(patience.wait(0.01) for _ in range(100))
        assert not patience.over


def test_an_entry_that_cannot_be_read_is_told_once_and_stays(spool: Spool, told: Told) -> None:
    put(spool, USED)
    path = spool.folder / f"1-{'0' * 32}.json"
    path.mkdir()
    for _ in range(2):
        assert taken(spool) == [USED]
    assert [one["path"] for one in told("spool.unreadable")] == [str(path)]
    assert path.is_dir()
