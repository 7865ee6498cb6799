"""`Incoming`: the messages that clients publish with one call, given as objects or as columns."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from topicstore.contract.batch import FIELDS, MessageBatch
from topicstore.contract.columns import to_list
from topicstore.contract.errors import InvalidMessageError, TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.validation import check_equal_lengths

from .live_rows import Refused

__all__ = ["Incoming"]


@attrs.frozen
class Incoming:
    """Messages by row, with the columns that sessions check. The other fields are checked on publishing."""

    messages: Sequence[Message] | MessageBatch
    topics: list[str]
    client_ids: list[str]
    qos: list[int]

    @classmethod
    def of_objects(cls, messages: Sequence[Message], refused: Refused, *, partial: bool) -> Incoming:
        """Return messages given as objects. A row that is no `Message` is refused or, without ``partial``, raised."""
        if not set(map(type, messages)) <= {Message}:
            messages = list(messages)
            for row, message in enumerate(messages):
                if not isinstance(message, Message):
                    error = InvalidMessageError(f"a {type(message).__name__} is not a Message", row)
                    if not partial:
                        raise error
                    refused[row], messages[row] = error, Message("", b"")
        return cls(messages, [m.topic for m in messages], [m.client_id for m in messages], [m.qos for m in messages])

    @classmethod
    def of_batch(cls, batch: MessageBatch) -> Incoming:
        """Return messages given as columns. Raises `InvalidMessageError` if these have different lengths."""
        check_equal_lengths(len(getattr(batch, name)) for name in FIELDS)
        return cls(batch, to_list(batch.topics), to_list(batch.client_ids), to_list(batch.qos))

    def __len__(self) -> int:
        return len(self.topics)

    def rows(self, rows: Sequence[int]) -> Sequence[Message] | MessageBatch:
        """Return some rows, in the form in which they were given."""
        if isinstance(self.messages, MessageBatch):
            return self.messages if len(rows) == len(self) else self.messages.take(np.array(rows, np.intp))
        return [self.messages[row] for row in rows]

    def fault(self, row: int) -> TopicstoreError | None:
        """Return the error because of which a row alone can't be stored; None if it can be."""
        try:
            MessageBatch.of(self.rows([row]))
        except InvalidMessageError as bad:
            return type(bad)(bad.reason, row)
        return None
