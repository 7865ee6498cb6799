"""The contents of the database over HTTP: topics, client ids, last messages, streams, counts by time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import httpx
import numpy as np
import pyarrow as pa
import pytest
import topicstore as ts
from topicstore.contract.topics import TopicFilter
from topicstore.shard import tally_tables
from topicstore.storage.counting.contents import latest_of
from topicstore.storage.counting.histogram import histogram


def _all(http: httpx.Client, path: str, **query: Any) -> list[Any]:
    """Return the items of all pages."""
    found, after = [], {}
    while True:
        answer = http.get(path, params={**query, **after})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert len(page["items"]) <= query["limit"]
        found += page["items"]
        if page["next"] is None:
            return found
        after = {"after": page["next"]}


@pytest.fixture(scope="module", autouse=True)
def fleet(served: tuple[ts.Database, object]) -> None:
    """Store messages of 30 trucks."""
    db = served[0]
    db.store([ts.Message(f"fleet/t{one % 30}/{one % 2}/speed", b"%d" % one, f"c{one % 7}") for one in range(300)])
    db.store([ts.Message("fleet/t1", b"x"), ts.Message("$fleet/a", b"x")])


def test_topics_are_those_of_the_database_in_any_order(http: httpx.Client, db: ts.Database) -> None:
    tallies = [attrs.asdict(tally) for tally in db.topics("fleet/#")]
    assert _all(http, "/topics", filter="fleet/#", limit=4) == tallies
    orders: dict[str, Callable[[Any], Any]] = {
        "messages": lambda tally: (-tally["messages"], tally["topic"]),
        "bytes": lambda tally: (-tally["bytes"], tally["topic"]),
        "last": lambda tally: (-tally["last"], tally["topic"]),
    }
    for sort, key in orders.items():
        assert _all(http, "/topics", filter="fleet/#", sort=sort, limit=7) == sorted(tallies, key=key)
    found = _all(http, "/topics", filter="fleet/#", search="T1/", limit=7)
    assert [tally["topic"] for tally in found] == ["fleet/t1/1/speed"]
    assert http.get("/topics", params={"after": "x"}).status_code == 400
    assert http.get("/topics", params={"after": "9" * 5_000 + " x"}).status_code == 400


def test_the_tree_counts_what_is_below_each_level(http: httpx.Client) -> None:
    top = {level["name"]: level for level in http.get("/topics/tree").json()["items"]}
    assert top["fleet"]["messages"] == 301
    assert (top["fleet"]["topics"], top["fleet"]["ends"], top["fleet"]["below"]) == (31, False, True)
    assert "$fleet" not in top
    trucks = {level["name"]: level for level in _all(http, "/topics/tree", prefix="fleet", limit=7)}
    assert len(trucks) == 30
    assert (trucks["t1"]["messages"], trucks["t1"]["ends"], trucks["t1"]["below"]) == (11, True, True)
    assert [level["path"] for level in http.get("/topics/tree?prefix=fleet/t1").json()["items"]] == ["fleet/t1/1"]
    assert http.get("/topics/tree?prefix=$fleet").json()["items"][0]["name"] == "a"
    assert [one["name"] for one in http.get("/topics/tree?prefix=fleet&search=t29").json()["items"]] == ["t29"]
    assert http.get("/topics/tree", params={"prefix": "fleet/+"}).status_code == 400


def test_the_tree_shows_what_was_learned_as_plus(http: httpx.Client, db: ts.Database) -> None:
    tree = http.get("/topics/tree", params={"prefix": "fleet", "limit": 1_000}).json()
    learned = {node.path for nodes in db.learned_topics().values() for node in nodes}
    assert tree["plus"] == (("fleet", "+") in learned)
    assert tree["plus"]
    assert {one["name"]: one["own"] for one in tree["items"]} == {
        one["name"]: ("fleet", one["name"]) in learned for one in tree["items"]
    }


def test_clients_last_messages_streams_and_learned_topics_are_those_of_the_database(
    http: httpx.Client, db: ts.Database
) -> None:
    assert _all(http, "/clients", filter="fleet/#", limit=2) == [attrs.asdict(one) for one in db.clients("fleet/#")]
    latest = _all(http, "/latest", filter="fleet/#", limit=8)
    assert [(one["topic"], one["payload"]) for one in latest] == [
        (message.topic, message.payload.decode()) for message in db.latest("fleet/#")
    ]
    streams = _all(http, "/streams", filter="fleet/#", limit=10)
    assert sorted(streams, key=str) == sorted((attrs.asdict(one) for one in db.streams("fleet/#")), key=str)
    learned = _all(http, "/learned-topics", limit=10)
    assert len(learned) == sum(map(len, db.learned_topics().values()))


def test_an_explanation_says_what_was_read(http: httpx.Client, db: ts.Database) -> None:
    answer = http.get("/messages/explain", params={"filter": "fleet/t1/#"}).json()
    assert answer["messages"] == len(list(db.replay("fleet/t1/#")))
    assert sum(slab["reads"]["rows"] for slab in answer["slabs"]) >= answer["messages"]


# --- histograms ---------------------------------------------------------------------

_START = 1_700_000_000_000_000


def _stored(db: ts.Database, rows: int, topics: int) -> np.ndarray[Any, Any]:
    """Store messages whose times are denser at the end; return their times."""
    times = _START + np.sort((np.sqrt(np.random.default_rng(1).random(rows)) * 10**9).astype(np.int64))
    for first in range(0, rows, 50_000):
        part = times[first : first + 50_000]
        numbers = np.arange(first, first + len(part)) % topics
        table = {
            "timestamp": pa.array(part).cast(pa.timestamp("us", "UTC")),
            "topic": pa.array([f"h/{number}" for number in numbers]),
            "client_id": pa.array([f"c{number}" for number in numbers]),
            "payload": pa.array([b"1"] * len(part)),
        }
        db.store(pa.table(table))
    return np.concatenate([batch["timestamp"].cast("int64").to_numpy() for batch in db.replay_arrow("#", order="any")])


def _true(times: np.ndarray[Any, Any], start: int, width: int, spans: int) -> list[int]:
    counts: list[int] = np.histogram(times, start + width * np.arange(spans + 1))[0].tolist()
    return counts


def test_few_messages_are_counted_exactly(http: httpx.Client) -> None:
    answer = http.get("/messages/histogram", params={"filter": "fleet/#", "buckets": 7}).json()
    assert answer["exact"]
    assert answer["messages"] == sum(answer["counts"]) == 301
    assert len(answer["counts"]) == 7
    empty = http.get("/messages/histogram", params={"filter": "no/such"}).json()
    assert (empty["messages"], empty["exact"]) == (0, True)
    assert http.get("/messages/histogram", params={"buckets": 0}).status_code == 400


def _check_estimates(db: ts.Database, times: np.ndarray[Any, Any]) -> None:
    whole = histogram(db.storage, TopicFilter("#"), None, None, 10)
    assert not whole.exact
    assert whole.messages == pytest.approx(400_000, rel=0.01)
    true = np.array(_true(times, whole.start, whole.width, 10))
    assert np.abs(np.array(whole.counts) - true).max() < 0.05 * 400_000
    start = _START + 500_000_000
    part = histogram(db.storage, TopicFilter("#"), start, start + 10_000_000, 10)
    assert part.exact
    assert part.counts == _true(times, start, 1_000_000, 10)
    narrow = histogram(db.storage, TopicFilter("h/7"), None, None, 10)
    assert narrow.exact
    assert narrow.messages == 20_000


def test_many_messages_are_estimated_and_a_part_of_them_counted_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A histogram of many messages is an estimate, and a histogram of few messages is exact.

    After compaction, a histogram is computed from tally tables. Each table is loaded once, and a histogram of all
    messages loads none.
    """
    with ts.open(tmp_path / "db", backend="memory", timestamps="message", late="lift", auto_compact=False) as db:
        times = _stored(db, 400_000, 20)
        _check_estimates(db, times)
        db.compact()
        read: list[int] = []
        load = tally_tables.load_tally

        def load_and_count(view: Any, generation: int, *more: Any) -> Any:
            read.append(generation)
            return load(view, generation, *more)

        monkeypatch.setattr(tally_tables, "load_tally", load_and_count)
        before = db.info().total.read_messages
        whole = histogram(db.storage, TopicFilter("#"), None, None, 10)
        assert (int(times.min()), 400_000) == (whole.start, whole.messages)
        assert (read, db.info().total.read_messages - before <= 1) == ([], True)
        begin, end = int(times.min()), int(times.max()) + 1
        narrow = histogram(db.storage, TopicFilter("h/+"), begin, end, 10)
        tables = len(read)
        assert tables > 0
        assert np.abs(np.array(narrow.counts) - _true(times, narrow.start, narrow.width, 10)).max() < 0.05 * 400_000
        histogram(db.storage, TopicFilter("h/+"), begin, (begin + end) // 2, 60)
        assert len(read) == tables
        _check_estimates(db, times)
        db.delete("h/3")
        left = histogram(db.storage, TopicFilter("h/+"), begin, end, 1)
        assert (380_000, True) == (left.messages, left.exact)


@pytest.mark.parametrize("topic_filter", ["#", "edge/+"])
def test_a_span_is_from_its_first_time_to_before_the_next_ones(tmp_path: Path, topic_filter: str) -> None:
    """A bucket includes its own start and excludes the start of the next bucket.

    No message at ``until`` or later is counted, even if there are more buckets than microseconds.
    """
    with ts.open(tmp_path / "db", backend="memory", timestamps="message", late="lift") as db:
        random = np.random.default_rng(3).integers(0, 30_000_000, 200)
        times = np.unique(np.concatenate([_START + random, _START + 1_000_000 * np.arange(30)]))
        db.store([ts.Message(f"edge/{n % 3}", b"x", "c", timestamp=int(time)) for n, time in enumerate(times)])
        for first, last, spans in (
            (1, 2_000_000, 600),
            (4_999_997, 5_000_000, 10),
            (0, 30_000_000, 30),
            (0, 30_000_000, 7),
            (0, 10, 60),
            (0, 1, 1),
            (5_000_000, 5_000_001, 10),
            (0, 0, 5),
            (10, 0, 5),
            (-10, 30_000_001, 1_000),
        ):
            start, until = _START + first, _START + last
            found = histogram(db.storage, TopicFilter(topic_filter), start, until, spans)
            within = times[(times >= start) & (times < until)]
            assert (found.exact, found.start, found.messages) == (True, start, len(within))
            assert found.counts == np.bincount((within - start) // found.width, minlength=spans).tolist()
        early = histogram(db.storage, TopicFilter(topic_filter), None, _START, 4)
        assert ([0, 0, 0, 0], True) == (early.counts, early.exact)
        whole = histogram(db.storage, TopicFilter(topic_filter), None, None, 60)
        assert len(times) == whole.messages


@pytest.mark.parametrize("path", ["/latest", "/retained", "/queues/large/messages"])
def test_a_page_of_large_messages_ends_where_it_would_be_too_large(
    http: httpx.Client, db: ts.Database, path: str
) -> None:
    """A page of large messages ends before it gets too large; the next pages have the rest.

    A message larger than a page has a page of its own.
    """
    sent = [
        ts.Message(f"pages/{number}", b"x" * (megabytes << 20), retain=True)
        for number, megabytes in enumerate([9, 9, 20, 1])
    ]
    db.persistence.add("pages/#")
    db.publish(sent)
    db.queues.open("large").append(sent)
    sizes, query = [], {"filter": "pages/#"} if path != "/queues/large/messages" else {}
    while query is not None:
        page = http.get(path, params=query).json()
        sizes.append([len((one.get("message") or one)["payload"]) >> 20 for one in page["items"]])
        query = None if page["next"] is None else {**query, "after": page["next"]}
    db.queues.drop("large")
    assert [one for one in sizes if one] == [[9], [9], [20], [1]]


def test_the_last_messages_of_named_topics_are_looked_up(http: httpx.Client) -> None:
    """The last message of each named topic is listed, sorted by topic; a topic without messages is omitted."""
    named = ["fleet/t2/0/speed", "fleet/t1/1/speed", "fleet/nowhere", "fleet/t1/1/speed"]
    found = http.get("/latest", params={"topic": named}).json()
    assert [(one["topic"], one["payload"]) for one in found["items"]] == [
        ("fleet/t1/1/speed", "271"),
        ("fleet/t2/0/speed", "272"),
    ]
    assert found["next"] is None


def test_named_topics_come_as_one_by_one(db: ts.Database) -> None:
    """Looking up several topics at once returns the same messages as separate look-ups, also for topics with ``$``."""
    named = ["fleet/t1", "$fleet/a", "nowhere", *(f"fleet/t{n}/{n % 2}/speed" for n in range(30))]
    assert [message for name in sorted(named) for message in db.latest(name)] == latest_of(db.storage, named)


def test_a_topic_that_is_named_is_no_filter_and_names_are_few(http: httpx.Client) -> None:
    """Naming a filter, or more than 1,000 topics, is a client error with the reason."""
    for named, reason in ((["fleet/+"], "is a filter"), ([f"t{n}" for n in range(1_001)], "at most 1,000")):
        answer = http.get("/latest", params={"topic": named})
        assert answer.status_code == 400
        assert reason in answer.json()["detail"]
