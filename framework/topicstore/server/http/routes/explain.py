"""``/messages/explain``: statistics of a replay's reads."""

from __future__ import annotations

from typing import Annotated

from litestar import get
from litestar.params import QueryParameter

from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.queries import TheBy, TheFilter, TheOrder, TheStart, TheUntil, time_asked
from topicstore.storage.reading.explain import Explanation

__all__ = ["ROUTES"]

_Limit = Annotated[int | None, QueryParameter(ge=1, description="Stop after this many messages. Default: at the end.")]


@get("/messages/explain", guards=[needs("read")], tags=["messages"], opt={"way": "heavy"}, sync_to_thread=True)
def explain(
    context: TheContext,
    topic_filter: TheFilter = "#",
    start: TheStart = None,
    until: TheUntil = None,
    by: TheBy = "position",
    order: TheOrder = "time",
    limit: _Limit = None,
) -> Explanation:
    """Run a replay, and return counts of what it read and skipped. The request takes as long as the replay.

    With ``limit`` the replay stops after this number of messages; then ``ended`` is false, and only those are counted.
    """
    db = context.db
    times = time_asked(db, start) or 0, time_asked(db, until)
    return db.explain(topic_filter, *times, by=by, order=order, limit=limit)


ROUTES = [explain]
