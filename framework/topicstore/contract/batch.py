"""`MessageBatch`: many messages as columns, the form in which they travel inside topicstore."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import validation
from .columns import Column, Constant, Indices, concat, take, to_iterable, to_list, window
from .errors import InvalidArgumentError, InvalidMessageError
from .model import Message, MessageId

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FIELDS", "MessageBatch"]

FIELDS = ("topics", "payloads", "client_ids", "qos", "retain", "timestamps", "properties")
"""The columns of a batch, in the order of the arguments of `Message`."""


class MessageBatch:
    """Messages as columns (see `topicstore.contract.columns`).

    Made by `of`, `from_messages`, `from_arrow` and `replace`, which check. The constructor doesn't: it is
    for layouts, whose bytes were checked when they were stored; `Database.store` checks whatever
    batch it is handed. Treat a batch and its columns as immutable.

    ``positions`` is a uint64 array, one position a row and strictly increasing within a shard,
    or None before the messages are stored. ``shards`` is a column of shard numbers, or None.
    """

    __slots__ = (*FIELDS, "positions", "shards")

    def __init__(
        self,
        topics: Column,
        payloads: Column,
        client_ids: Column,
        qos: Column,
        retain: Column,
        timestamps: Column,
        properties: Column,
        positions: Column = None,
        shards: Column = None,
    ) -> None:
        self.topics = topics
        self.payloads = payloads
        self.client_ids = client_ids
        self.qos = qos
        self.retain = retain
        self.timestamps = timestamps
        self.properties = properties
        self.positions = positions
        self.shards = shards

    # --- making one ---

    @classmethod
    def empty(cls) -> MessageBatch:
        """Return a batch of no rows."""
        return cls([], [], [], [], [], [], [])

    @classmethod
    def of(cls, messages: Iterable[Message] | MessageBatch | pa.RecordBatch) -> MessageBatch:
        """Return a batch that was checked, out of whatever messages come in.

        Raises `InvalidMessageError`, and `InvalidArgumentError` for what holds no messages.
        """
        if isinstance(messages, MessageBatch):
            return messages.checked()  # its constructor checks nothing
        if hasattr(messages, "num_rows") and hasattr(messages, "schema"):
            import pyarrow as pa

            if isinstance(messages, pa.Table):
                return cls.concat([cls.from_arrow(batch) for batch in messages.to_batches()])
            return cls.from_arrow(messages)
        if isinstance(messages, Iterable) and not isinstance(messages, (Message, str, bytes)):
            return cls.from_messages(messages)
        raise InvalidArgumentError(
            f"messages come as a list (say), a MessageBatch or a RecordBatch, not as a {type(messages).__name__}"
        )

    @classmethod
    def from_messages(cls, messages: Iterable[Message]) -> MessageBatch:
        """Check messages and turn them into columns.

        Raises `InvalidMessageError` naming the first bad one of the first bad field.
        """
        rows = messages if isinstance(messages, list) else list(messages)
        if not rows:
            return cls.empty()
        try:
            # One comprehension a field: the quickest way out of objects that Python has.
            return cls(
                validation.check_topics([m.topic for m in rows]),
                validation.check_payloads([m.payload for m in rows]),
                validation.check_client_ids([m.client_id for m in rows]),
                validation.check_qos([m.qos for m in rows]),
                validation.check_flags([m.retain for m in rows]),
                validation.check_timestamps([m.timestamp for m in rows]),
                validation.check_properties([m.properties for m in rows]),
            )
        except AttributeError:
            for index, row in enumerate(rows):
                if not isinstance(row, Message):
                    raise InvalidMessageError(f"a {type(row).__name__} is not a Message", index) from None
            raise

    @classmethod
    def from_arrow(cls, batch: pa.RecordBatch) -> MessageBatch:
        """Check a RecordBatch of `topicstore.SCHEMA`, or what casts to it, and take its columns."""
        from .arrow import columns_of

        return cls(**columns_of(batch))

    def replace(self, **columns: Column) -> MessageBatch:
        """Return a batch with other columns in place of some, which are checked.

        Names are those of `FIELDS`. This is how a plugin that transforms messages does it:
        ``request.batch = request.batch.replace(payloads=[seal(p) for p in request.batch.payloads])``.
        """
        new = {name: getattr(self, name) for name in self.__slots__}
        for name, column in columns.items():
            if name not in validation.CHECKS:
                raise InvalidMessageError(f"a batch has no column {name!r}")
            new[name] = column if len(column) == 0 else validation.CHECKS[name](to_list(column))
        validation.check_equal_lengths(len(new[name]) for name in FIELDS)
        return MessageBatch(**new)

    def checked(self) -> MessageBatch:
        """Return the messages with every column checked, whoever made the batch."""
        return self.replace(**{name: getattr(self, name) for name in FIELDS})

    def placed(self, positions: Column, timestamps: Column, shard: int) -> MessageBatch:
        """Return the same messages with the positions and times that a shard gave them."""
        return MessageBatch(
            self.topics,
            self.payloads,
            self.client_ids,
            self.qos,
            self.retain,
            timestamps,
            self.properties,
            positions,
            Constant(shard, len(positions)),
        )

    @classmethod
    def concat(cls, batches: Sequence[MessageBatch]) -> MessageBatch:
        """Return the rows of all batches, one behind the other. All have positions, or none has."""
        batches = [batch for batch in batches if len(batch)]
        if not batches:
            return cls.empty()
        if len(batches) == 1:
            return batches[0]
        return cls(*(_concat([getattr(b, name) for b in batches]) for name in cls.__slots__))

    # --- looking at it ---

    def __len__(self) -> int:
        return len(self.topics)

    def __getitem__(self, rows: slice) -> MessageBatch:
        if not isinstance(rows, slice):
            raise TypeError("a batch is sliced; its messages are to_messages()")
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise InvalidMessageError("a batch is sliced in steps of one")
        if start == 0 and stop == len(self):
            return self
        return MessageBatch(*(_optional(window, getattr(self, n), start, stop) for n in self.__slots__))

    def take(self, rows: Indices) -> MessageBatch:
        """Return the rows with these indices, in their order."""
        return MessageBatch(*(_optional(take, getattr(self, name), rows) for name in self.__slots__))

    def to_messages(self) -> list[Message]:
        """Return `Message` objects."""
        return list(
            map(
                Message,
                to_iterable(self.topics),
                to_iterable(self.payloads),
                to_iterable(self.client_ids),
                to_iterable(self.qos),
                to_iterable(self.retain),
                to_iterable(self.timestamps),
                to_iterable(self.properties),
            )
        )

    def ids(self) -> list[MessageId]:
        """Return the ids of stored messages, row by row."""
        if not len(self):
            return []
        if self.positions is None or self.shards is None:
            raise InvalidMessageError("messages have ids once they are stored")
        return list(map(MessageId, to_iterable(self.shards), to_iterable(self.positions)))

    def to_arrow(self, *, ids: bool = False) -> pa.RecordBatch:
        """Return a RecordBatch of `topicstore.SCHEMA`; with ``ids``, of `topicstore.SCHEMA_WITH_IDS`."""
        from .arrow import record_batch

        return record_batch({name: getattr(self, name) for name in self.__slots__}, len(self), ids=ids)

    def payload_bytes(self) -> int:
        """Return the bytes of all payloads together."""
        return sum(map(len, to_iterable(self.payloads)))

    def __repr__(self) -> str:
        return f"<MessageBatch of {len(self)}>"


def _optional(change: Any, column: Column | None, *arguments: Any) -> Column | None:
    return None if column is None else change(column, *arguments)


def _concat(columns: list[Column | None]) -> Column | None:
    return None if columns[0] is None else concat(columns)
