"""The decisions that the model makes: the program's own, of which one can be replaced by a faulty one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from topicstore.replication import owning, reading, taking_over, truncating

__all__ = ["Decisions", "Moment"]


@attrs.define
class Moment:
    """What a faulty decision knows and a right one has no way to ask for."""

    clock: int = 0
    """What the clock of the site says that decides; no two sites' clocks agree."""
    first_tail: int = 0
    """The last position that the site knew when it was named the owner."""
    cut_before: int = 0
    """The highest cut that there was before the site read."""
    base: int = 0
    """The index of the newest base."""


@attrs.frozen(kw_only=True)
class Decisions:
    """Each function is the program's, unless a fault replaces it."""

    moment: Moment = attrs.field(factory=Moment)
    after_put: Callable[..., owning.Outcome] = owning.after_put
    again: Callable[..., Any] = owning.again
    may_put: Callable[..., bool] = owning.may_put
    may_acknowledge: Callable[..., bool] = owning.may_acknowledge
    may_release: Callable[..., bool] = owning.may_release
    tail: Callable[..., int] = owning.tail
    seen: Callable[..., bytes | None] = owning.seen
    after_reading: Callable[..., taking_over.Step] = taking_over.after_reading
    at_end: Callable[..., taking_over.Step] = taking_over.at_end
    after_fence: Callable[..., taking_over.Step] = taking_over.after_fence
    after_look: Callable[..., taking_over.Step] = taking_over.after_look
    apply: Callable[..., list[reading.LocalWrite]] = reading.apply
    where_to_read: Callable[..., reading.Source] = reading.where_to_read
    base_progress: Callable[..., Any] = truncating.base_progress
    may_delete: Callable[..., bool] = truncating.may_delete
