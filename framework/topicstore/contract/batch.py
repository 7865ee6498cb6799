"""`MessageBatch`: many messages as columns, the form in which topicstore processes messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from . import validation
from .columns import ArrowColumn, Column, Constant, Indices, concat, take, to_iterable, to_list, window
from .errors import InvalidArgumentError, InvalidMessageError
from .model import Message, MessageId
from .positions import Positions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ALL_FIELDS", "FIELDS", "ArrowStream", "MessageBatch", "Messages", "unread"]

FIELDS = ("topics", "payloads", "client_ids", "qos", "retain", "timestamps", "properties")
"""The columns of a batch, in the order of the arguments of `Message`."""
ALL_FIELDS = frozenset(FIELDS)
"""The columns of a batch as a set: those that a read returns unless its caller names fewer."""
_UNREAD: dict[str, Any] = {
    "payloads": b"",
    "client_ids": "",
    "qos": 0,
    "retain": False,
    "timestamps": 0,
    "properties": None,
}


def unread(name: str, rows: int) -> Constant[Any]:
    """Return a placeholder for the column ``name`` of stored messages, for callers that don't read this column."""
    return Constant(_UNREAD[name], rows)


class ArrowStream(Protocol):
    """An object with Arrow's PyCapsule interface for streams, such as those of PyArrow, Polars, pandas and DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class MessageBatch:
    """Messages as columns (see `topicstore.contract.columns`).

    Create a batch with `of`, `from_messages`, `from_arrow` or `replace`, which check the messages. The constructor
    doesn't check them: it is for layouts, whose messages were checked when they were stored. `Database.store` checks
    every batch that is passed to it. Treat a batch and its columns as immutable.

    Stored messages have `positions` and ``shards``, a column of shard numbers, which is None until they are stored.
    """

    __slots__ = (*FIELDS, "_payload_bytes", "_positions", "shards")

    def __init__(
        self,
        topics: Column,
        payloads: Column,
        client_ids: Column,
        qos: Column,
        retain: Column,
        timestamps: Column,
        properties: Column,
        *,
        positions: Positions | int | None = None,
        shards: Column | None = None,
        payload_bytes: int | None = None,
    ) -> None:
        self.topics = topics
        self.payloads = payloads
        self.client_ids = client_ids
        self.qos = qos
        self.retain = retain
        self.timestamps = timestamps
        self.properties = properties
        self._positions = positions
        """The positions. For one message an integer is allowed, at a tenth of the cost of an array."""
        self.shards = shards
        self._payload_bytes = payload_bytes

    # --- creating batches ---

    @classmethod
    def empty(cls) -> MessageBatch:
        """Return a batch of no rows."""
        return cls([], [], [], [], [], [], [])

    @classmethod
    def of(cls, messages: Messages) -> MessageBatch:
        """Return a checked batch of messages, given as one object or several, as a batch or as Arrow data.

        An Arrow stream is read to its end. Raises `InvalidMessageError`, `InvalidArgumentError` for an argument
        of another type, and the errors of reading the stream.
        """
        if isinstance(messages, MessageBatch):
            return messages.checked()  # the constructor of a batch checks nothing
        if hasattr(messages, "__arrow_c_array__") or hasattr(messages, "__arrow_c_stream__"):
            from .arrow import whole

            return cls.concat([cls.from_arrow(batch) for batch in whole(messages)])
        if isinstance(messages, Message):
            return cls.from_messages([messages])
        if isinstance(messages, Iterable) and not isinstance(messages, (str, bytes)):
            return cls.from_messages(messages)
        raise InvalidArgumentError(
            f"messages come as a list (say), a MessageBatch or an Arrow table, not as a {type(messages).__name__}"
        )

    @classmethod
    def from_messages(cls, messages: Iterable[Message]) -> MessageBatch:
        """Check messages and convert them to columns.

        Fields are checked one after the other. Raises `InvalidMessageError` for the first message with an invalid
        value.
        """
        rows = messages if isinstance(messages, list) else list(messages)
        if not rows:
            return cls.empty()
        if len(rows) == 1 and isinstance(rows[0], Message) and validation.is_plain(rows[0]):
            return cls._of_plain(rows[0])
        try:
            # One comprehension for each field: the fastest way to take fields out of objects in Python.
            topics = validation.check_topics([m.topic for m in rows])
            payloads, size = validation.sized_payloads([m.payload for m in rows])
            return cls(
                topics,
                payloads,
                validation.check_client_ids([m.client_id for m in rows]),
                validation.check_qos([m.qos for m in rows]),
                validation.check_flags([m.retain for m in rows]),
                validation.check_timestamps([m.timestamp for m in rows]),
                validation.check_properties([m.properties for m in rows]),
                payload_bytes=size,
            )
        except AttributeError:
            for index, row in enumerate(rows):
                if not isinstance(row, Message):
                    raise InvalidMessageError(f"a {type(row).__name__} is not a Message", index) from None
            raise

    @classmethod
    def _of_plain(cls, message: Message) -> MessageBatch:
        """Return a batch of one message that `topicstore.contract.validation.is_plain` accepts."""
        return cls(
            Constant(message.topic, 1),
            [message.payload],
            Constant(message.client_id, 1),
            Constant(message.qos, 1),
            Constant(message.retain, 1),
            _NONE,
            _NONE,
            payload_bytes=len(message.payload),
        )

    @classmethod
    def from_arrow(cls, batch: pa.RecordBatch) -> MessageBatch:
        """Return a batch with the columns of a RecordBatch of `topicstore.SCHEMA`, or of one that casts to it."""
        from .arrow import columns_of

        columns = columns_of(batch)
        return cls(*(columns[name] for name in FIELDS))

    def replace(self, **columns: Column) -> MessageBatch:
        """Return a batch with some columns replaced; the new ones are checked.

        The names of columns are those in `FIELDS`. Example, in a plugin that encrypts payloads:
        ``request.batch = request.batch.replace(payloads=[seal(p) for p in request.batch.payloads])``.
        """
        new: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        size = None if "payloads" in columns else self._payload_bytes
        for name, column in columns.items():
            if name not in validation.CHECKS:
                raise InvalidMessageError(f"a batch has no column {name!r}")
            new[name] = column if len(column) == 0 else validation.CHECKS[name](to_list(column))
        validation.check_equal_lengths(len(new[name]) for name in FIELDS)
        return MessageBatch(**new, positions=self._positions, shards=self.shards, payload_bytes=size)

    def checked(self) -> MessageBatch:
        """Return the messages with every column checked, however the batch was made."""
        return self.replace(**{name: getattr(self, name) for name in FIELDS})

    def placed(self, positions: Positions | int, timestamps: Column, shard: int) -> MessageBatch:
        """Return the same messages with the positions and timestamps that a shard assigned.

        The position of a single message may be an integer.
        """
        return MessageBatch(
            self.topics,
            self.payloads,
            self.client_ids,
            self.qos,
            self.retain,
            timestamps,
            self.properties,
            positions=positions,
            shards=Constant(shard, len(self)),
            payload_bytes=self._payload_bytes,
        )

    @classmethod
    def concat(cls, batches: Sequence[MessageBatch]) -> MessageBatch:
        """Return the rows of all batches, one batch after the other. Either all have positions, or none has."""
        batches = [batch for batch in batches if len(batch)]
        if not batches:
            return cls.empty()
        if len(batches) == 1:
            return batches[0]
        positions = [batch.positions for batch in batches if batch.stored]
        shards = [batch.shards for batch in batches if batch.shards is not None]
        if {len(positions), len(shards)} - {0, len(batches)}:
            raise InvalidMessageError("some of the messages are stored and others aren't")
        return cls(
            *(concat([getattr(batch, name) for batch in batches]) for name in FIELDS),
            positions=np.concatenate(positions) if positions else None,
            shards=concat(shards) if shards else None,
        )

    # --- reading batches ---

    @property
    def stored(self) -> bool:
        """Whether the messages are stored, and therefore have positions."""
        return self._positions is not None

    @property
    def positions(self) -> Positions:
        """The position of each row, strictly increasing within a shard.

        Raises `InvalidMessageError` before the messages are stored.
        """
        positions = self._positions
        if isinstance(positions, int):
            positions = self._positions = np.array([positions], np.uint64)
        if positions is not None:
            return positions
        if len(self):
            raise InvalidMessageError("messages have positions once they are stored")
        return np.empty(0, np.uint64)

    @property
    def span(self) -> tuple[int, int]:
        """The positions of the first and last row. Raises `InvalidMessageError` if the batch has no positions yet."""
        position = self._positions
        if isinstance(position, int):
            return position, position
        positions = self.positions
        return int(positions[0]), int(positions[-1])

    def __len__(self) -> int:
        return len(self.payloads)  # the only column of new messages that is always a list

    def __getitem__(self, rows: slice) -> MessageBatch:
        if not isinstance(rows, slice):
            raise TypeError("a batch is sliced; its messages are to_messages()")
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise InvalidMessageError("a batch is sliced in steps of one")
        if start == 0 and stop == len(self):
            return self
        return self._picked(window, start, stop)

    def take(self, rows: Indices) -> MessageBatch:
        """Return the rows with these indices, in the order of the indices."""
        return self._picked(take, rows)

    def _picked(self, pick: Callable[..., Column], *rows: Any) -> MessageBatch:
        return MessageBatch(
            *(pick(getattr(self, name), *rows) for name in FIELDS),
            positions=None if self._positions is None else np.asarray(pick(self.positions, *rows)),
            shards=None if self.shards is None else pick(self.shards, *rows),
        )

    def to_messages(self) -> list[Message]:
        """Return the messages as `Message` objects."""
        columns = (
            self.topics, self.payloads, self.client_ids, self.qos, self.retain, self.timestamps, self.properties
        )  # fmt: skip
        values = [repeat(one.value, one.length) if type(one) is Constant else to_iterable(one) for one in columns]
        return list(map(Message, *values))

    def ids(self) -> list[MessageId]:
        """Return the id of each stored message, in the order of the rows."""
        if not len(self):
            return []
        if self._positions is None or self.shards is None:
            raise InvalidMessageError("messages have ids once they are stored")
        return list(map(MessageId, to_iterable(self.shards), self.positions.tolist()))

    def to_arrow(self, *, ids: bool = False, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return a RecordBatch of `topicstore.SCHEMA`; with ``ids``, of `topicstore.SCHEMA_WITH_IDS`.

        With ``columns``, return only these columns of `topicstore.SCHEMA_WITH_IDS`, in the given order. Raises
        `InvalidArgumentError` for other names, and `InvalidMessageError` for ids of messages that aren't stored.
        """
        from .arrow import record_batch, selected

        own = {name: getattr(self, name) for name in FIELDS}
        own |= {"positions": self.positions if self.stored else None, "shards": self.shards}
        return record_batch(own, len(self), selected(columns, ids=ids))

    def payload_bytes(self) -> int:
        """Return the total size of the payloads in bytes. Computed once, usually when the payloads are checked."""
        if self._payload_bytes is None:
            self._payload_bytes = _size(self.payloads)
        return self._payload_bytes

    def __repr__(self) -> str:
        return f"<MessageBatch of {len(self)}>"


_NONE: Constant[None] = Constant(None, 1)


def _size(payloads: Column) -> int:
    if isinstance(payloads, ArrowColumn):
        from .arrow import binary_size

        return binary_size(payloads.toarrow())
    return sum(map(len, to_iterable(payloads)))


Messages: TypeAlias = Message | Iterable[Message] | MessageBatch | ArrowStream
"""The forms in which messages may be given: one object or several, a batch, or Arrow data."""
