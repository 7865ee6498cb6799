"""The cluster's documents: a numbered sequence, to which any site can append."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.errors import CorruptionError
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.replication import names
from topicstore.replication.documents import Documents
from topicstore.replication.objects import ClusterDocument
from topicstore_conformance.faults.threads import together

from .conftest import Gate, Line, Objects

Make = Callable[[int, ClusterDocument | None], ClusterDocument | None]


def adds(name: str) -> Make:
    """Return a change that adds a policy with the number of the new document."""

    def make(number: int, document: ClusterDocument | None) -> ClusterDocument | None:
        policies = document.policies if document is not None else {}
        if name in policies:
            return None
        return ClusterDocument(
            id=secrets.token_bytes(16), database=b"", sites={}, shards=(), policies={**policies, name: number}
        )

    return make


def cluster(store: Objects, *commands: str | Gate) -> Documents:
    return Documents(Line(store, *commands), lambda _: None)


def test_there_is_no_document_at_first() -> None:
    assert (0, None) == cluster(Objects()).newest()


def test_each_document_is_made_of_the_one_before() -> None:
    store = Objects()
    one, other = cluster(store), cluster(store)
    one.change(adds("a"))
    number, document = other.change(adds("b"))
    assert (2, {"a": 1, "b": 2}) == (number, document.policies)  # type: ignore[union-attr]
    assert (number, document) == one.newest() == one.change(lambda *_: None)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["", "drop", "lose", "late", "refuse"]), max_size=12))
def test_whatever_answers_are_lost_a_change_is_made_once(commands: list[str]) -> None:
    """Whichever answers are lost, each change is made once, as the numbers in the policies show."""
    store = Objects()
    line = Line(store, *commands)
    for name in "abc":
        Documents(line, lambda _: None).change(adds(name))
        line.arrive()
    assert {"a": 1, "b": 2, "c": 3} == cluster(store).newest()[1].policies  # type: ignore[union-attr]


def test_of_many_that_change_it_at_once_all_do() -> None:
    store = Objects()
    together(*(partial(cluster(store).change, adds(f"{number}")) for number in range(12)))
    number, document = cluster(store).newest()
    assert 12 == number
    assert sorted(document.policies.values()) == list(range(1, 13))  # type: ignore[union-attr]


def test_a_document_in_the_place_of_one_that_was_deleted_does_not_count() -> None:
    """A document with the number of a deleted one is ignored; a paused site may write such a document."""
    store, gate = Objects(), Gate()
    paused = cluster(store, gate)
    cluster(store).change(adds("a"))
    result: list[tuple[int, ClusterDocument | None]] = []
    thread = threading.Thread(target=lambda: result.append(paused.change(adds("late"))))
    thread.start()
    gate.reached()
    for name in "bcd":
        cluster(store).change(adds(name))
    cluster(store).forget(1)
    gate.open()
    thread.join()
    ((number, document),) = result
    assert (5, {"a": 1, "b": 2, "c": 3, "d": 4, "late": 5}) == (number, document.policies)  # type: ignore[union-attr]
    assert names.cluster_document(2) in store.objects


def test_giving_up_is_left_to_the_pause() -> None:
    def give_up(tries: int) -> None:
        if tries == 3:
            raise StorageUnavailableError("no answer three times")

    store = Objects()
    with pytest.raises(StorageUnavailableError, match="three times"):
        Documents(Line(store, *["drop"] * 3), give_up).change(adds("a"))
    assert (0, None) == cluster(store).newest()


def test_a_damaged_document_is_reported() -> None:
    """A damaged newest document is an error, and no older one is used instead."""
    store = Objects()
    cluster(store).change(adds("a"))
    cluster(store).change(adds("b"))
    name = names.cluster_document(2)
    store.objects[name] = store.objects[name][:-1] + bytes((store.objects[name][-1] ^ 1,))
    with pytest.raises(CorruptionError, match=f"cluster document {name}: the checksum"):
        cluster(store).newest()


def test_the_newest_is_never_forgotten() -> None:
    store = Objects()
    for name in "abc":
        cluster(store).change(adds(name))
    cluster(store).forget(0)
    assert [names.cluster_document(3)] == list(store.objects)
    assert msgspec.structs.asdict(cluster(store).newest()[1])["policies"] == {"a": 1, "b": 2, "c": 3}  # type: ignore[arg-type]
