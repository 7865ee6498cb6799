"""`Pace`: the intervals of the periodic work of sessions."""

from __future__ import annotations

import attrs

from topicstore.contract.errors import InvalidArgumentError

__all__ = ["Pace"]

_LONGEST = 86_400.0


def _check(_instance: Pace, attribute: attrs.Attribute[float], value: float) -> None:
    if type(value) not in (int, float) or not 0 < value <= _LONGEST:
        raise InvalidArgumentError(f"{attribute.name} is seconds above 0, at most {_LONGEST:,.0f}, not {value!r}")


@attrs.define
class Pace:
    """The intervals of periodic work, in seconds, up to a day. May be set at any time, in any thread; not stored.

    Raises `InvalidArgumentError` for a value out of this range.
    """

    longest_pause: float = attrs.field(default=1.0, validator=_check)
    """The most that `Sessions.tick` returns: the longest time between two ticks."""
    checkpoint_interval: float = attrs.field(default=15.0, validator=_check)
    """The longest time before acknowledgements are committed, if no other write commits them."""
    longest_tick: float = attrs.field(default=_LONGEST, validator=_check)
    """The duration of `Sessions.tick` after which the remaining wills, expired sessions and silent clients are left
    for the next call."""
