"""Commands that say which budgets there are: set, apply, export, list, show, close."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_budget.cli.declare import _encodable
from celery_budget.core.budgets import Share
from tests.contract.support import RETURNED, Ledger
from tests.integration.commands import Run, runner
from tests.integration.support import Shop

BIG = 2**63 - 1
ODD = [
    "-x",
    "--limit",
    "a b",
    "[red]x[/red]",
    "naïve",
    "日本",
    'it\'s "x"',
    "c:\\x",
    "%s{}",
    "é" * 255,
]

FILE = """
[[budget]]
name = "org"
unit = "tokens"
limit = 9_223_372_036_854_775_807

[[budget]]
name = "org/acme"
parent = "org"
limit = "12.5%"
period = "month"
timezone = "Europe/Berlin"
anchor_day = 31
soft_stop = 0.8

[[budget]]
name = "tenant:*"
parent = "org"
limit = 50
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "budgets.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def ledger_of(shop: Shop) -> Ledger:
    return Ledger(shop.budget.store, shop.budget.settings)


def declared(shop: Shop, name: str) -> Any:
    return shop.budget.standing(name).budget


# set


def test_set_takes_every_term_and_keeps_what_is_not_given(shop: Shop, run: Run) -> None:
    assert run(shop.app, "set", "org", "--limit", "1000", "--unit", "tokens").code == 0
    terms = "--parent org --limit 10% --period month --timezone Europe/Berlin --anchor-day 31"
    stops = "--soft-stop 0.8 --hard-stop 0.95"
    done = run(shop.app, "set", "org/acme", *terms.split(), *stops.split())
    assert (done.code, done.err) == (0, "")
    assert done.facts["limit"].strip() == "100 (10% of 'org')"
    assert done.facts["period"].strip() == "month in Europe/Berlin, from day 31"
    before = declared(shop, "org/acme")
    assert (before.limit, before.unit, before.parent) == (Share(100_000), "tokens", "org")
    assert (before.period.timezone, before.period.anchor_day) == ("Europe/Berlin", 31)
    assert (before.soft_stop, before.hard_stop) == (800_000, 950_000)
    assert "weight" not in done.facts
    done = run(shop.app, "set", "org/acme", "--weight", "0")
    assert done.facts["weight"].strip() == "0, goes last"
    done = run(shop.app, "set", "org/acme", "--soft-stop", "0.5", "--json")
    assert done.json["declared"] == {
        "name": "org/acme", "unit": "tokens", "limit": "10%", "parent": "org", "period": "month",
        "timezone": "Europe/Berlin", "anchor_day": 31, "soft_stop": 0.5, "hard_stop": 0.95,
        "stripes": None, "weight": 0, "alert_at": None,
    }  # fmt: skip
    assert run(shop.app, "set", "org/acme", "--limit", "7", "--parent", "none").code == 0
    assert declared(shop, "org/acme").parent is None
    assert declared(shop, "org/acme").period == before.period


def test_set_makes_a_template_and_changes_it(shop: Shop, run: Run) -> None:
    done = run(shop.app, "set", "user:*", "--limit", "50", "--unit", "tokens")
    assert done.code == 0
    assert done.facts["template"].strip() == "user:*"
    assert run(shop.app, "set", "user:*", "--limit", "60").code == 0
    ledger_of(shop).reserve(60, budget="user:7")
    assert shop.budget.balance("user:7").reserved == 60
    assert run(shop.app, "show", "user:7", "--json").json["template"] == "user:*"
    assert run(shop.app, "show", "user:*", "--json").json["made"] == 1


@pytest.mark.parametrize("name", ODD)
def test_names_are_taken_and_shown_to_the_letter(shop: Shop, run: Run, name: str) -> None:
    assert run(shop.app, "set", "--limit", str(BIG), "--unit", "x", "--", name).code == 0
    assert run(shop.app, "show", "--json", "--", name).json["budget"] == name
    assert name in run(shop.app, "list").out
    found = run(shop.app, "export", "--json").json["budgets"]
    assert {one["name"] for one in found} == {"tenant:a", name}
    written = run(shop.app, "export").out
    assert run(shop.app, "apply", "-", stdin=written.encode()).out.startswith("nothing to change")
    assert run(shop.app, "grant", "--key", name, "--", name, "1").code == 0
    assert run(shop.app, "close", "--", name).code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--period", "year"], "'year' is not one of 'total', 'minute'"),
        (["--anchor-day", "32"], "32 is not in the range"),
        (["--soft-stop", "1.1"], "'1.1' is not a ratio; give one from 0 to 1"),
        (["--hard-stop", "80%"], "'80%' is not a ratio"),
        (["--hard-stop", "nan"], "'nan' is not a ratio"),
        (["--limit", "101%"], "'101%' is not a limit; give an integer from 0 to 2^63-1"),
        (["--limit", "%"], "'%' is not a limit"),
    ],
)
def test_set_refuses_what_cannot_be_a_term(
    shop: Shop, run: Run, options: list[str], said: str
) -> None:
    before = shop.ledger()
    assert run(shop.app, "set", "tenant:a", *options).failed(2, said)
    assert shop.ledger() == before


@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        (["--timezone", "Berlin"], "there is no time zone 'Berlin'", 2),
        (["--anchor-day", "2"], "the anchor day of the period 'total' is always 1", 2),
        (["--soft-stop", "0.9", "--hard-stop", "0.8"], "is above its hard stop (0.8)", 1),
        (["--limit", "10%"], "is 10% of its parent's, and it has none", 1),
        (["--parent", "nobody"], "the parent 'nobody' of 'tenant:a' does not exist", 1),
        (["--parent", "tenant:a"], "cannot be its own parent", 1),
        (["--unit", "e\u0301"], "is in Unicode form NFC", 2),
    ],
)
def test_set_refuses_what_cannot_be_together(
    shop: Shop, run: Run, options: list[str], said: str, code: int
) -> None:
    before = shop.ledger()
    assert run(shop.app, "set", "tenant:a", *options).failed(code, said)
    assert shop.ledger() == before


def test_an_error_stays_on_one_line(shop: Shop, run: Run) -> None:
    done = run(shop.app, "show", "a\u2028b")
    assert done.failed(1, "create it with 'celery -A PROJ budget set")
    assert "\u2028" not in done.err


# list and show


def test_list_is_a_tree(shop: Shop, run: Run) -> None:
    shop.budget.set("org", limit=1000, unit="tokens")
    shop.budget.set("org/b", parent="org", limit=5, period="hour")
    shop.budget.set("org/a", parent="org", limit=None)
    shop.budget.set("org/a/1", parent="org/a", limit="10%")
    shop.budget.set("user:*", parent="org", limit="10%")
    shop.budget.close("org/b")
    done = run(shop.app, "list")
    budgets = done.out.splitlines()[2 : done.out.splitlines().index("")]
    assert [line.rstrip()[: line.index(" tokens")].rstrip() for line in budgets] == [
        "org",
        "  org/a",
        "    org/a/1",
        "  org/b",
        "tenant:a",
    ]
    assert budgets[3].split() == ["org/b", "tokens", "hour", "5", "0", "0", "5", "closed"]
    assert done.rows[-1] == ["user:*", "tokens", "10%", "org", "0"]
    found = run(shop.app, "list", "--json").json
    assert [(one["budget"], one["parent"], one["state"]) for one in found["budgets"]] == [
        ("org", None, "open"),
        ("org/a", "org", "open"),
        ("org/a/1", "org/a", "open"),
        ("org/b", "org", "closed"),
        ("tenant:a", None, "open"),
    ]
    [template] = found["templates"]
    assert (template["budget"], template["made"]) == ("user:*", 0)
    assert template["declared"]["limit"] == "10%"


def test_show_tells_all_that_decides(on_both: Shop, run: Run) -> None:
    budget = on_both.budget
    budget.set("org", limit=1000, unit="tokens", period="day")
    budget.set("org/a", parent="org", limit="10%", soft_stop=0.5)
    budget.grant("org/a", 20, key="g", reason="launch")
    ledger_of(on_both).reserve(15, budget="org/a")
    budget.adjust("org", 960, reason="by hand")
    done = run(on_both.app, "show", "org/a")
    facts = {name: fact.strip() for name, fact in done.facts.items()}
    assert facts["limit"] == "120 (10% of 'org' and 20 granted)"
    assert facts["soft stop"] == "50%: 60"
    assert facts["new work"] == "25, by 'org'"
    assert ["org", "tokens", "day", "1,000", "15", "960", "25"] in done.rows
    assert ["org/a", "tokens", "120", "15", "0", "105"] in done.rows
    assert done.rows[-1][:3] == ["g", "20", "never"]
    found = run(on_both.app, "show", "org/a", "--json").json
    assert (found["limit"], found["room"], found["room_of"]) == (120, 25, "org")
    assert [(one["budget"], one["spent"]) for one in found["above"]] == [("org", 960)]
    [grant] = found["grants"]
    assert (grant["key"], grant["amount"], grant["until_us"]) == ("g", 20, None)
    assert run(on_both.app, "show", "org").facts["window"].count("T00:00:00.000000Z") == 2


def test_show_tells_that_nothing_is_left(shop: Shop, run: Run) -> None:
    shop.budget.set("off", limit=0, unit="x")
    shop.budget.grant("off", 5)
    facts = run(shop.app, "show", "off").facts
    assert facts["limit"].strip() == "5 (0 and 5 granted), blocks everything"
    assert facts["new work"].strip() == "0"
    shop.budget.set("free", limit=None, unit="x")
    assert run(shop.app, "show", "free").facts["new work"].strip() == "unlimited"
    found = run(shop.app, "show", "free", "--json").json
    assert (found["room"], found["room_of"]) == (None, None)


# apply and export


def test_apply_shows_the_difference_and_makes_it(on_both: Shop, run: Run, file: Path) -> None:
    before = on_both.ledger()
    dry = run(on_both.app, "apply", str(file), "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert dry.rows[2] == ["add", "org", "unit", "tokens"]
    assert dry.rows[3] == ["limit", "9_223_372_036_854_775_807"]
    assert dry.out.splitlines()[-1] == "would be 3 added; nothing was changed (--dry-run)"
    assert on_both.ledger() == before
    done = run(on_both.app, "apply", str(file))
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[:-1] == dry.out.splitlines()[:-1]
    assert done.out.splitlines()[-1] == "3 added"
    assert declared(on_both, "org/acme").limit == Share(125_000)
    again = run(on_both.app, "apply", str(file))
    assert (again.code, again.out) == (0, f"nothing to change: the budgets are as {file} says\n")


def test_apply_in_json_is_exact(shop: Shop, run: Run, file: Path) -> None:
    done = run(shop.app, "apply", str(file), "--dry-run", "--json")
    assert done.json["applied"] is False
    assert f'"limit": {BIG}' in done.out
    done = run(shop.app, "apply", str(file), "--json")
    assert done.json["applied"] is True
    assert [(one["kind"], one["name"]) for one in done.json["changes"]] == [
        ("add", "org"),
        ("add", "org/acme"),
        ("add", "tenant:*"),
    ]
    assert done.json["changes"][0]["before"] is None
    assert done.json["changes"][0]["after"]["limit"] == BIG
    file.write_text(FILE.replace("9_223_372_036_854_775_807", "9007199254740993"))
    [change] = run(shop.app, "apply", str(file), "--json").json["changes"]
    assert (change["kind"], change["changed"]) == ("change", ["limit"])
    assert (change["before"]["limit"], change["after"]["limit"]) == (BIG, 2**53 + 1)
    assert run(shop.app, "apply", str(file), "--json").json == {"applied": True, "changes": []}


def test_apply_reads_the_standard_input(shop: Shop, run: Run) -> None:
    done = run(shop.app, "apply", "-", stdin=b"\xef\xbb\xbf" + FILE.replace("\n", "\r\n").encode())
    assert (done.code, done.err) == (0, "")
    assert run(shop.app, "apply", "-", stdin=b"oops").failed(1, "the standard input is no TOML")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no list of budgets; begin each with [[budget]]"),
        ("[[budget]]\nname = 'x'\nlimt = 5", "there is no key 'limt'; did you mean 'limit'?"),
        (
            "[[budget]]\nname = 'x'\nunit = 't'\nlimit = 1.5",
            "limit is 1.5 (float); give an integer",
        ),
        ("[[budget]]\nname = 'x'\nunit = 't'\nlimit = 9223372036854775808", "from 0 to 2^63-1"),
        ("[[budget]]\nname = 'tenant:a'\nunit = 'x'\nparent = 'no'", "does not exist; create it"),
    ],
)
def test_apply_of_what_cannot_be_changes_nothing(
    shop: Shop, run: Run, file: Path, text: str, said: str
) -> None:
    before = shop.ledger()
    file.write_text(text)
    done = run(shop.app, "apply", str(file), "--json")
    assert done.failed(1, said)
    done = run(shop.app, "apply", str(file))
    assert (done.code, done.err.splitlines()[1:]) == (1, [])
    assert shop.ledger() == before


def test_apply_of_no_file_is_wrong_use(shop: Shop, run: Run, tmp_path: Path) -> None:
    assert run(shop.app, "apply", str(tmp_path / "no.toml")).failed(2, "No such file or directory")
    assert run(shop.app, "apply").failed(2, "Missing argument 'FILE'")
    assert run(shop.app, "apply", "-", stdin=b"\xff").failed(1, "is not in UTF-8, save it so")


def test_apply_refuses_to_orphan_holds(on_both: Shop, run: Run, file: Path) -> None:
    ledger_of(on_both).reserve(10, budget="tenant:a")
    before = on_both.ledger()
    for options in ([], ["--dry-run"]):
        done = run(on_both.app, "apply", str(file), "--prune", *options)
        assert done.code == 1
        assert ["close", "tenant:a"] in done.rows
        assert done.err.startswith("Error: the closing of budget 'tenant:a' has to wait: 1 of its")
        assert "budget close tenant:a --drain'" in done.err
        assert on_both.ledger() == before
        assert run(on_both.app, "apply", str(file), "--prune", "--json", *options).out == ""


def test_apply_prunes_reopens_and_tells(shop: Shop, run: Run, file: Path) -> None:
    run(shop.app, "apply", str(file))
    ledger_of(shop).reserve(5, budget="tenant:b")
    shop.budget.close("org/acme")
    done = run(shop.app, "apply", str(file), "--prune")
    assert done.code == 0
    assert done.out.splitlines()[-1] == "1 reopened, 1 closed"
    states = {one.budget: one.state for one in shop.budget.balances()}
    assert states == {"org": "open", "org/acme": "open", "tenant:a": "closed", "tenant:b": "open"}


def test_export_is_what_apply_takes(on_both: Shop, run: Run, file: Path, tmp_path: Path) -> None:
    run(on_both.app, "apply", str(file))
    ledger_of(on_both).reserve(5, budget="tenant:b")
    written = run(on_both.app, "export")
    assert (written.code, written.err) == (0, "")
    assert "limit = 9_223_372_036_854_775_807" in written.out
    assert "tenant:b" not in written.out
    assert "tenant:b" in run(on_both.app, "export", "--everything").out
    target = tmp_path / "out.toml"
    assert run(on_both.app, "export", "-o", str(target)).out == ""
    assert target.read_text(encoding="utf-8") == written.out
    again = run(on_both.app, "apply", str(target), "--prune")
    assert again.out == f"nothing to change: the budgets are as {target} says\n"
    on_both.budget.close("tenant:a")
    assert "tenant:a" not in run(on_both.app, "export", "--everything").out


def test_export_in_json(shop: Shop, run: Run, file: Path) -> None:
    run(shop.app, "apply", str(file))
    done = run(shop.app, "export", "--json")
    assert f'"limit": {BIG}' in done.out
    found = {one["name"]: one for one in done.json["budgets"]}
    assert set(found) == {"org", "org/acme", "tenant:*", "tenant:a"}
    assert {one["root"] for one in found.values()} == {shop.budget.settings.root}
    assert found["org/acme"]["limit"] == "12.5%"


def test_export_goes_through_a_stream_of_another_encoding(shop: Shop, run: Run) -> None:
    shop.budget.set("naïve 日本 😀", limit=5, unit="x")
    text = run(shop.app, "export").out
    plain = _encodable(text, "ascii")
    assert plain.isascii()
    assert run(shop.app, "apply", "-", stdin=plain.encode()).out.startswith("nothing to change")
    assert _encodable(text, "utf-8") == text


def test_export_without_budgets_writes_no_file(
    make_shop: Callable[..., Shop], run: Run, tmp_path: Path
) -> None:
    shop = make_shop(init=False)
    shop.budget.init()
    target = tmp_path / "out.toml"
    assert run(shop.app, "export", "-o", str(target)).failed(1, "there is no budget to export")
    assert not target.exists()
    assert run(shop.app, "export", "--json").json == {"budgets": [], "lanes": []}


def test_export_to_where_nothing_can_be_written(shop: Shop, run: Run, tmp_path: Path) -> None:
    done = run(shop.app, "export", "-o", str(tmp_path / "no" / "out.toml"))
    assert done.failed(1, "Could not open file")


# close


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_close_is_refused_while_requests_are_open(shop: Shop, run: Run, options: list[str]) -> None:
    ledger_of(shop).reserve(10, budget="tenant:a")
    before = shop.ledger()
    assert run(shop.app, "close", "tenant:a", *options).failed(1, "close tenant:a --drain'")
    assert shop.ledger() == before


def test_close_drains_and_can_be_repeated(on_both: Shop, run: Run) -> None:
    ledger = ledger_of(on_both)
    request = ledger.reserve(10, budget="tenant:a")
    for _ in range(2):
        done = run(on_both.app, "close", "tenant:a", "--drain")
        assert (done.code, done.out.startswith("budget 'tenant:a' is draining: it takes")) == (
            0,
            True,
        )
    assert run(on_both.app, "list").rows[-1][-1] == "draining"
    attempt = ledger.run(request)
    attempt.record(1)
    attempt.end(RETURNED)
    for _ in range(2):
        done = run(on_both.app, "close", "tenant:a", "--json")
        assert done.json == {"budget": "tenant:a", "state": "closed"}
    assert run(on_both.app, "close", "tenant:a").out == "budget 'tenant:a' is closed\n"
    assert run(on_both.app, "show", "tenant:a", "--json").json["room"] == 0
    assert run(on_both.app, "set", "tenant:a", "--limit", "20").code == 0
    assert on_both.budget.balance("tenant:a").state == "closed"
    assert run(on_both.app, "set", "tenant:a", "--reopen", "--json").json["state"] == "open"


def test_close_of_an_unknown_budget_fails(shop: Shop, run: Run) -> None:
    assert run(shop.app, "close", "nobody").failed(1, "there is no budget named 'nobody'")
    assert run(shop.app, "close").failed(2, "Missing argument 'NAME'")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--alert-at", "1e9999999"),
        ("--alert-at", "80%,,95%"),
        ("--alert-at", ""),
        ("--soft-stop", "1e9999999"),
        ("--hard-stop", "-1e9999999"),
    ],
)
def test_a_share_that_is_none_is_wrong_use(shop: Shop, run: Run, option: str, text: str) -> None:
    shop.budget.set("tenant:a", limit=10, unit="tokens")
    assert run(shop.app, "set", "tenant:a", option, text).failed(2, f"'{option}'")
