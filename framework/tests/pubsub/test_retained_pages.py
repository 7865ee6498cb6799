"""Retained messages are looked up in pages, and the look-up seeks past topics that can't match."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.cursors import Cursor
from topicstore.contract.requests import ReadResult
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.retained_lookup import TopicLeaps, retained_page
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries

LEVELS = st.sampled_from(["", "a", "b", "a b", "a-", "a.", "a0", "é", "$s", "\x01", "\U0001f600"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = st.builds(
    lambda levels, end: "/".join([*levels, *end]),
    st.lists(st.one_of(LEVELS, st.just("+")), max_size=4),
    st.sampled_from([[], ["#"]]),
).filter(bool)


def retain(db: ts.Database, topics: Iterator[str] | list[str]) -> None:
    db.publish([ts.Message(topic, topic.encode(), retain=True) for topic in topics])


@pytest.mark.slow
@settings(max_examples=tries(500, 5_000))
@given(topics=st.sets(TOPICS, max_size=40), text=FILTERS)
def test_leaps_pass_over_no_match(topics: set[str], text: str) -> None:
    """`TopicLeaps` seeks forward, and never past the next topic that matches."""
    leaps, topic_filter = TopicLeaps(TopicFilter(text)), TopicFilter(text)
    within = [t for t in sorted(topics) for first, end in leaps.ranges if first <= t and (end is None or t < end)]
    matching = [topic for topic in sorted(topics) if topic_filter.matches(topic)]
    assert set(matching) <= set(within)
    assert not leaps.every or within == matching
    for topic in within:
        leap = leaps.after(topic)
        later = [one for one in matching if one > topic]
        assert leap is None or leap > topic
        assert not later or (leap is not None and leap <= later[0])


@settings(COSTLY, max_examples=tries(100, 500))
@given(
    topics=st.sets(TOPICS, max_size=40),
    text=FILTERS,
    shards=st.sampled_from([1, 3]),
    limit=st.integers(1, 7),
    examine=st.integers(1, 5),
)
def test_pages_together_are_the_whole(topics: set[str], text: str, shards: int, limit: int, examine: int) -> None:
    """All pages together hold the whole result in order, however few messages a page may return or examine."""
    with ts.open("nowhere", backend="memory", shards=shards) as db:
        retain(db, sorted(topics))
        expected = sorted(topic for topic in topics if ts.matches(text, topic))
        found: list[str] = []
        while page := db.retained(text, after=found[-1] if found else None, limit=limit):
            assert len(page) == limit or len(found) + len(page) == len(expected)
            found += [message.topic for message in page]
        assert expected == found == [message.topic for message in db.retained(text)]
        found, start = [], ""
        while start is not None:
            step = retained_page(db.storage, TopicFilter(text), db.clock(), start, limit, examine=examine)
            assert len(step.messages) <= limit
            found += [message.topic for message in step.messages]
            assert step.following is None or step.following > start
            start = step.following
        assert expected == found


@pytest.fixture(params=["memory", "rocksdb", "leveldb"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ts.Database]:
    if request.param == "leveldb":
        pytest.importorskip("plyvel", reason='needs plyvel: pip install "topicstore[leveldb]"')
    with ts.open(tmp_path / "db", backend=request.param) as opened:
        yield opened


@pytest.fixture
def examined(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of messages found by each engine read."""
    counts: list[int] = []
    read = db.storage.read

    def counting(cursor: Cursor, limit: int) -> ReadResult:
        result = read(cursor, limit)
        counts.append(len(result.batch))
        return result

    monkeypatch.setattr(db.storage, "read", counting)
    return counts


def test_a_page_reads_no_more_than_it_has(db: ts.Database, examined: list[int]) -> None:
    """A page examines no more messages than it returns if all match, in at most two engine reads."""
    retain(db, [f"a/{number}" for number in range(3_000)])
    assert 50 == len(db.retained("a/#", limit=50))
    assert 50 == sum(examined)
    assert len(examined) <= 2


def test_levels_that_cannot_match_are_leapt_over(db: ts.Database, examined: list[int]) -> None:
    """A wildcard look-up in a wide topic tree seeks past topics that can't match, and reads under a tenth of all."""
    retain(db, [f"{device}/{sensor}" for device in range(10) for sensor in range(500)])
    assert [f"{device}/7" for device in range(10)] == [message.topic for message in db.retained("+/7")]
    assert sum(examined) < 500
    examined.clear()
    assert [] == db.retained("+/none/#")
    assert sum(examined) < 500


def test_where_leaps_lead_nowhere_many_are_read_at_a_time(db: ts.Database, examined: list[int]) -> None:
    """If seeking can skip no topic, a look-up reads many topics in each of few engine reads."""
    retain(db, [f"{device}/1" for device in range(4_000)])
    assert [] == db.retained("+/7")
    assert sum(examined) <= 4_000
    assert len(examined) < 30


def test_what_a_client_waits_for_is_bounded(db: ts.Database, examined: list[int]) -> None:
    """One step of a look-up examines a limited number of messages, even if none matches."""
    retain(db, [f"{device}/1" for device in range(4_000)])
    page = retained_page(db.storage, TopicFilter("+/7"), db.clock(), "", 100)
    assert [] == list(page.messages)
    assert page.following is not None
    assert sum(examined) <= 1_024


def test_a_bad_page_is_refused(db: ts.Database) -> None:
    """An invalid `limit` or `after` raises `InvalidArgumentError`."""
    for limit in (0, -1, True, 1.5):
        with pytest.raises(ts.InvalidArgumentError):
            db.retained("#", limit=limit)  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgumentError):
        db.retained("#", after="a\0")


def test_what_changes_between_pages_is_found_as_it_is_then(db: ts.Database) -> None:
    """Each page returns the messages that exist when it is read; topics before its start are not examined again."""
    retain(db, ["a", "c", "e"])
    assert ["a", "c"] == [message.topic for message in db.retained("#", limit=2)]
    retain(db, ["b", "d"])
    db.publish([ts.Message("e", b"", retain=True)])
    assert ["d"] == [message.topic for message in db.retained("#", after="c", limit=2)]
