"""Contenders that are at fault, each in its own way, for the harness to catch."""

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
    """Returns all messages but one."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        found = list(super().replay(topic_filter, start))
        return iter(found[:7] + found[8:] if len(found) > 8 else found)


class Reordering(SqliteContender):
    """Returns the last two messages of a topic in the wrong order."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        found = list(super().replay(topic_filter, start))
        mine = [row for row, message in enumerate(found) if message.topic == found[0].topic][-2:]
        if len(mine) == 2:
            found[mine[0]], found[mine[1]] = found[mine[1]], found[mine[0]]
        return iter(found)


class Changing(SqliteContender):
    """Returns one message with another client id."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        found = super().replay(topic_filter, start)
        return chain((msgspec.structs.replace(message, client_id="me") for message in [next(found)]), found)


class Forgetting(SqliteContender):
    """Keeps what is stored while somebody reads only if it feels like it."""

    def store(self, batch: list[Message]) -> None:
        super().store(batch[1:] if len(batch) == 100 else batch)


class Dying(SqliteContender):
    """Takes the process with it when it is asked for a filter: at once its answers end, and itself when it may."""

    def prepare(self, filters: object) -> None:
        if filters != ["#"]:
            print("my last words")
            os.closerange(3, 256)
            wait_until(self.path.with_name("may end").exists, "leave to end")
            os._exit(3)


class Hanging(SqliteContender):
    """Never returns from a replay, and leaves a file that tells when it has come to that."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        self.path.with_name("hanging").touch()
        threading.Event().wait()
        return iter(())


class Refusing(SqliteContender):
    """Stores nothing."""

    def store(self, batch: list[Message]) -> None:
        raise OSError("the disk is gone")


class Unmade(SqliteContender):
    """Can't even be made."""

    def __init__(self, *arguments: object, **named: object) -> None:
        raise RuntimeError("no such luck")


class Narrow(SqliteContender):
    """Can't do much."""

    abilities = frozenset()
