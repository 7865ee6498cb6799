"""Decisions of the replication protocol: errors and cases that the model checker omits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.errors import CorruptionError
from topicstore.replication import owning, reading, taking_over, truncating
from topicstore.replication.heads import BEGINNING, Head, Kind, Progress
from topicstore.replication.owning import Answer, Outcome
from topicstore.replication.reading import Source


def head(**given: Any) -> Head:
    values: dict[str, Any] = {
        "index": 5,
        "kind": Kind.CHANGES,
        "epoch": 3,
        "id": b"mine",
        "site": "berlin",
        "before": b"before",
        "checksum": b"own",
        "first_position": 11,
        "last_position": 12,
    }
    return Head(**{**values, **given})


AT = Progress(5, 3, b"before", 10, 2)


def test_an_entry_is_applied_in_one_write_with_its_index() -> None:
    (write,) = reading.apply(AT, head())
    assert (True, 11, Progress(6, 3, b"own", 12, 2)) == (write.changes, write.first_position, write.progress)


def test_changes_without_messages_give_no_position() -> None:
    """Changes without messages, such as a new generation, count as changes but are given no positions."""
    (write,) = reading.apply(AT, head(first_position=0, last_position=0))
    assert (True, Progress(6, 3, b"own", 10, 2)) == (write.changes, write.progress)


@pytest.mark.parametrize("kind", [Kind.FENCE, Kind.RELEASED])
def test_a_fence_moves_the_index_and_the_epoch(kind: Kind) -> None:
    (write,) = reading.apply(AT, head(kind=kind, epoch=8, first_position=0, last_position=0))
    fence = 5 if kind is Kind.FENCE else 2
    assert (False, Progress(6, 8, b"own", 10, fence)) == (write.changes, write.progress)


def test_an_entry_of_a_lower_epoch_is_void() -> None:
    """An entry with a lower epoch is void, but remains part of the chain of checksums."""
    (write,) = reading.apply(AT, head(epoch=2))
    assert (False, Progress(6, 3, b"own", 10, 2)) == (write.changes, write.progress)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"index": 6}, "log entry 6: entry 5 was to be read"),
        ({"before": b"other"}, "log entry 5: it was written behind another entry"),
        ({"first_position": 10}, "log entry 5: its positions begin at 10, not behind 10"),
        ({"first_position": 13}, "log entry 5: its positions begin at 13"),
    ],
)
def test_an_entry_that_does_not_follow_is_reported(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorruptionError, match=reason):
        reading.apply(AT, head(**wrong))


def test_a_log_that_ends_before_what_was_applied_is_reported() -> None:
    """A log that ends before the applied entries, for example after a restore from a backup, is an error."""
    reading.check_reaches(BEGINNING, None, 0)
    reading.check_reaches(AT, head(index=4, checksum=b"before"), 0)
    reading.check_reaches(AT, None, 5)
    with pytest.raises(CorruptionError, match="log entry 4: it was applied here and is gone"):
        reading.check_reaches(AT, None, 4)
    with pytest.raises(CorruptionError, match="log entry 4: it is not the one that was applied here"):
        reading.check_reaches(AT, head(index=4, checksum=b"other"), 0)


def test_a_missing_entry_is_damage_unless_it_was_cut() -> None:
    assert Source.BASE is reading.missing(4, 5)
    with pytest.raises(CorruptionError, match="log entry 4: it is missing"):
        reading.missing(4, 4)


def test_reading_at_a_cut_counts_and_below_it_does_not() -> None:
    assert [Source.LOG, Source.LOG, Source.BASE] == [reading.where_to_read(AT, cut) for cut in (0, 5, 6)]


@pytest.mark.parametrize(
    ("answer", "found", "outcome"),
    [
        (Answer.CREATED, None, Outcome.WRITTEN),
        (Answer.NONE, None, Outcome.AGAIN),
        (Answer.EXISTS, None, Outcome.AGAIN),
        (Answer.EXISTS, head(), Outcome.WRITTEN),
        (Answer.EXISTS, head(id=b"other", epoch=4), Outcome.FENCED),
        (Answer.EXISTS, head(id=b"other", epoch=3), Outcome.FENCED),
        (Answer.EXISTS, head(id=b"other", epoch=2), Outcome.PASSED),
    ],
)
def test_what_a_put_came_to(answer: Answer, found: Head | None, outcome: Outcome) -> None:
    assert outcome is owning.after_put(head(), answer, found)


KEYS = st.sampled_from([b"a", b"b"])
VALUES = st.none() | st.binary(max_size=2)


@given(st.dictionaries(KEYS, VALUES), st.lists(st.dictionaries(KEYS, VALUES), max_size=4), KEYS)
def test_a_condition_sees_what_it_would_if_all_pending_were_applied(
    applied: dict[bytes, bytes | None], pending: list[dict[bytes, bytes | None]], key: bytes
) -> None:
    folded = dict(applied)
    for change in pending:
        folded |= change
    assert folded.get(key) == owning.seen(key, pending, applied.get)


def test_positions_go_on_behind_what_is_pending() -> None:
    assert (7, 9) == (owning.tail(7, []), owning.tail(7, [8, 9]))


def test_one_put_is_in_flight_and_releasing_comes_last() -> None:
    assert [False, True, False] == [owning.may_put(*at) for at in ((0, 0), (0, 3), (1, 3))]
    assert [True, False, False] == [owning.may_release(*at) for at in ((0, 0), (0, 1), (1, 0))]


def test_a_silent_owner_is_suspected_and_one_that_has_released_at_once() -> None:
    """A site may take over from an unresponsive owner after the timeout, or at once if the owner released the shard."""
    released = head(kind=Kind.RELEASED)
    assert taking_over.may_suspect(None, 3, 5.0, 5.0)
    assert not taking_over.may_suspect(head(), 3, 4.9, 5.0)
    assert taking_over.may_suspect(released, 3, 0.0, 5.0)
    assert not taking_over.may_suspect(released, 4, 0.0, 5.0)


BASES = st.lists(st.integers(0, 50), max_size=5)


@given(BASES, st.integers(0, 50), st.integers(0, 50))
def test_a_cut_lies_at_a_base_below_who_still_reads_and_never_goes_back(
    bases: list[int], oldest: int, cut: int
) -> None:
    found = truncating.cut_at(bases, oldest, cut)
    assert found == cut or (found in bases and cut < found <= oldest)
    assert not any(found < base <= oldest for base in bases)


@given(st.sets(st.integers(0, 9)), st.integers(0, 9), st.integers(0, 9))
def test_only_what_lies_below_the_cut_goes_and_no_fence(fences: set[int], index: int, cut: int) -> None:
    assert truncating.may_delete(index, cut, fences) == (index < cut and index not in fences)


def test_progress_is_stored_as_an_array() -> None:
    """Progress is encoded as an array, both in bases and with every local write."""
    assert AT == msgspec.msgpack.decode(msgspec.msgpack.encode(AT), type=Progress)


def test_progress_of_an_earlier_version_is_read() -> None:
    """Progress that was stored without the last fence is read; the fence is then unknown."""
    stored = msgspec.msgpack.encode([5, 3, b"before", 10])
    assert Progress(5, 3, b"before", 10, None) == msgspec.msgpack.decode(stored, type=Progress)
