"""`BoundedCache`: limited in entries and bytes, and thread-safe."""

from __future__ import annotations

from functools import partial
from sys import getsizeof

from hypothesis import given
from hypothesis import strategies as st
from topicstore.runtime.bounded_cache import BoundedCache
from topicstore_conformance.faults.threads import together


@given(st.lists(st.tuples(st.text(max_size=3), st.integers(0, 400)), max_size=200))
def test_what_is_found_is_what_was_kept_and_bounded(kept: list[tuple[str, int]]) -> None:
    """The cache returns stored values within its limits; a value that is too large isn't stored and evicts nothing."""
    cache: BoundedCache[str, int] = BoundedCache(entries=10, size=16_384)
    last: dict[str, int] = {}
    for key, size in kept:
        before = len(cache)
        assert size == cache.keep(key, size, size)
        fits = getsizeof(key) + size + 100 <= 256
        assert cache.get(key) == (size if fits else last.get(key) if before else None)
        if fits:
            last = {other: found for other in (*last, key) if (found := cache.get(other)) is not None}
        assert all(cache.get(other) == found for other, found in last.items())
        assert len(cache) <= 10


def test_threads_share_a_cache() -> None:
    """While other threads empty the cache, no thread gets another key's value or an error."""
    cache: BoundedCache[tuple[str, str], int] = BoundedCache(entries=50, size=1 << 20)
    wrong: list[object] = []

    def work(start: int) -> None:
        for number in range(start, 20_000, 3):
            key = ("topic", str(number % 211))
            if cache.get(key) not in (None, number % 211) or cache.keep(key, number % 211) != number % 211:
                wrong.append(key)

    together(*(partial(work, start) for start in range(4)))
    assert ([], True) == (wrong, len(cache) <= 50)
