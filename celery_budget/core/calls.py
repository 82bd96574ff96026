"""Calling what a task's declaration was given with those of the task's arguments that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from celery_budget.errors import PolicyError

__all__ = ["bound_arguments", "call", "parameters_of", "signature_of_callable", "wanted"]

Parameter = inspect.Parameter


class _Wanted(NamedTuple):
    """What a function takes by name.

    :ivar needed: names without a default.
    :ivar optional: names with one.
    :ivar any_name: whether it takes any name besides.
    :ivar positional: those of its names that it takes by their place only.
    """

    needed: list[str]
    optional: list[str]
    any_name: bool
    positional: list[str]


#: Of plain functions, which every call asks for.
_known: WeakKeyDictionary[FunctionType, _Wanted] = WeakKeyDictionary()


def wanted(function: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """Return the names ``function`` needs, those it takes besides, and whether it takes any."""
    needed, optional, any_name, _ = _wanted(function)
    return needed, optional, any_name


def _wanted(function: Callable[..., Any]) -> _Wanted:
    if type(function) is not FunctionType:
        return _look(function)
    found = _known.get(function)
    if found is None:
        found = _known[function] = _look(function)
    return found


def _look(function: Callable[..., Any]) -> _Wanted:
    found = _Wanted([], [], False, [])
    for parameter in signature_of_callable(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found = found._replace(any_name=True)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            has_none = parameter.default is parameter.empty
            (found.needed if has_none else found.optional).append(parameter.name)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                found.positional.append(parameter.name)
    return found


def call(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    """Call ``function`` with those of ``arguments`` that its parameters name."""
    needed, optional, any_name, positional = _wanted(function)
    names = arguments if any_name else [*needed, *optional]
    by_name = {name: arguments[name] for name in names if name in arguments}
    by_place = [by_name.pop(name) for name in positional if name in by_name]
    return function(*by_place, **by_name)


def bound_arguments(
    signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> Mapping[str, object]:
    """Return the arguments of a call by their names, defaults included, in the signature's order.

    As :meth:`inspect.Signature.bind` does, only that of the common case less is made.

    :raises TypeError: where they do not fit.
    """
    arguments: dict[str, object] = {}
    place, named = 0, 0
    for name, parameter in signature.parameters.items():
        if parameter.kind is not Parameter.POSITIONAL_OR_KEYWORD:
            break
        if place < len(args):
            arguments[name] = args[place]
            place += 1
            if name in kwargs:
                break
        elif name in kwargs:
            arguments[name] = kwargs[name]
            named += 1
        elif parameter.default is not Parameter.empty:
            arguments[name] = parameter.default
        else:
            break
    else:
        if place == len(args) and named == len(kwargs):
            return arguments
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


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
