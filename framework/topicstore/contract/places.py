"""`Place`: the progress of a consumer in all shards of a database."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Self

from .errors import InvalidCursorError

__all__ = ["Place"]

_TEXT = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{1,16})+")


class Place(dict[int, int]):
    """A consumer's progress in one database: by shard, the position up to which everything was read.

    It includes the id of the database, because positions of another database mean nothing: a subscription could wait
    forever for positions that its database never reaches. ``str`` returns a text that `parse` accepts.
    """

    __slots__ = ("database",)

    def __init__(self, database: bytes, positions: Mapping[int, int]) -> None:
        super().__init__(positions)
        self.database = database
        """The sixteen bytes that identify the database (`topicstore.Database.id`)."""

    def __str__(self) -> str:
        positions = (f"{self.get(shard, 0):x}" for shard in range(max(self, default=0) + 1))
        return "-".join((self.database.hex(), *positions))

    def __repr__(self) -> str:
        return f"Place.parse({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text that ``str`` returns for a place. Raises `InvalidCursorError` for any other text."""
        if not isinstance(text, str) or not _TEXT.fullmatch(text):
            raise InvalidCursorError(f"{str(text)[:80]!r} is not a place")
        database, *positions = text.split("-")
        return cls(bytes.fromhex(database), {shard: int(one, 16) for shard, one in enumerate(positions)})
