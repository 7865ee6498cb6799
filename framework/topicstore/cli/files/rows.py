"""Rows of a source converted to messages, the error for a bad row, and digests of a source's first rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import xxhash

from topicstore import ImportSourceError, Message, MessageBatch

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["NO_PREFIX", "BadRowError", "Prefix", "RawRows", "Rows"]


class Prefix(NamedTuple):
    """The size and digest of the text of a source's first rows. Import markers store it as an array of both."""

    size: int
    """The size of the text in bytes, uncompressed."""
    digest: bytes
    """The 128-bit XXH3 digest of the text."""


NO_PREFIX = Prefix(0, b"")


class BadRowError(ImportSourceError):
    """A row can't be converted to a message or stored. ``row`` is its number, from 0."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason

    def described_in(self, name: str) -> str:
        """Return a message with the source's name, the row's number from 1, and the reason."""
        return f"{name}, row {self.row + 1:,}: {self.reason}"


class Rows:
    """Consecutive rows of a source as messages, in a form that `Database.store` takes.

    first:   the number of the first row, from 0.
    end:     the number of the row after the last one.
    numbers: each message's row; None if every row has a message. A blank line is a row without a message.
    text:    the text of the rows, or a prefix that holds for all rows of the source.
    """

    def __init__(
        self,
        messages: list[Message] | pa.RecordBatch,
        first: int,
        end: int,
        numbers: list[int] | None = None,
        text: RawRows | Prefix | None = None,
    ) -> None:
        self.messages = messages
        self.first = first
        self.end = end
        self._numbers = numbers
        self._text = text

    def __len__(self) -> int:
        return len(self.messages)

    def number(self, message: int) -> int:
        """Return the row number of a message."""
        return self._numbers[message] if self._numbers is not None else self.first + message

    def head(self, messages: int) -> Rows:
        """Return the rows before message number ``messages``."""
        if messages >= len(self):
            return self
        kept = self.messages[:messages] if isinstance(self.messages, list) else self.messages.slice(0, messages)
        return Rows(kept, self.first, self.number(messages), self._numbers, self._text)

    def only(self, wanted: Sequence[bool]) -> Rows:
        """Return the same rows with only those messages for which ``wanted`` is true."""
        numbers = [self.number(message) for message in compress(range(len(self)), wanted)]
        if isinstance(self.messages, list):
            messages: Any = list(compress(self.messages, wanted))
        else:
            import pyarrow as pa

            messages = self.messages.filter(pa.array(wanted, pa.bool_()))
        return Rows(messages, self.first, self.end, numbers, self._text)

    def client_ids(self) -> list[str]:
        """Return each message's client id."""
        if isinstance(self.messages, list):
            return [message.client_id for message in self.messages]
        if "client_id" not in self.messages.schema.names:
            return [""] * len(self)
        return cast("list[str]", self.messages.column("client_id").to_pylist())

    def topics(self) -> list[str]:
        """Return each message's topic."""
        if isinstance(self.messages, list):
            return [message.topic for message in self.messages]
        return cast("list[str]", self.messages.column("topic").to_pylist())

    def retain_flags(self) -> int:
        """Return the number of messages with the retain flag."""
        if isinstance(self.messages, list):
            return sum(map(attrgetter("retain"), self.messages))
        if "retain" not in self.messages.schema.names:
            return 0
        import pyarrow.compute as pc

        return pc.sum(self.messages.column("retain")).as_py() or 0

    def batch(self) -> MessageBatch:
        """Return the messages as a validated batch. Raises `InvalidMessageError`."""
        if isinstance(self.messages, list):
            return MessageBatch.from_messages(self.messages)
        return MessageBatch.from_arrow(self.messages)

    def prefix(self) -> Prefix:
        """Return the prefix of the source that ends with these rows."""
        if isinstance(self._text, RawRows):
            return self._text.prefix(self.end - self.first)
        return self._text or NO_PREFIX


class RawRows:
    """The text of a batch's rows, and the hash state of all text before them."""

    def __init__(self, raw: list[bytes], size: int, before: xxhash.xxh3_128) -> None:
        self._raw = raw
        self._size = size
        self._before = before

    def prefix(self, rows: int) -> Prefix:
        """Return the prefix of the source that ends after the first ``rows`` rows of the batch."""
        hasher = self._before.copy()
        data = b"".join(self._raw[:rows])
        hasher.update(data)
        return Prefix(self._size + len(data), hasher.digest())
