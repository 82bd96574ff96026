"""``budget report``: what it is asked for, in which form, and where that goes."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from celery_budget.cli import files, progress
from celery_budget.cli.progress import Waiting
from tests.contract.support import RETURNED, Ledger
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

MONTH_US = 1_893_456_000_000_000
DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def use(shop: Shop) -> Shop:
    """Have one request of a shop use 4 of 10 tokens, and reserve another."""
    ledger = Ledger(shop.budget.store, shop.budget.settings)
    shop.budget.set("tenant:a", limit=100)
    _, attempt = ledger.start(10, budget="tenant:a", request_id="order-1")
    attempt.record(4)
    attempt.end(RETURNED)
    attempt.close()
    ledger.reserve(7, budget="tenant:a")
    return shop


@pytest.fixture
def used(shop: Shop) -> Shop:
    """A shop in which something was used."""
    return use(shop)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with nothing in it."""
    made = tmp_path / "folder"
    made.mkdir()
    return made


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")


# What it is asked for.


@pytest.mark.parametrize(
    ("written", "since_us"),
    [
        ("2020-02-29", 1_582_934_400_000_000),
        ("2020-02-29T00:00:00Z", 1_582_934_400_000_000),
        ("2020-02-29T01:30:00+01:00", 1_582_936_200_000_000),
    ],
)
def test_since_is_a_day_or_an_instant(used: Shop, run: Run, written: str, since_us: int) -> None:
    found = run(used.app, "report", "--json", "--since", written, "--until", "1h").json
    assert found["since_us"] == since_us
    assert found["counts"]["admitted"] == 0
    found = run(used.app, "report", "--json", "--since", written).json
    assert (found["until_us"], found["counts"]["admitted"]) == (None, 2)


def test_since_and_until_are_a_time_before_now(used: Shop, run: Run) -> None:
    before = time.time_ns() // 1000
    found = run(used.app, "report", "--json", "--since", "7d", "--until", "12h").json
    after = time.time_ns() // 1000
    # SQLite's clock tells milliseconds.
    assert before - 1000 <= found["since_us"] + 7 * DAY_US <= after
    assert found["until_us"] - found["since_us"] == 7 * DAY_US - 12 * HOUR_US


@pytest.mark.parametrize("option", ["--since", "--until"])
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("yesterday", "is no time; give a time before now (7d, 12h), a day (2030-01-31"),
        ("7", "is no time"),
        ("2030-01-31T12:00:00", "is no time"),
        ("2030-02-30", "there is no day '2030-02-30'"),
        ("", "is no time"),
    ],
)
def test_what_is_no_time_is_wrong_use(
    shop: Shop, run: Run, option: str, written: str, said: str
) -> None:
    assert run(shop.app, "report", option, written).failed(2, said)


def test_a_period_without_time_is_refused(shop: Shop, run: Run) -> None:
    done = run(shop.app, "report", "--since", "1d", "--until", "2d")
    assert done.failed(2, "the period begins at")


def test_only_one_budget_or_stage(used: Shop, run: Run) -> None:
    used.budget.set("other", limit=5, unit="tokens")
    found = run(used.app, "report", "--json", "--budget", "other").json
    assert ([one["budget"] for one in found["budgets"]], found["counts"]["admitted"]) == (
        ["other"],
        0,
    )
    assert run(used.app, "report", "--json", "--stage", "draft").json["counts"]["admitted"] == 2
    assert run(used.app, "report", "--json", "--stage", "x").json["counts"]["admitted"] == 0
    assert run(used.app, "report", "--budget", "nobody").failed(1, "no budget named 'nobody'")
    assert "Requests of stage draft" in run(used.app, "report", "--stage", "draft").out


@pytest.mark.parametrize(
    ("by", "key"),
    [
        ("tenant", "tenant:a"),
        ("stage", "draft"),
        ("task", "shop.draft"),
        ("estimator", "constant:1"),
    ],
)
def test_groups(used: Shop, run: Run, by: str, key: str) -> None:
    [group] = run(used.app, "report", "--json", "--by", by).json["groups"]
    assert group["key"] == key
    assert (group["counts"]["admitted"], group["amounts"][0]["charged"]) == (2, 4)
    done = run(used.app, "report", "--by", by)
    assert f"Requests by {by}" in done.out
    assert any(row[:2] == [key, "2"] for row in done.rows)


def test_another_grouping_is_wrong_use(shop: Shop, run: Run) -> None:
    assert run(shop.app, "report", "--by", "moon").failed(2, "'--by': 'moon' is not one of")


# Its forms.


def test_csv_of_a_real_ledger(on_both: Shop, run: Run) -> None:
    used = use(on_both)
    out = run(used.app, "report", "--format", "csv").out
    [row] = csv.DictReader(io.StringIO(out, newline=""))
    assert (row["budget"], row["charged"], row["balance_limit"]) == ("tenant:a", "4", "100")
    assert (row["admitted"], row["balance_reserved"], row["waits_measured"]) == ("2", "7", "1")
    [row] = csv.DictReader(io.StringIO(run(used.app, "report", "--format=csv", "--by=day").out))
    assert (row["by"], row["budget"], row["charged"], row["admitted"]) == (
        "day", "tenant:a", "4", "2",
    )  # fmt: skip


def test_html_of_a_real_ledger_when_piped(on_both: Shop, run: Run) -> None:
    used = use(on_both)
    out = run(used.app, "report", "--format", "html", "--by", "stage").out
    assert out.startswith("<!doctype html>")
    assert "4 of 100 tokens spent, 7 held" in out
    assert "Requests by stage" in out


def test_html_is_not_for_a_terminal(
    shop: Shop, run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    at_terminal(monkeypatch)
    done = run(shop.app, "report", "--format", "html")
    assert done.failed(2, "add '--output report.html', or pipe it on")
    assert run(shop.app, "report", "--format", "html", "--output", "-").out.startswith("<!doctype")
    page = str(folder / "r.html")
    assert run(shop.app, "report", "--format", "html", "--output", page).code == 0


def test_json_has_a_short_form(used: Shop, run: Run) -> None:
    short, long = (
        run(used.app, "report", *form).json for form in (["--json"], ["--format", "json"])
    )
    assert short["counts"] == long["counts"]
    done = run(used.app, "report", "--json", "--format", "csv")
    assert done.failed(2, "give --json or --format csv, not both")
    assert run(used.app, "report", "--json", "--format", "json").json["counts"] == short["counts"]


def test_the_table_fits_a_terminal_and_is_plain_in_a_pipe(
    used: Shop, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = run(used.app, "report", "--by", "tenant").out
    assert "\x1b" not in piped
    monkeypatch.setenv("TERM", "xterm")
    at_terminal(monkeypatch)
    assert "\x1b[" in run(used.app, "report").out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run(used.app, "report", "--by", "tenant").out
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 80


# Where it goes.


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("r.html", "<!doctype html>"),
        ("r.HTM", "<!doctype html>"),
        ("r.json", "{"),
        ("r.csv", "by,group,budget,"),
        ("r.txt", "Budgets\n"),
        ("r", "Budgets\n"),
    ],
)
def test_the_ending_of_a_file_says_its_form(
    used: Shop, run: Run, folder: Path, name: str, begins: str
) -> None:
    done = run(used.app, "report", "--output", str(folder / name))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert (folder / name).read_text("utf-8").startswith(begins)
    assert [one.name for one in folder.iterdir()] == [name]


def test_a_form_that_is_given_counts_more_than_an_ending(
    used: Shop, run: Run, folder: Path
) -> None:
    run(used.app, "report", "--format", "json", "--output", str(folder / "r.html"))
    assert json.loads((folder / "r.html").read_text())["counts"]["admitted"] == 2


def test_a_file_is_replaced_whole_and_keeps_its_mode_and_its_link(
    used: Shop, run: Run, folder: Path
) -> None:
    real, link = folder / "real.csv", folder / "r.csv"
    real.write_text("old" * 100_000)
    real.chmod(0o640)
    link.symlink_to(real)
    with real.open() as reader:
        assert run(used.app, "report", "--output", str(link)).code == 0
        # Who has begun to read the old one gets all of it.
        assert reader.read() == "old" * 100_000
    assert link.is_symlink()
    assert real.read_bytes().startswith(b"by,group,")
    assert b"old" not in real.read_bytes()
    assert real.stat().st_mode & 0o777 == 0o640


def test_a_folder_that_is_not_there_is_said(shop: Shop, run: Run, folder: Path) -> None:
    target = folder / "none" / "r.html"
    done = run(shop.app, "report", "--output", str(target))
    assert done.failed(1, f"cannot be written: there is no folder {folder / 'none'}; make it")
    assert not target.parent.exists()
    done = run(shop.app, "report", "--output", str(folder))
    assert done.failed(1, "is a folder; give the name of a file in it")


def test_a_write_that_fails_leaves_what_was_there(
    shop: Shop, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (folder / "r.csv").write_text("old")
    monkeypatch.setattr(files.os, "fsync", full)
    done = run(shop.app, "report", "--output", str(folder / "r.csv"))
    assert done.failed(1, "r.csv cannot be written: No space left on device")
    assert [one.read_text() for one in folder.iterdir()] == ["old"]


def test_what_is_no_file_is_written_to(shop: Shop, run: Run, folder: Path) -> None:
    pipe = folder / "pipe.json"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert run(shop.app, "report", "--output", str(pipe)).code == 0
    reader.join()
    assert json.loads(read[0])["counts"]["admitted"] == 0
    assert pipe.is_fifo()


def test_what_takes_long_is_shown_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, stopped = threading.Event(), threading.Event()

    class Status:
        start, stop = shown.set, stopped.set

    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress.Console, "status", lambda self, doing: Status)
    with Waiting("gathering"):
        assert not shown.is_set()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Waiting("gathering"):
        assert shown.wait(30)
    assert stopped.is_set()
