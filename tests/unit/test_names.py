"""Names of budgets and units."""

from __future__ import annotations

import pytest

from celery_budget.core.budgets import check_name, check_unit, match
from celery_budget.errors import InvalidName

NAMES = ["b", "tenant:acme", "Tenant:Acme", "x" * 255, "\u00e9", "日本", "a b", "🪙", "%s{}'\"\\"]

NO_NAMES = [
    ("", "has 0"),
    ("x" * 256, "has 256"),
    ("e\u0301", "NFC"),  # é in two characters
    ("\u212b", "NFC"),  # the Ångström sign
    ("a\nb", "control"),
    ("a\x00b", "control"),
    ("\x7f", "control"),
    ("\ud800", "control"),
    (None, "not None"),
    (7, "not 7"),
    (b"b", "not b'b'"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_come_back_unchanged(name: str) -> None:
    assert check_name(name) == name
    assert check_unit(name) == name


@pytest.mark.parametrize(("name", "said"), NO_NAMES)
def test_what_cannot_be_a_name_is_refused_and_told_why(name: object, said: str) -> None:
    with pytest.raises(InvalidName, match=f"^a budget's name .*{said}"):
        check_name(name)
    with pytest.raises(InvalidName, match=f"^a budget's unit .*{said}"):
        check_unit(name)


@pytest.mark.parametrize(
    ("template", "name", "values"),
    [
        ("tenant:*", "tenant:acme", ("acme",)),
        ("tenant:*", "tenant:acme/user:7", None),
        ("tenant:*", "tenant:", None),
        ("tenant:*/user:*", "tenant:acme/user:7", ("acme", "7")),
        ("*:*", "a:b:c", ("a", "b:c")),
        ("*:x", "a:x:x", ("a:x",)),
        ("a.(*)", "a.(b)", ("b",)),
        ("a.(*)", "ab(b)", None),
        ("**", "abc", ("a", "bc")),
        # More ways than anybody could try one by one.
        ("*-*-*-*-*-*-*-*", "-" * 250 + "/", None),
    ],
)
def test_wildcards_stand_for_as_little_as_will_do(
    template: str, name: str, values: tuple[str, ...] | None
) -> None:
    assert match(template, name) == values
