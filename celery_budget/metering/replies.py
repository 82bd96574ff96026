"""Providers' replies: what they used, read from their own shapes.

A reply is a mapping as the provider's API gives it, or an object of its client (or of LiteLLM) that
makes one. Which shape it has is told by its marks; who gave it by the shape, by the model's name,
or by the caller. What cannot be told is an error: two providers count differently under one name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_budget.core.amounts import check_amount
from celery_budget.errors import InvalidReply
from celery_budget.metering.package import Package, package

__all__ = ["HIDDEN", "Reply", "is_reply", "plain", "read"]

READING = "reading a provider's reply"

#: Where LiteLLM notes whose reply it has brought into OpenAI's shape.
HIDDEN = "_hidden_params"

#: Stands for whatever provider LiteLLM, or its proxy, has asked.
LITELLM = "litellm"

#: Only replies have these; a mapping of units has numbers only.
MARKS = (
    "usage",
    "usageMetadata",
    "usage_metadata",
    "choices",
    "candidates",
    "object",
    "type",
    "stopReason",
)

#: How the names of numbers end in a reply's usage.
NUMBERS = ("tokens", "tokencount", "requests")


@dataclass(frozen=True)
class Reply:
    """What a provider's reply tells.

    :ivar id: the provider's own; none where it has none.
    :ivar model: none where it names none.
    :ivar provider: whose it is, by the package's id.
    :ivar flavor: the package's name of its shape.
    :ivar counts: by the package's names; none where it does not tell what it used.
    :ivar whole: whether that is all it used.
    """

    id: str | None
    model: str | None
    provider: str | None
    flavor: str | None
    counts: Mapping[str, int] | None
    whole: bool = True


@dataclass(frozen=True)
class _Shape:
    """One shape of replies.

    :ivar flavors: the package's names for it; the first that a provider has counts.
    :ivar own: the provider that has made it.
    :ivar shared: whether others use it as well, and count in their own ways.
    """

    flavors: tuple[str, ...]
    own: str
    shared: bool


CHAT = _Shape(("chat", "default"), "openai", shared=True)
RESPONSES = _Shape(("responses", "default"), "openai", shared=True)
EMBEDDINGS = _Shape(("embeddings", "default"), "openai", shared=True)
MESSAGES = _Shape(("anthropic", "default"), "anthropic", shared=False)
GEMINI = _Shape(("default",), "google", shared=False)
CONVERSE = _Shape(("default",), "aws", shared=False)


def plain(value: object) -> Mapping[str, Any] | None:
    """Return a mapping as it is, and an object's own; none for what has none."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    found: Any = None
    if callable(dump := getattr(value, "model_dump", None)):
        try:
            # By the names of the API, which are not those of all clients.
            found = dump(by_alias=True, warnings=False)
        except TypeError:
            found = dump()
    elif callable(dump := getattr(value, "to_dict", None)):
        found = dump()
    if not isinstance(found, Mapping):
        return None
    hidden = getattr(value, HIDDEN, None)
    return {**found, HIDDEN: hidden} if isinstance(hidden, Mapping) else found


def is_reply(value: object) -> bool:
    """Tell whether a value is a provider's reply, and neither an amount nor a mapping of units."""
    if isinstance(value, Mapping):
        return any(name in value and not isinstance(value[name], (int, float)) for name in MARKS)
    return not isinstance(value, type) and any(
        callable(getattr(value, name, None)) for name in ("model_dump", "to_dict")
    )


def read(
    value: object,
    *,
    provider: str | None = None,
    flavor: str | None = None,
    model: str | None = None,
    whole: bool = True,
) -> Reply:
    """Read what a reply has used.

    :param provider: who gave it, by the package's id, where the reply does not tell.
    :param flavor: the package's name of its shape, where the reply does not tell.
    :param model: instead of the one that the reply names.
    :param whole: whether it is all there; of a stream that has died it is not.
    :raises InvalidReply: where it cannot be told what it used.
    :raises MissingExtra: where the genai-prices package is not installed.
    """
    genai = package(READING)
    reply = plain(value)
    if reply is None:
        raise InvalidReply(
            f"{value!r} is no reply: it has no mapping to read"
            "; give the provider's reply, or record its amounts"
        )
    reply = _in_camel_case(reply)
    model = model or _text(reply, "model", "modelVersion")
    shape = _shape_of(reply)
    told = plain(reply.get("usageMetadata") if shape is GEMINI else reply.get("usage"))
    if told is None and shape is None:
        raise InvalidReply(
            f"a reply with {', '.join(map(str, reply)) or 'nothing'} has no usage, and no shape "
            "that is known; record its amounts instead"
        )
    its_id = _id_of(reply)
    if told is None:
        return Reply(its_id, model, provider, flavor, None, whole)
    _check_numbers(told)
    brought = provider if provider == LITELLM else _brought_by_litellm(reply, shape, told)
    whose = provider or brought or _provider_of(genai, shape, model)
    reader = _maker_of(shape) if brought else whose
    flavor = flavor or _flavor_of(genai, shape, reader)
    counts = _counts(genai, _bare(reply, told, shape), reader, flavor)
    return Reply(its_id, model, whose, flavor, counts, whole)


def _in_camel_case(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return Google's reply by the names of its API; its older client has names of its own."""
    if "usage_metadata" not in reply:
        return reply
    names = {"usage_metadata", "model_version", "response_id"}
    return {
        _camel(name) if name in names else name: _camels(value) if name in names else value
        for name, value in reply.items()
    }


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)


def _camels(value: Any) -> Any:
    found = plain(value)
    if found is not None:
        return {_camel(str(name)): _camels(one) for name, one in found.items()}
    return [_camels(one) for one in value] if isinstance(value, list) else value


def _shape_of(reply: Mapping[str, Any]) -> _Shape | None:
    """Return a reply's shape: by its marks, or else by what its usage has; none for neither."""
    usage = plain(reply.get("usage")) or {}
    kind = str(reply.get("object", ""))
    if "usageMetadata" in reply or "candidates" in reply:
        return GEMINI
    if "stopReason" in reply or "inputTokens" in usage:
        return CONVERSE
    if reply.get("type") == "message":
        return MESSAGES
    if kind == "response":
        return RESPONSES
    if kind == "list":
        return EMBEDDINGS
    if kind.startswith("chat.completion") or "choices" in reply or "completion_tokens" in usage:
        return CHAT
    if "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:
        return MESSAGES
    if "input_tokens_details" in usage:
        return RESPONSES
    return None


def _provider_of(genai: Package, shape: _Shape | None, model: str | None) -> str:
    """Return who gave a reply.

    :raises InvalidReply: where neither its shape nor its model tells.
    """
    if shape is not None and not shape.shared:
        return shape.own
    if shape is not None and model is not None:
        # Of what everybody offers under one name the shape's maker is as good as any.
        found = genai.provider_of(model) or genai.provider_of(model, shape.own)
        if found is not None:
            return found
    raise InvalidReply(
        f"several providers reply in this shape, and the model {model!r} does not tell which; give "
        "provider='openai' or whose it is, or record its amounts instead"
    )


def _maker_of(shape: _Shape | None) -> str:
    return CHAT.own if shape is None else shape.own


def _flavor_of(genai: Package, shape: _Shape | None, provider: str) -> str:
    try:
        known = genai.flavors(provider)
    except LookupError as exc:
        raise InvalidReply(
            f"genai-prices {genai.version} does not know a provider {provider!r}"
            "; give provider= one that it does, or record amounts"
        ) from exc
    wanted = (shape or RESPONSES).flavors
    for flavor in wanted:
        if flavor in known:
            return flavor
    raise InvalidReply(
        f"genai-prices {genai.version} does not read replies of {provider!r} as "
        f"{' or '.join(wanted)}, but as {', '.join(known) or 'nothing'}; give api_flavor="
    )


def _bare(
    reply: Mapping[str, Any], told: Mapping[str, Any], shape: _Shape | None
) -> dict[str, Any]:
    """Return a reply as the package reads it: without its model, which it would look up."""
    bare = {name: value for name, value in reply.items() if name not in ("model", "modelVersion")}
    if shape is GEMINI:
        return {**bare, "usageMetadata": told}
    # LiteLLM gives what was written to a cache by Anthropic's name.
    written = told.get("cache_creation_input_tokens")
    if shape is CHAT and written is not None:
        details = plain(told.get("prompt_tokens_details")) or {}
        told = {**told, "prompt_tokens_details": {**details, "cache_write_tokens": written}}
    return {**bare, "usage": {name: plain(value) or value for name, value in told.items()}}


def _counts(genai: Package, reply: dict[str, Any], provider: str, flavor: str) -> Mapping[str, int]:
    """Return a reply's numbers.

    :raises InvalidReply: where one is missing, or none that can be.
    """
    try:
        usage = genai.extract_usage(reply, provider_id=provider, api_flavor=flavor).usage
        counts = {
            name: _whole(name, value) for name, value in vars(usage).items() if name in genai.units
        }
        for name in ("input_tokens", "output_tokens"):
            counts[name] = _whole(name, getattr(usage, name))
    except (LookupError, ValueError, TypeError) as exc:
        raise InvalidReply(
            f"the usage of a reply of {provider!r} cannot be read as {flavor}: {exc}"
            "; give api_flavor=, or record amounts"
        ) from exc
    _check_parts(counts)
    return counts


def _check_numbers(told: Mapping[str, Any]) -> None:
    """Check that what is called a number in a reply's usage is one, or not told.

    The package takes some that are none for 0.

    :raises InvalidReply: where one is not.
    """
    for name, value in told.items():
        if str(name).lower().endswith(NUMBERS):
            if isinstance(value, bool) or not (value is None or isinstance(value, (int, float))):
                raise InvalidReply(
                    f"the usage of a reply has {value!r} as {name}, where a number "
                    "is wanted; record amounts instead"
                )
            continue
        for part in value if isinstance(value, (list, tuple)) else (value,):
            found = plain(part)
            if found is not None:
                _check_numbers(found)


def _whole(name: str, value: Any) -> int:
    """Return a number as an amount: there are no parts of tokens, of others the next greater one.

    :raises ValueError: where it is none.
    """
    amount = math.ceil(value)
    if name.endswith("_tokens") and amount != value:
        raise ValueError(f"{name} is {value!r}")
    return check_amount(amount, name)


def _check_parts(counts: Mapping[str, int]) -> None:
    """Check that no part is more than the whole.

    :raises InvalidReply: where one is.
    """
    for name, count in counts.items():
        if name.endswith("_tokens"):
            whole = "output_tokens" if name.startswith("output_") else "input_tokens"
            if count > counts[whole]:
                raise InvalidReply(
                    f"a reply has {count} {name} and {counts[whole]} {whole}, of which they are a "
                    "part"
                    "; record amounts instead"
                )


def _id_of(reply: Mapping[str, Any]) -> str | None:
    found = _text(reply, "id", "responseId")
    if found is None and (request := plain(reply.get("ResponseMetadata"))) is not None:
        found = _text(request, "RequestId")
    return found


def _text(reply: Mapping[str, Any], *names: str) -> str | None:
    for name in names:
        value = reply.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def _brought_by_litellm(
    reply: Mapping[str, Any], shape: _Shape | None, told: Mapping[str, Any]
) -> str | None:
    """Return whose reply LiteLLM has brought into OpenAI's shape; none where it has not."""
    hidden = reply.get(HIDDEN)
    if isinstance(hidden, Mapping):
        return _text(hidden, "custom_llm_provider") or LITELLM
    # Its proxy's replies: a name of Anthropic's among OpenAI's.
    return LITELLM if shape is CHAT and "cache_creation_input_tokens" in told else None
