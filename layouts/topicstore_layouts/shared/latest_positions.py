"""The last position of each stream, so that a reader skips streams that end before its first position.

The positions are kept in memory only. The writer records the positions that it stores. Earlier ones are read
from the engine on first use, which costs about as much as a read that finds no message in the stream.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from topicstore.contract.engine import Engine, Reader
from topicstore.contract.positions import Positions

__all__ = ["LatestPositions"]

Numbers = npt.NDArray[np.uint64]

_UNKNOWN = 0
_LEAST_ROOM = 64


class LatestPositions:
    """Last positions by stream, for one writer and any number of readers.

    ``look_up`` returns, for a stream in a view, a position after which it has no messages, or 0 if it is empty.
    Deletes are not recorded: a stream may end before the position that is returned for it, but never after.
    """

    def __init__(self, engine: Engine, look_up: Callable[[Reader, int], int]) -> None:
        self._engine = engine
        self._look_up = look_up
        self._noted = np.zeros(_LEAST_ROOM, dtype=np.uint64)
        # Separate from the writer's records: a reader may store the position it has found after the writer has
        # recorded a later one.
        self._found: dict[int, int] = {}

    def note(self, streams: Numbers, positions: Positions) -> None:
        """Record the streams and positions of messages that are about to be stored, in order of position.

        Only the writer may call this.
        """
        room = int(streams.max()) + 1
        if room > len(self._noted):
            noted = np.zeros(2 * room, dtype=np.uint64)
            noted[: len(self._noted)] = self._noted
            self._noted = noted
        self._noted[streams] = positions  # where an index occurs more than once, NumPy keeps the last value

    def reaching(self, streams: list[int], first: int) -> list[int]:
        """Return, in the given order, the streams that may have messages at or after a position."""
        if first <= 0 or not streams:
            return streams
        noted, numbers = self._noted, np.array(streams)
        latest = np.zeros(len(numbers), dtype=np.uint64)
        known = numbers < len(noted)
        latest[known] = noted[numbers[known]]
        unknown = np.flatnonzero(latest == _UNKNOWN)
        latest[unknown] = self._stored(numbers[unknown].tolist())
        reached: list[int] = numbers[latest >= np.uint64(first)].tolist()
        return reached

    def _stored(self, streams: list[int]) -> list[int]:
        missing = [stream for stream in streams if stream not in self._found]
        if missing:
            with self._engine.snapshot() as view:  # a snapshot's scans take a third of the time of the engine's own
                self._found.update((stream, self._look_up(view, stream)) for stream in missing)
        return list(map(self._found.__getitem__, streams))
