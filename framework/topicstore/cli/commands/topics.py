"""The command ``topicstore topics``, and the table of counts that `clients` prints as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.display import count_of, make_table, short_time, size
from topicstore.cli.terminal.options import filter_argument
from topicstore.storage.counting.contents import ClientTally, TopicTally

__all__ = ["sort_option", "tallied", "topics"]

T = TypeVar("T", TopicTally, ClientTally)

sort_option = click.option(
    "--sort",
    type=click.Choice(["name", "messages", "bytes", "last"]),
    default="name",
    show_default=True,
    help="By name, or what has most, or came last, first.",
)


@click.command()
@answers("r")
@filter_argument
@sort_option
def topics(db: AnyDatabase, topic_filter: str, sort: str) -> Answer:
    """List the topics in PATH that match FILTER (default: #): messages, bytes, the first and the last.

    Bytes are those of payloads and topics, before compression. Times are those of positions. All counts are
    exact; only messages that were not yet counted in the background, or by `compact`, are read.
    """
    return tallied("topic", "topics", db.topics(topic_filter), topic_filter, sort)


def tallied(what: str, key: str, found: Sequence[T], topic_filter: str, sort: str) -> Answer:
    """Yield the `Answer` for counts, sorted by ``sort``.

    what:  the noun for the counted names.
    key:   the key of the counts in the JSON document.
    found: the counts, in ascending order of names.
    sort:  "name", or the attribute of the counts by which they are sorted in descending order.
    """
    if sort != "name":
        found = sorted(found, key=lambda one: int(getattr(one, sort)), reverse=True)
    yield {"filter": topic_filter, key: found}
    rows = (
        (
            getattr(one, what.replace(" ", "_")),
            one.messages,
            size(one.bytes),
            short_time(one.first),
            short_time(one.last),
        )
        for one in found
    )
    yield make_table(f"{what}~", "messages>", "bytes>", "first", "last", rows=rows)
    yield f"{count_of(len(found), what)}, {count_of(sum(one.messages for one in found), 'message')}"
