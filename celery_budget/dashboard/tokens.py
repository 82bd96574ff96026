"""The token that opens a dashboard, and the sessions it opens; knows nothing of HTTP."""

from __future__ import annotations

import hashlib
import hmac

from celery_budget.errors import ConfigurationError

__all__ = ["SESSION_SECONDS", "Token"]

#: For how long a browser is let in once it has shown the token.
SESSION_SECONDS = 12 * 3600

_PURPOSE = b"celery_budget dashboard session"


class Token:
    """What opens a dashboard. It is kept, and compared in constant time, as its digest.

    A session is a time and its signature under the token. The token cannot be had from it; another
    token ends all sessions, and several processes with one token share them.

    :raises ConfigurationError: for an empty one, or one with spaces or control characters, which no
        header would carry as it is.
    """

    def __init__(self, token: str) -> None:
        if not token or not token.isprintable() or any(map(str.isspace, token)):
            raise ConfigurationError(
                "the token of a dashboard is empty, or has spaces or control characters; make one "
                "with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        self._digest = _digest(token)

    def opens(self, given: str) -> bool:
        """Tell whether this is the token."""
        return hmac.compare_digest(_digest(given), self._digest)

    def session(self, now: float) -> str:
        """Return a session that begins now, in seconds since the epoch."""
        until = str(int(now) + SESSION_SECONDS)
        return f"{until}.{self._signature(until)}"

    def holds(self, session: str, now: float) -> bool:
        """Tell whether this is a session of this token that is not over."""
        until, _, signature = session.partition(".")
        signed = hmac.compare_digest(
            self._signature(until).encode(), signature.encode(errors="replace")
        )
        return signed and now < int(until)

    def _signature(self, until: str) -> str:
        told = _PURPOSE + until.encode(errors="replace")
        return hmac.new(self._digest, told, hashlib.sha256).hexdigest()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()
