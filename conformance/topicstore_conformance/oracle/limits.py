"""Sizes, counts and numbers at which code tends to behave differently, and texts that collide under common hashes.

The suites draw their limits from here. They are the largest values of length fields, and the usual sizes of pages and
buffers, each also plus and minus one.
"""

from __future__ import annotations

from topicstore.contract.positions import MAX_TIME

__all__ = ["COLLIDING", "MEGABYTE", "TIMES", "counts", "numbers", "sizes", "unlike"]

MEGABYTE = 1 << 20
_WIDTHS = (1 << 7, 1 << 8, 1 << 15, 1 << 16, 1 << 24, 1 << 31, 1 << 32)
"""The ends (exclusive) of signed and unsigned fields of one to four bytes."""
_PAGES = (16, 64, 100, 1_000, 1_024, 4_096, 10_000, 16_384, 100_000)
_BUFFERS = (MEGABYTE, 16 * MEGABYTE, 32 * MEGABYTE, 64 * MEGABYTE)


def sizes(most: int, least: int = 0) -> list[int]:
    """Return ascending sizes in bytes from ``least`` to ``most`` (inclusive), near limits of integers and buffers."""
    near = {size + by for size in (*_WIDTHS, *_PAGES, *_BUFFERS) for by in (-1, 0, 1)}
    return sorted(size for size in near | {0, 1, 2, 3, least, most} if least <= size <= most)


def counts(most: int, least: int = 0) -> list[int]:
    """Return ascending numbers of items from ``least`` to ``most`` (inclusive), the same as those of `sizes`."""
    return sizes(most, least)


def numbers(bits: int) -> list[int]:
    """Return ascending unsigned integers of ``bits`` bits, near powers of two and the limit of integers in a float."""
    ends = {1 << width for width in (7, 8, 15, 16, 24, 31, 32, 52, 53, 63) if width < bits}
    near = {end + by for end in ends for by in (-1, 0, 1)}
    return sorted({0, 1, (1 << bits) - 2, (1 << bits) - 1} | {number for number in near if number < 1 << bits})


def unlike(size: int, number: int = 0) -> bytes:
    """Return a value of ``size`` bytes; the values for up to 251 consecutive ``number`` differ from each other.

    The period of its bytes is a prime number, so that any two pages of a value differ.
    """
    turn = number % 251
    period = bytes(range(turn, 251)) + bytes(range(turn))
    return (period * (size // 251 + 1))[:size]


TIMES = (0, 1, *(end + by for end in (1 << 31, 1 << 32, 1 << 52) for by in (-1, 0, 1)), MAX_TIME - 1, MAX_TIME)
"""Timestamps in microseconds: the first and the last that a message may have, and the ends of widths."""

COLLIDING: tuple[tuple[str, str], ...] = (
    ("plumless", "buckeroo"),  # crc32
    ("codding", "gnu"),  # crc32
    ("liquid", "costarring"),  # FNV-1a of 32 bits
    ("declinate", "macallums"),  # FNV-1a of 32 bits
    ("altarage", "zinke"),  # FNV-1a of 32 bits
    ("creamwove", "quists"),  # FNV-1 of 32 bits
    ("abab", "aaca"),  # adler32
    ("Aa", "BB"),  # a sum by powers of 31
    ("hetairas", "mentioner"),  # a sum by powers of 33
    ("tic", "cit"),  # sums and exclusive ors of the bytes
)
"""Pairs of texts with equal hashes, of hashes that are used for names."""
