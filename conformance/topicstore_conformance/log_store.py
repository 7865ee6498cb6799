"""`LogStoreSuite`: tests of the contract `topicstore.contract.log_store`.

A subclass overrides the fixture ``url``, which returns the URL of an empty store, and ``options`` if the store needs
some. A store that exists in one process only sets ``shared`` to False.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.log_store import LogStore, ObjectExistsError, ObjectNotFoundError
from topicstore.plugins import load_target, registry

from topicstore_conformance.faults.threads import together

__all__ = ["LogStoreSuite"]

_PARTS = st.text("a0.-_=Z", min_size=1, max_size=3).filter(lambda part: part[0] != ".")
_NAMES = st.lists(_PARTS, min_size=1, max_size=3).map("/".join)
_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), _NAMES, st.binary(max_size=40)),
        st.tuples(st.just("get"), _NAMES, st.just(b"")),
        st.tuples(st.just("delete"), _NAMES, st.just(b"")),
        st.tuples(st.just("names"), _NAMES, st.just(b"")),
        st.tuples(st.just("after"), _NAMES, st.just(b"")),
    ),
    max_size=25,
)


def opened(url: str, options: Mapping[str, Any]) -> LogStore:
    """Open the log store at a URL with the plugin that is registered for its scheme."""
    target: type[LogStore] = load_target(registry().log_store(urlsplit(url).scheme))
    return target.open(url, options)


class LogStoreSuite:
    """Tests that every log store must pass."""

    shared: ClassVar[bool] = True
    """Whether another process, or a second opening, sees the same objects."""
    examples: ClassVar[int] = 40
    """The number of random histories that are tried."""
    racers: ClassVar[int] = 8

    @pytest.fixture
    def url(self) -> str:
        """Return the URL of an empty store."""
        raise NotImplementedError("a suite says which store it is about")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Return the options with which the store is opened; none by default."""
        return {}

    @pytest.fixture
    def store(self, url: str, options: dict[str, Any]) -> Iterator[LogStore]:
        """Yield the opened store, and close it afterwards."""
        store = opened(url, options)
        yield store
        store.close()

    def test_any_history_gives_what_a_dict_would(self, store: LogStore) -> None:
        """In any sequence of calls, each call has the same result as on a dict, and names come in order."""
        number = 0

        @settings(max_examples=self.examples, suppress_health_check=list(HealthCheck))
        @given(_OPERATIONS)
        def run(operations: list[tuple[str, str, bytes]]) -> None:
            nonlocal number
            number += 1
            check_history(store, f"h{number}", operations)

        run()

    @pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", ".a", "a/.b", "a/../b", "a b", "ä", "a\n", "x" * 513])
    def test_names_that_not_all_stores_could_keep_are_refused(self, store: LogStore, name: str) -> None:
        """A name that is empty, malformed or longer than 512 characters is rejected, and nothing is created.

        Malformed names have an empty part, a part that begins with a dot, or a character that some stores don't allow.
        """
        with pytest.raises(InvalidArgumentError):
            store.create(name, b"x")
        assert [] == list(store.names("a"))

    @pytest.mark.parametrize("size", [0, 1, 1 << 20, 9 << 20])
    def test_objects_come_back_as_they_were(self, store: LogStore, size: int) -> None:
        """Objects of any size are read back unchanged, and creating one under a taken name fails at any size."""
        data = (bytes(range(256)) * (size // 256 + 1))[:size]
        store.create("size", data)
        assert data == store.get("size")
        with pytest.raises(ObjectExistsError):
            store.create("size", data + b"x")
        assert data == store.get("size")

    def test_more_names_than_a_page_has_come_in_order(self, store: LogStore) -> None:
        """A listing that spans several pages yields every name after the given one, in order and without gaps."""
        names = [f"many/{number:020}" for number in range(2_100)]
        for name in reversed(names):
            store.create(name, b"")
        chunks = list(store.names("many", names[99]))
        assert names[100:] == [name for chunk in chunks for name in chunk]
        assert all(chunks)

    def test_one_of_many_threads_creates(self, store: LogStore) -> None:
        """If several threads create the same name, exactly one succeeds, and the object holds that thread's data."""
        names = [f"race/{number}" for number in range(15)]
        start = threading.Barrier(self.racers)
        won: list[list[str]] = [[] for _ in range(self.racers)]

        def race(racer: int) -> None:
            for name in names:
                start.wait()
                won[racer] += created(store, name, racer)

        together(*(partial(race, racer) for racer in range(self.racers)))
        check_winners(store, names, won)

    def test_one_of_many_processes_creates(self, store: LogStore, url: str, options: dict[str, Any]) -> None:
        """If several processes create the same name, exactly one succeeds, and the object holds that process's data."""
        if not self.shared:
            pytest.skip("the store lives in one process")
        names = [f"race/{number}" for number in range(15)]
        context = multiprocessing.get_context("spawn")
        start, racers = context.Barrier(4), range(4)
        results = context.SimpleQueue()
        started = [
            context.Process(target=race_in_process, args=(url, options, names, racer, start, results))
            for racer in racers
        ]
        for process in started:
            process.start()
        by_racer = dict(results.get() for _ in started)
        for process in started:
            process.join()
        check_winners(store, names, [by_racer[racer] for racer in racers])

    def test_a_second_opening_sees_the_same(self, store: LogStore, url: str, options: dict[str, Any]) -> None:
        """An object that one opening of a store creates or deletes is created or deleted for another opening too."""
        if not self.shared:
            pytest.skip("the store lives in one process")
        store.create("a/b", b"1")
        other = opened(url, options)
        assert b"1" == other.get("a/b")
        with pytest.raises(ObjectExistsError):
            other.create("a/b", b"2")
        other.delete("a/b")
        with pytest.raises(ObjectNotFoundError):
            store.get("a/b")


def check_history(store: LogStore, root: str, operations: list[tuple[str, str, bytes]]) -> None:
    """Apply the same operations to the store and to a dict, and compare the results."""
    model: dict[str, bytes] = {}
    for what, below, data in operations:
        # Stores need not support an object whose name is a path prefix of another's, so the depth is part of each name.
        name = f"{root}/{below.count('/')}/{below}"
        if what == "create":
            assert created(store, name, 0, data) == ([] if name in model else [name])
            model.setdefault(name, data)
        elif what == "get" and name in model:
            assert model[name] == store.get(name)
        elif what == "get":
            with pytest.raises(ObjectNotFoundError):
                store.get(name)
        elif what == "delete":
            store.delete(name)
            model.pop(name, None)
        else:
            after = name if what == "after" else ""
            found = [one for chunk in store.names(root, after) for one in chunk]
            assert sorted(one for one in model if one > after) == found


def created(store: LogStore, name: str, racer: int, data: bytes | None = None) -> list[str]:
    """Try to create an object; return a list with its name if that succeeded, else an empty list."""
    try:
        store.create(name, b"%d" % racer if data is None else data)
    except ObjectExistsError:
        return []
    return [name]


def race_in_process(
    url: str, options: dict[str, Any], names: list[str], racer: int, start: threading.Barrier, results: Any
) -> None:
    """Try to create each name at the same time as other processes; put the names that succeeded into ``results``."""
    store = opened(url, options)
    won: list[str] = []
    for name in names:
        start.wait()
        won += created(store, name, racer)
    results.put((racer, won))
    store.close()


def check_winners(store: LogStore, names: list[str], won: list[list[str]]) -> None:
    """Check that each name was created by exactly one racer, and holds that racer's data."""
    assert names == sorted((name for one in won for name in one), key=names.index)
    for racer, winnings in enumerate(won):
        for name in winnings:
            assert b"%d" % racer == store.get(name)
