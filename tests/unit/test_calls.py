"""Arguments bound by their names, as Python binds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from celery_budget.core.calls import bound_arguments, call


def plain(a: Any, b: Any = 2) -> None: ...
def rest(a: Any, *more: Any, b: Any = 2, **others: Any) -> None: ...
def placed(a: Any, /, b: Any = 2) -> None: ...


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, 3), {}),
    ((), {"b": 3, "a": 1}),
    ((1,), {"b": 3}),
    ((), {}),
    ((1, 2, 3), {}),
    ((1,), {"a": 1}),
    ((1,), {"c": 1}),
]


@pytest.mark.parametrize("function", [plain, rest, placed])
@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_arguments_are_bound_as_python_binds_them(
    function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    signature = inspect.signature(function)
    assert _said(lambda: bound_arguments(signature, args, kwargs)) == _said(
        lambda: _by_python(signature, args, kwargs)
    )


def _by_python(signature: inspect.Signature, args: Any, kwargs: Any) -> Mapping[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _said(bind: Callable[[], Mapping[str, Any]]) -> list[tuple[str, Any]] | str:
    """What was bound, in its order, or why it was not."""
    try:
        return list(bind().items())
    except TypeError as error:
        return str(error)


def test_a_function_is_called_by_what_it_names() -> None:
    def named(a: int, /, b: int, c: int = 0) -> tuple[int, int, int]:
        return a, b, c

    for _ in range(2):
        assert call(named, {"a": 1, "b": 2, "other": 3}) == (1, 2, 0)
