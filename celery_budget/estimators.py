"""Ready estimators of what a language model uses: by characters, by tiktoken, by parameters.

Each makes an :class:`~celery_budget.Estimator`, for ``estimate=`` as it is or to be registered
under another name. The only module that knows tiktoken, which is imported when it is first needed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from celery_budget.core.amounts import check_amount
from celery_budget.core.calls import call, parameters_of
from celery_budget.core.estimators import Estimator
from celery_budget.errors import EstimateError, MissingExtra, PolicyError

__all__ = ["by_characters", "by_request", "by_tiktoken", "texts"]

#: Parts of a message that a model reads; of what else it has (images, for one) nothing is counted.
READ = ("content", "text", "name", "arguments", "input", "tool_calls", "function", "refusal")
#: By which names a request says how much may come out.
MOST_OUTPUT = ("max_completion_tokens", "max_output_tokens", "max_tokens")
CHOICES = "n"

#: Counts the units of texts.
Count = Callable[[Sequence[str]], int]


def by_characters(
    *names: str,
    units_per_character: int | str | Fraction | Decimal = Fraction(1, 3),
    per_message: int = 0,
    plus: int = 0,
    name: str = "characters",
    version: str | None = None,
    at_least: int | None = None,
    at_most: int | None = None,
) -> Estimator:
    """Estimate by the number of characters in arguments, rounded up.

    :param names: the task's arguments that count: text, messages (mappings with ``content``, as
        OpenAI, Anthropic and others have them) or lists of those; none counts as empty. Of messages
        text, names and calls of tools count; images and the like do not: see ``plus``.
    :param units_per_character: an exact ratio: ``"1/4"``, ``"0.25"`` or a ``Fraction``. A float is
        none.
    :param per_message: what each message costs beside its text, in units.
    :param plus: what each call costs beside that.
    :param name: what reports know it by.
    :param version: by default what it is set to, so that another ratio is another version.
    :param at_least: as of :class:`~celery_budget.Estimator`, and so ``at_most``.
    :raises PolicyError: for what cannot be such a ratio, and without an argument to count.
    """
    ratio = _ratio(units_per_character)
    added = _added(per_message, plus)
    counted = _Texts(names, _Scaled(ratio), per_message, plus)
    return Estimator(name, counted, version or f"{ratio}{added}", at_least, at_most)


def by_tiktoken(
    *names: str,
    model: str | None = None,
    encoding: Any = None,
    per_message: int = 3,
    plus: int = 3,
    name: str = "tiktoken",
    version: str | None = None,
    at_least: int | None = None,
    at_most: int | None = None,
) -> Estimator:
    """Estimate by the tokens that tiktoken counts (``celery-budget[tiktoken]``).

    tiktoken loads a vocabulary over the network when it is first needed, and keeps it in the folder
    ``TIKTOKEN_CACHE_DIR``: fill that before, or the first publication of a process waits for it,
    and is refused with an ``EstimateError`` where it cannot be had.

    :param names: the task's arguments that count, as of :func:`by_characters`.
    :param model: whose encoding.
    :param encoding: its name, such as ``"o200k_base"``, or a ``tiktoken.Encoding``; one of the two
        is needed.
    :param per_message: what each message costs beside its text, in tokens.
    :param plus: what each call costs beside that.
    :param name: what reports know it by.
    :param version: by default the encoding's or the model's name.
    :param at_least: as of :class:`~celery_budget.Estimator`, and so ``at_most``.
    :raises PolicyError: without an argument to count, or an encoding. Where it is evaluated also
        ``MissingExtra`` where the package is not installed.
    """
    if (model is None) == (encoding is None):
        raise PolicyError("by_tiktoken() wants model= or encoding=; give one of the two")
    counted = _Texts(names, _Tokens(model, encoding), per_message, plus)
    called: str = getattr(encoding, "name", encoding) if model is None else model
    made = version or f"{called}{_added(per_message, plus)}"
    return Estimator(name, counted, made, at_least, at_most)


def by_request(
    input: int | Callable[..., int],  # noqa: A002 - what goes in, as against what comes out
    *,
    of: str | None = None,
    default_output: int | None = None,
    name: str = "request",
    version: str | None = None,
    at_least: int | None = None,
    at_most: int | None = None,
) -> Estimator:
    """Estimate by a request's own parameters: what goes in, and the most that may come out.

    That is ``input`` plus ``max_completion_tokens``, ``max_output_tokens`` or ``max_tokens``, the
    first of them that is given, for each of ``n`` choices.

    :param input: an amount or an estimator of what goes in: ``by_characters("messages")``.
    :param of: the task's argument that is the request, a mapping with ``messages``, ``max_tokens``
        and the like, which ``input`` gets its arguments from as well; none where those are the
        task's own arguments.
    :param default_output: how much comes out where the request does not bound it; without it such a
        request is refused with an ``EstimateError``.
    :param name: what reports know it by.
    :param version: by default that of ``input`` with its name, where it is an estimator.
    :param at_least: as of :class:`~celery_budget.Estimator`, and so ``at_most``.
    :raises PolicyError, InvalidAmount: for what cannot be.
    """
    if not callable(input):
        check_amount(input, "input= of by_request()")
    if default_output is not None:
        check_amount(default_output, "default_output= of by_request()")
    if of is not None and not str(of).isidentifier():
        raise PolicyError(f"of= of by_request() is {of!r}; give the name of an argument")
    made = f"{input.name}-{input.version}" if isinstance(input, Estimator) else "1"
    function = _Request(input, of, default_output)
    return Estimator(name, function, version or made[:50], at_least, at_most)


def texts(value: object) -> Iterator[str]:
    """Yield the texts that a model reads of an argument: of text itself, or of messages.

    :raises EstimateError: for what is neither.
    """
    if value is None:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name in READ:
            part = value.get(name)
            if name in ("arguments", "input") and isinstance(part, Mapping):
                yield json.dumps(part, ensure_ascii=False, default=str)
            else:
                yield from texts(part)
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        for one in value:
            yield from texts(one)
    else:
        raise EstimateError(
            f"{type(value).__name__} is neither text nor messages nor a list of those, and its "
            "characters cannot be counted; give an estimator of its own"
        )


@dataclass(frozen=True)
class _Scaled:
    """Counts characters."""

    ratio: Fraction

    def __call__(self, read: Sequence[str]) -> int:
        return -(-sum(map(len, read)) * self.ratio.numerator // self.ratio.denominator)


@dataclass(frozen=True)
class _Tokens:
    """Counts tokens."""

    model: str | None
    encoding: Any

    def __call__(self, read: Sequence[str]) -> int:
        encoding = self.encoding
        if self.model is not None or isinstance(encoding, str):
            encoding = _encoding(self.model, encoding)
        # What looks like a special token is what somebody has written.
        return sum(len(encoding.encode(text, disallowed_special=())) for text in read)


@dataclass(frozen=True)
class _Texts:
    """Counts what arguments say, and how many messages they are."""

    names: tuple[str, ...]
    count: Count
    per_message: int
    plus: int
    __signature__: inspect.Signature = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_amount(self.per_message, "per_message=")
        check_amount(self.plus, "plus=")
        if not self.names or not all(str(name).isidentifier() for name in self.names):
            raise PolicyError(
                f"an estimator counts the text of arguments, and got the names {self.names!r}; "
                "give those of the task's arguments"
            )
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, keyword) for name in dict.fromkeys(self.names)]
        object.__setattr__(self, "__signature__", inspect.Signature(parameters))

    def __call__(self, /, **arguments: object) -> int:
        values = [arguments.get(name) for name in self.__signature__.parameters]
        read = [text for value in values for text in texts(value)]
        messages = sum(map(_messages, values))
        return self.count(read) + messages * self.per_message + self.plus


@dataclass(frozen=True)
class _Request:
    """Counts what goes in, and the most that may come out."""

    input: int | Callable[..., int]
    of: str | None
    default_output: int | None
    __signature__: inspect.Signature = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keyword = inspect.Parameter.KEYWORD_ONLY
        if self.of is not None:
            parameters = [inspect.Parameter(self.of, keyword)]
        else:
            parameters = parameters_of([self.input]) if callable(self.input) else []
            named = {parameter.name for parameter in parameters}
            rest = [one for one in parameters if one.kind is one.VAR_KEYWORD]
            optional = [
                inspect.Parameter(name, keyword, default=None)
                for name in (*MOST_OUTPUT, CHOICES)
                if name not in named
            ]
            parameters = [*(one for one in parameters if one not in rest), *optional, *rest]
        object.__setattr__(self, "__signature__", inspect.Signature(parameters))

    def __call__(self, /, **arguments: object) -> int:
        given: Mapping[str, object] = arguments
        if self.of is not None:
            request = arguments.get(self.of)
            if not isinstance(request, Mapping):
                raise EstimateError(
                    f"{self.of!r} is {type(request).__name__} and no mapping of a request's "
                    "parameters; give one with messages, max_tokens and the like"
                )
            given = request
        entering = self._entering(given)
        each = next((given[name] for name in MOST_OUTPUT if given.get(name) is not None), None)
        if each is None:
            each = self.default_output
        if each is None:
            raise EstimateError(
                f"the request bounds its output by none of {', '.join(MOST_OUTPUT)}; give one of "
                "them, or default_output= to the estimator"
            )
        choices = given.get(CHOICES)
        number = 1 if choices is None else check_amount(choices, f"{CHOICES} of a request")
        return entering + check_amount(each, "the most that may come out") * max(1, number)

    def _entering(self, given: Mapping[str, object]) -> int:
        if not callable(self.input):
            return self.input
        amount = check_amount(call(self.input, given), "the estimate of what goes in")
        if isinstance(self.input, Estimator):
            self.input.check(amount, "what goes in")
        return amount


def _messages(value: object) -> int:
    """Return how many messages a value is; text is one that costs nothing beside its text."""
    if isinstance(value, Mapping):
        return 1
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return sum(map(_messages, value))
    return 0


def _ratio(value: object) -> Fraction:
    ratio = Fraction(0)
    if isinstance(value, (int, str, Fraction, Decimal)) and not isinstance(value, bool):
        try:
            ratio = Fraction(value)
        except (ValueError, OverflowError, ZeroDivisionError):
            ratio = Fraction(0)
    if ratio <= 0:
        raise PolicyError(
            f"units_per_character= is {value!r}; give an exact ratio above 0: '1/4', '0.25' or a "
            "Fraction"
        )
    return ratio


def _added(per_message: int, plus: int) -> str:
    return f"+{per_message}+{plus}" if per_message or plus else ""


@cache
def _encoding(model: str | None, name: str) -> Any:
    try:
        import tiktoken
    except ImportError as exc:
        raise MissingExtra("an estimate by tiktoken", "tiktoken") from exc
    if model is not None:
        return tiktoken.encoding_for_model(model)
    return tiktoken.get_encoding(name)
