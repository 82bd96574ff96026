"""Replies as providers document them, whole ones and streams, and objects that make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

#: Each with the tokens that it is charged, and with what makes it readable where that is needed.
WHOLE: list[tuple[str, int, dict[str, Any]]] = [
    ("openai_chat", 2306, {}),
    ("openai_responses", 447, {}),
    ("openai_embeddings", 8, {}),
    ("anthropic_messages", 6449, {}),
    ("google_generate_content", 210, {}),
    ("mistral_chat", 50, {}),
    ("mistral_embeddings", 15, {}),
    ("bedrock_converse", 885, {}),
    ("litellm_anthropic", 1356, {}),
]
STREAMS: list[tuple[str, int]] = [
    ("openai_chat_stream", 29),
    ("openai_responses_stream", 447),
    ("anthropic_messages_stream", 47),
    ("google_generate_content_stream", 50),
    ("mistral_chat_stream", 21),
    ("bedrock_converse_stream", 67),
]


def load(name: str) -> Any:
    """Return a recorded reply, or the chunks of one."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


class Dumped:
    """As the objects of most clients, which are pydantic's."""

    def __init__(self, reply: dict[str, Any]) -> None:
        self._reply = reply

    def __repr__(self) -> str:
        # In the names of tests, which are the same in each process.
        return f"{type(self).__name__}({self._reply!r})"

    def model_dump(self, *, by_alias: bool = False, warnings: bool = True) -> dict[str, Any]:
        return self._reply


class PlainlyDumped(Dumped):
    """One whose method takes nothing."""

    def model_dump(self) -> dict[str, Any]:  # type: ignore[override]
        return self._reply


class ToDict:
    """As those that have a method of their own."""

    def __init__(self, reply: dict[str, Any]) -> None:
        self._reply = reply

    def __repr__(self) -> str:
        return f"ToDict({self._reply!r})"

    def to_dict(self) -> dict[str, Any]:
        return self._reply


class LiteLLM(Dumped):
    """As LiteLLM's ``ModelResponse``: OpenAI's shape, with a note of whose reply it was."""

    def __init__(self, reply: dict[str, Any], provider: str) -> None:
        super().__init__(reply)
        self._hidden_params = {"custom_llm_provider": provider, "response_cost": 0.002109}
