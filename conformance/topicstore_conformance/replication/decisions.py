"""The decision functions that the model uses: the program's own, each of which a test can replace with a faulty one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from topicstore.replication import owning, reading, taking_over, truncating

__all__ = ["Decisions", "Moment"]


@attrs.define
class Moment:
    """Facts that faulty decisions use, and that the program's decisions don't get."""

    clock: int = 0
    """The clock of the deciding site; sites' clocks differ."""
    first_tail: int = 0
    """The last position of the site's replica when the site was named the owner."""
    cut_before: int = 0
    """The highest cut before the site's read."""
    base: int = 0
    """The index of the newest base."""


@attrs.frozen(kw_only=True)
class Decisions:
    """The decision functions of the replication protocol.

    Each is the one of `topicstore.replication`, unless a test replaces it with a faulty one.
    """

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
