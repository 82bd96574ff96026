"""The time that a test's ledger goes by."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

__all__ = ["Clock"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)


class Clock:
    """A clock for a ledger: it stands still until it is moved, and only forward.

    Windows, leases, deadlines and all else that the ledger dates go by it; what Celery works out
    itself, as ``eta`` and ``expires``, goes by the process's own clock.

    :param at: what it says first, with a time zone; by default what time it is.
    :raises ValueError: for a time without a time zone.
    """

    def __init__(self, at: datetime | None = None) -> None:
        self._now = _utc(datetime.now(timezone.utc) if at is None else at)

    def __repr__(self) -> str:
        return f"<Clock {self._now.isoformat()}>"

    @property
    def now(self) -> datetime:
        """What it says, in UTC."""
        return self._now

    def now_us(self) -> int:
        """What it says, in microseconds since the epoch."""
        return (self._now - _EPOCH) // timedelta(microseconds=1)

    def advance(
        self, by: timedelta | float = 0, *, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> datetime:
        """Move it forward; return what it says then.

        :param by: seconds, or a timedelta.
        :raises ValueError: where that is back.
        """
        seconds = by if isinstance(by, timedelta) else timedelta(seconds=by)
        return self.move_to(
            self._now + seconds + timedelta(minutes=minutes, hours=hours, days=days)
        )

    def move_to(self, when: datetime) -> datetime:
        """Move it forward to a time; return what it says then.

        :raises ValueError: for a time without a time zone, and for one that has passed.
        """
        then = _utc(when)
        if then < self._now:
            raise ValueError(
                f"the clock says {self._now.isoformat()} and does not go back to "
                f"{then.isoformat()}; begin with an earlier one: Clock(at=…)"
            )
        self._now = then
        return then


def _utc(when: datetime) -> datetime:
    """Return a time in UTC, in whole milliseconds, as SQLite has it.

    :raises ValueError: where it has no time zone.
    """
    if when.utcoffset() is None:
        raise ValueError(f"{when!r} has no time zone; give one: tzinfo=timezone.utc")
    return _EPOCH + (when - _EPOCH) // _MILLISECOND * _MILLISECOND
