"""Query parameters that several routes share."""

from __future__ import annotations

from typing import Annotated

from litestar.params import QueryParameter

import topicstore as ts
from topicstore.contract.replay_plan import By, Order
from topicstore.contract.times import instant

__all__ = ["TheBy", "TheFilter", "TheOrder", "TheStart", "TheUntil", "time_asked"]

TheFilter = Annotated[str, QueryParameter(name="filter", description="A topic filter of MQTT. Default: `#`.")]
TheStart = Annotated[
    str | None,
    QueryParameter(
        name="start",
        description="The time of the first message: ISO 8601, `-2h`, `now`, or microseconds. Default: the beginning.",
    ),
]
TheUntil = Annotated[
    str | None,
    QueryParameter(name="until", description="The time after the last message, in the same forms. Default: no end."),
]
TheBy = Annotated[
    By,
    QueryParameter(
        name="by",
        description="The times with which `start` and `until` are compared: those of storing, or the messages' own.",
    ),
]
TheOrder = Annotated[
    Order,
    QueryParameter(
        name="order", description="`time`, or `any`: each publisher's order in each topic, which is quicker to read."
    ),
]


def time_asked(db: ts.Database, when: str | None) -> int | None:
    """Parse a time of a query to microseconds since the epoch. Raises `InvalidArgumentError`."""
    return None if when is None else instant(when, db.clock, allow_ancient=db.storage.allow_ancient)
