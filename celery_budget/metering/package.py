"""The genai-prices package, imported when it is first needed."""

from __future__ import annotations

from functools import cache
from typing import Any

from celery_budget.errors import MissingExtra

__all__ = ["Package", "package"]


class Package:
    """What we use of genai-prices.

    :ivar units: what it counts, by the names of :class:`genai_prices.Usage`: each with what it is
        priced by and its dimensions.
    """

    def __init__(self) -> None:
        import genai_prices
        from genai_prices import data_snapshot, data_units, types

        self.version: str = genai_prices.__version__
        self.extract_usage = genai_prices.extract_usage
        self.calc_price = genai_prices.calc_price
        self.usage = genai_prices.Usage
        self.model_price = types.ModelPrice
        self.units: dict[str, Any] = dict(data_units.unit_data)
        self._snapshot = data_snapshot.get_snapshot

    def flavors(self, provider: str) -> list[str]:
        """Return by which names the package knows the shapes of a provider's replies.

        :raises LookupError: where it does not know the provider.
        """
        found = self._snapshot().find_provider(None, provider, None)
        return [extractor.api_flavor for extractor in found.extractors or ()]

    def provider_of(self, model: str, provider: str | None = None) -> str | None:
        """Return whose a model is by its name; none where that does not tell.

        :param provider: only whether it is this one's.
        """
        nothing = self.usage(input_tokens=0, output_tokens=0)
        try:
            return str(self.calc_price(nothing, model, provider_id=provider).provider.id)
        except LookupError:
            return None


@cache
def _package() -> Package:
    return Package()


def package(what: str) -> Package:
    """Return the package.

    :param what: what needs it, for the error.
    :raises MissingExtra: where it is not installed.
    """
    try:
        return _package()
    except ImportError as exc:
        raise MissingExtra(what, "prices") from exc
