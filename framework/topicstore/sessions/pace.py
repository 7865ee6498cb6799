"""`Pace`: how often the periodic work of sessions is done."""

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
    """Lengths of time in seconds, up to a day. They may be set at any time, in any thread, and are not stored.

    Raises `InvalidArgumentError` for another value.
    """

    longest_pause: float = attrs.field(default=1.0, validator=_check)
    """The most that `Sessions.tick` returns: the longest time between two looks if nothing happens."""
    checkpoint_interval: float = attrs.field(default=15.0, validator=_check)
    """How long acknowledgements wait to be committed, if nothing else commits them."""
    longest_tick: float = attrs.field(default=_LONGEST, validator=_check)
    """After how long `Sessions.tick` leaves wills, the ends of sessions and silent clients to the next call."""
