"""``/messages/histogram``: counts of messages by time."""

from __future__ import annotations

from typing import Annotated

from litestar import get
from litestar.params import QueryParameter

from topicstore.contract.topics import TopicFilter
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.queries import TheFilter, TheStart, TheUntil, time_asked
from topicstore.storage.counting import histogram as histograms

__all__ = ["ROUTES"]


@get("/messages/histogram", guards=[needs("read")], tags=["messages"], opt={"way": "heavy"}, sync_to_thread=True)
def histogram(
    context: TheContext,
    topic_filter: TheFilter = "#",
    start: TheStart = None,
    until: TheUntil = None,
    buckets: Annotated[int, QueryParameter(ge=1, le=1_000, description="How many spans of time.")] = 60,
) -> histograms.Histogram:
    """Return the number of matching messages in each of ``buckets`` intervals of time, from ``start`` to ``until``.

    With many messages, counts are estimated from statistics, and few messages are read. Then ``exact`` is false, and
    the messages within each group of about 65,000 that were stored consecutively count as evenly distributed. A shorter
    time or a narrower filter is counted exactly.
    """
    db = context.db
    found = time_asked(db, start), time_asked(db, until)
    return histograms.histogram(db.storage, TopicFilter(topic_filter), *found, buckets)


ROUTES = [histogram]
