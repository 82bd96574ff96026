"""Calling what a task's declaration was given with those of the task's arguments that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery_budget.errors import PolicyError

__all__ = ["call", "parameters_of", "signature_of_callable", "wanted"]

Parameter = inspect.Parameter


def wanted(function: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """Return the names ``function`` needs, those it takes besides, and whether it takes any."""
    needed: list[str] = []
    optional: list[str] = []
    any_name = False
    for parameter in signature_of_callable(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            any_name = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            (needed if parameter.default is parameter.empty else optional).append(parameter.name)
    return needed, optional, any_name


def call(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    """Call ``function`` with those of ``arguments`` that its parameters name."""
    needed, optional, any_name = wanted(function)
    names = arguments if any_name else [*needed, *optional]
    by_name = {name: arguments[name] for name in names if name in arguments}
    positional = [
        by_name.pop(parameter.name)
        for parameter in signature_of_callable(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in by_name
    ]
    return function(*positional, **by_name)


def parameters_of(functions: Iterable[Callable[..., Any]]) -> list[Parameter]:
    """Return the parameters of a function that calls all of ``functions``."""
    needed: dict[str, bool] = {}
    any_name = False
    for function in functions:
        required, optional, rest = wanted(function)
        any_name = any_name or rest
        needed |= dict.fromkeys(required, True)
        for name in optional:
            needed.setdefault(name, False)
    # What one of them needs is needed, whichever of them comes first.
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=Parameter.empty if required else None)
        for name, required in needed.items()
    ]
    if any_name:
        parameters.append(Parameter("_others", Parameter.VAR_KEYWORD))
    return parameters


def signature_of_callable(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of ``function``.

    :raises PolicyError: where it does not tell it.
    """
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as exc:
        raise PolicyError(
            f"{function!r} does not tell its parameters; wrap it in a function that names the "
            "arguments it wants"
        ) from exc
