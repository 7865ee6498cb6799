"""Contenders with a fault each, which the harness must detect."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import chain

import msgspec
from topicstore import Message
from topicstore_benchmarks.contenders.sqlite import SqliteContender
from topicstore_conformance.faults.threads import wait_until


class Losing(SqliteContender):
    """A contender whose replays lose one message."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        found = list(super().replay(topic_filter, start))
        return iter(found[:7] + found[8:] if len(found) > 8 else found)


class Reordering(SqliteContender):
    """A contender whose replays return the last two messages of a topic in the wrong order."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        found = list(super().replay(topic_filter, start))
        mine = [row for row, message in enumerate(found) if message.topic == found[0].topic][-2:]
        if len(mine) == 2:
            found[mine[0]], found[mine[1]] = found[mine[1]], found[mine[0]]
        return iter(found)


class Changing(SqliteContender):
    """A contender whose replays return one message with another client id."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        found = super().replay(topic_filter, start)
        return chain((msgspec.structs.replace(message, client_id="me") for message in [next(found)]), found)


class Forgetting(SqliteContender):
    """A contender that loses a message of each batch of 100, the batch size of the phase ``mixed``."""

    def store(self, batch: list[Message]) -> None:
        super().store(batch[1:] if len(batch) == 100 else batch)


class Dying(SqliteContender):
    """A contender that ends its process at the first wildcard filter.

    It closes the process's output at once, and exits when the test permits.
    """

    def prepare(self, filters: object) -> None:
        if filters != ["#"]:
            print("my last words")
            os.closerange(3, 256)
            wait_until(self.path.with_name("may end").exists, "leave to end")
            os._exit(3)


class Hanging(SqliteContender):
    """A contender whose replays hang after they have created a file that notifies the test."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        self.path.with_name("hanging").touch()
        threading.Event().wait()
        return iter(())


class Refusing(SqliteContender):
    """A contender whose `store` raises."""

    def store(self, batch: list[Message]) -> None:
        raise OSError("the disk is gone")


class Unmade(SqliteContender):
    """A contender whose constructor raises."""

    def __init__(self, *arguments: object, **named: object) -> None:
        raise RuntimeError("no such luck")


class Narrow(SqliteContender):
    """A contender that declares no ability."""

    abilities = frozenset()
