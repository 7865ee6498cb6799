"""Following a topic filter by server-sent events.

The format is that of the HTML standard, section 9.2 (https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.model import Message
from topicstore.files.formats import decode_line

from .connection import Connection
from .problems import Problem, error_of

__all__ = ["follow"]


def follow(connection: Connection, topic_filter: str, start: str) -> Iterator[list[Message]]:
    """Yield the matching messages stored from ``start`` on, and then new ones, in lists as they arrive together.

    Ends when the server ends the stream. Raises `GenerationDroppedError` if messages were dropped before they were
    sent, and any error that stops the server.
    """
    events = {"filter": topic_filter, "start": start}
    with connection.stream("/messages/tail", accept="text/event-stream", **events) as pieces:
        left = b""
        for piece in pieces:
            *whole, left = (left + piece).split(b"\n\n")
            messages: list[Message] = []
            for event in whole:
                try:
                    messages += _messages(event, connection.url)
                except Exception:
                    if messages:
                        yield messages
                    raise
            if messages:
                yield messages


def _messages(event: bytes, url: str) -> list[Message]:
    lines = event.split(b"\n")
    if b"event: dropped" in lines:
        raise GenerationDroppedError("generations were dropped before all of their messages came")
    found = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    if b"event: problem" in lines:
        raise error_of(msgspec.json.decode(found[0], type=Problem), url)
    return list(map(decode_line, found))
