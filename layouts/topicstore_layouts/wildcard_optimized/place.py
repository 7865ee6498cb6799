"""The place of a reader in a stream.

Within an epoch messages are ordered by hash, so a position doesn't define the messages that a reader has read. Also,
the bounds of calls may rise or fall, and may lie in the middle of an epoch. The part of the current epoch that a reader
has read is a **staircase**: steps ``(key, position)``, keys rising and positions falling. The reader has read every
message whose key is below a step's key and whose position is not above that step's position, all messages of earlier
epochs, and none of later ones.

Stored form, big-endian: the epoch in 8 bytes, and for each step the key and the position within the epoch. The key
has as many bytes as `Epochs.key_bits` and one more bit take; the position as many as `Epochs.position_bits` take.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

__all__ = ["Epochs", "Place", "Span"]

_EPOCH = 8
MOST_STEPS = 64
"""The most steps of a place. Only a read in the same epoch with a lower bound than all before adds a step."""

Step = tuple[int, int]


@attrs.frozen
class Epochs:
    """The division of a stream's positions and keys into an epoch and lower bits."""

    position_bits: int
    """Bits of a position within its epoch; 0 if keys are positions, each of which is its own epoch."""
    key_bits: int
    """Bits of a key within its epoch."""

    @property
    def last_position(self) -> int:
        """The highest position within an epoch."""
        return (1 << self.position_bits) - 1

    @property
    def end(self) -> int:
        """The number after the highest key within an epoch."""
        return 1 << self.key_bits

    def top(self, epoch: int, bound: int) -> int:
        """Return the highest position within an epoch that is not above ``bound``."""
        return self.last_position if bound >> self.position_bits > epoch else bound & self.last_position


@attrs.frozen
class Span:
    """A range of keys to scan: from ``start`` to before ``end``, for messages at positions ``first`` to ``last``."""

    start: int
    end: int
    first: int
    last: int
    whole: bool
    """Whether all keys in the range have such positions."""


@attrs.frozen
class Place:
    """The messages that a reader has read: those of all epochs before ``epoch``, and those below its ``steps``."""

    epochs: Epochs
    epoch: int
    steps: tuple[Step, ...] = ()

    # --- as bytes ---

    @classmethod
    def before(cls, epochs: Epochs, position: int) -> Place:
        """Return the place of a reader whose first message may have ``position``."""
        epoch, low = position >> epochs.position_bits, position & epochs.last_position
        return cls(epochs, epoch, ((epochs.end, low - 1),) if low else ())

    def encode(self) -> bytes:
        """Return the place as bytes, for `decode`."""
        key_size, position_size = _sizes(self.epochs)
        parts = [self.epoch.to_bytes(_EPOCH, "big")]
        for key, position in self.steps:
            parts += key.to_bytes(key_size, "big"), position.to_bytes(position_size, "big")
        return b"".join(parts)

    @classmethod
    def decode(cls, epochs: Epochs, data: bytes) -> Place:
        """Decode the bytes that `encode` returned. Raises `ValueError` if they are not a place with these epochs."""
        key_size, position_size = _sizes(epochs)
        size = key_size + position_size
        count, rest = divmod(len(data) - _EPOCH, size)
        if rest or not 0 <= count <= MOST_STEPS:
            raise ValueError(f"{len(data)} bytes")
        epoch = int.from_bytes(data[:_EPOCH], "big")
        steps = []
        for at in range(_EPOCH, len(data), size):
            key = int.from_bytes(data[at : at + key_size], "big")
            steps.append((key, int.from_bytes(data[at + key_size : at + size], "big")))
        place = cls(epochs, epoch, tuple(steps))
        place._check()
        return place

    def _check(self) -> None:
        last_key, last_position = 0, self.epochs.last_position + 1
        for key, position in self.steps:
            if not (last_key < key <= self.epochs.end and position < last_position):
                raise ValueError("steps out of order")
            last_key, last_position = key, position
        if self.steps and not self.epochs.position_bits:
            raise ValueError("steps in a stream without epochs")

    # --- reading on ---

    @property
    def reached(self) -> int:
        """The highest position that the reader may have read; -1 if it has read nothing."""
        low = self.epoch << self.epochs.position_bits
        return low + self.steps[0][1] if self.steps else low - 1

    def spans(self, bound: int) -> Iterator[Span]:
        """Yield the spans that are left to read up to a position, in order of keys."""
        epochs, bits = self.epochs, self.epochs.key_bits
        last_epoch = bound >> epochs.position_bits
        if self.epoch > last_epoch:
            return
        base, low, top = self.epoch << bits, self.epoch << epochs.position_bits, epochs.top(self.epoch, bound)
        start = 0
        for key, position in self.steps:
            if position < top:
                yield Span(base + start, base + key, low + position + 1, low + top, whole=False)
            start = key
        yield from self._behind(base + start, last_epoch, bound)

    def _behind(self, start: int, last_epoch: int, bound: int) -> Iterator[Span]:
        """Yield the spans after the steps: all whole epochs as one, and the epoch that the bound cuts."""
        epochs, bits = self.epochs, self.epochs.key_bits
        cut = epochs.top(last_epoch, bound) < epochs.last_position
        end = last_epoch + (not cut) << bits
        if start < end:
            yield Span(start, end, 0, bound, whole=True)
        if cut and max(start, end) < end + epochs.end:
            first = last_epoch << epochs.position_bits
            yield Span(max(start, end), end + epochs.end, first, bound, whole=False)

    def moved(self, key: int, bound: int) -> Place:
        """Return the place of a reader that has read all keys below ``key``, at least 1, up to position ``bound``.

        Raises `ValueError` if the place would have more than `MOST_STEPS` steps.
        """
        epochs = self.epochs
        epoch = key - 1 >> epochs.key_bits
        below, top = key - (epoch << epochs.key_bits), epochs.top(epoch, bound)
        if below == epochs.end and top == epochs.last_position:
            return Place(epochs, epoch + 1)
        old = self.steps if epoch == self.epoch else ()
        above = [(step, to) for step, to in old if to > top or (to == top and step >= below)]
        behind = [(step, to) for step, to in old if to < top and step > below]
        new = [(below, top)] if not above or above[-1][0] < below else []
        steps = (*above, *new, *behind)
        if len(steps) > MOST_STEPS:
            raise ValueError(f"it stopped within one epoch at {MOST_STEPS} ever lower bounds; go on with a higher one")
        return Place(epochs, epoch, steps)

    def done(self, bound: int) -> Place:
        """Return the place of a reader that has read everything up to position ``bound``."""
        last_epoch = bound >> self.epochs.position_bits
        return self if last_epoch < self.epoch else self.moved(last_epoch + 1 << self.epochs.key_bits, bound)


def _sizes(epochs: Epochs) -> tuple[int, int]:
    """Return the number of bytes of a step's key and of its position."""
    return -(-(epochs.key_bits + 1) // 8), -(-epochs.position_bits // 8)
