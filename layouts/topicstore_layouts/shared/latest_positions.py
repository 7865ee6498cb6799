"""Up to where each stream has messages, so that who reads from late on leaves the other streams alone.

In memory only: the writer notes what it stores, and what was there before is looked up when it is
first asked for, which costs about as much as finding nothing in the stream.
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
    """For one writer and any number of readers.

    ``look_up`` returns, of a stream as a view has it, a position behind which it has nothing stored, or 0 if it
    has nothing at all. Deletes are not noted: a stream may have less than is said here, and never has more.
    """

    def __init__(self, engine: Engine, look_up: Callable[[Reader, int], int]) -> None:
        self._engine = engine
        self._look_up = look_up
        self._noted = np.zeros(_LEAST_ROOM, dtype=np.uint64)
        # Apart from what the writer notes: a reader may come to write down what it has found after
        # the writer noted more.
        self._found: dict[int, int] = {}

    def note(self, streams: Numbers, positions: Positions) -> None:
        """Messages are about to be stored, each with its stream, in order of positions. For the writer alone."""
        room = int(streams.max()) + 1
        if room > len(self._noted):
            noted = np.zeros(2 * room, dtype=np.uint64)
            noted[: len(self._noted)] = self._noted
            self._noted = noted
        self._noted[streams] = positions  # of those of one stream, the last one stays

    def reaching(self, streams: list[int], first: int) -> list[int]:
        """Return those of the streams that may have messages at or behind a position, in the same order."""
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
            with self._engine.snapshot() as view:  # whose scans cost a third of the engine's own
                self._found.update((stream, self._look_up(view, stream)) for stream in missing)
        return list(map(self._found.__getitem__, streams))
