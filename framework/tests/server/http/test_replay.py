"""Replays over HTTP: formats, pages, tokens, errors."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topicstore.files.formats import CSV_COLUMNS, decode_lines
from topicstore.server import Server
from topicstore.storage.reading.pages import ReplayPlace
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of

ARROW, PARQUET = "application/vnd.apache.arrow.stream", "application/vnd.apache.parquet"
NEXT = "Topicstore-Next"


def _message(topic: str, number: int) -> ts.Message:
    properties = ts.Properties(content_type="text/plain") if number % 3 == 0 else None
    payload = b"\xff%d" % number if number % 5 == 0 else b"%d" % number
    return ts.Message(topic, payload, f"client-{number % 7}", number % 3, properties=properties)


def _arrow(answer: httpx.Response) -> pa.Table:
    return pa.ipc.open_stream(answer.content).read_all()


def test_each_format_has_the_messages_of_a_replay(http: httpx.Client, db: ts.Database) -> None:
    db.store([_message(f"formats/{number % 4}", number) for number in range(100)])
    stored = list(db.replay("formats/#"))
    lines = http.get("/messages", params={"filter": "formats/#"})
    assert lines.headers["content-type"] == "application/x-ndjson"
    assert decode_lines(lines.content) == stored
    arrow = http.get("/messages", params={"filter": "formats/#"}, headers={"Accept": ARROW})
    assert _arrow(arrow) == db.replay_arrow("formats/#").read_all()
    parquet = http.get("/messages", params={"filter": "formats/#"}, headers={"Accept": PARQUET})
    assert ts.MessageBatch.of(pq.read_table(io.BytesIO(parquet.content))).to_messages() == stored
    text = http.get("/messages", params={"filter": "formats/#"}, headers={"Accept": "text/csv;q=0.9, image/png"})
    rows = list(csv.reader(io.StringIO(text.text, newline="")))
    assert rows[0] == list(CSV_COLUMNS)
    assert [row[1] for row in rows[1:]] == [message.topic for message in stored]


@pytest.mark.parametrize("media_type", ["application/x-ndjson", "text/csv", ARROW, PARQUET])
def test_nothing_is_a_whole_body_too(http: httpx.Client, media_type: str) -> None:
    for more in ({}, {"limit": 5}):
        answer = http.get("/messages", params={"filter": "nothing/here", **more}, headers={"Accept": media_type})
        assert answer.status_code == 200
        assert answer.headers["content-type"].partition(";")[0] == media_type
        assert NEXT not in answer.headers
        if media_type == ARROW:
            assert _arrow(answer).schema == ts.SCHEMA
        if media_type == PARQUET:
            assert pq.read_table(io.BytesIO(answer.content)).num_rows == 0


def test_a_format_that_there_is_not_is_406(http: httpx.Client) -> None:
    answer = http.get("/messages", headers={"Accept": "image/png"})
    assert answer.status_code == 406
    assert ARROW in answer.json()["detail"]


def test_a_weight_that_is_none_counts_as_if_it_were_not_there(http: httpx.Client) -> None:
    answer = http.get("/messages", headers={"Accept": "text/csv;q=1e999"})
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/csv")


@pytest.mark.parametrize(
    ("accepts", "chosen"),
    [
        ([], "application/x-ndjson"),
        ([""], "application/x-ndjson"),
        (["*/*"], "application/x-ndjson"),
        (["text/*"], "text/csv"),
        (["TEXT/CSV"], "text/csv"),
        (["*/*, text/csv"], "text/csv"),
        (["text/csv, */*;q=0.1"], "text/csv"),
        (["text/csv;q=0.1, */*;q=0.5"], "application/x-ndjson"),
        ([f"{ARROW}, text/csv"], ARROW),
        ([f"text/csv; charset=utf-8; q=0.5, {ARROW};q=0.6"], ARROW),
        (["image/png", "text/csv"], "text/csv"),
        (["application/x-ndjson;q=0, */*"], "text/csv"),
        (["application/*;q=0, text/csv;q=0.0"], None),
        (["application/x-ndjson;q=0"], None),
        (["nonsense"], None),
        ([";,;q=1"], None),
    ],
)
def test_the_format_is_the_one_that_a_client_likes_best(
    http: httpx.Client, accepts: list[str], chosen: str | None
) -> None:
    """The response has the format that the client prefers, even with several Accept headers or refused formats."""
    del http.headers["Accept"]
    answer = http.get("/messages", params={"filter": "nothing"}, headers=[("Accept", one) for one in accepts])
    assert answer.status_code == (406 if chosen is None else 200)
    if chosen is not None:
        assert answer.headers["content-type"].partition(";")[0] == chosen


@pytest.mark.parametrize(
    "query",
    [
        {"filter": "a/#/b"},
        {"start": "yesterday"},
        {"limit": 0},
        {"limit": 10_001},
        {"by": "size"},
        {"order": "any", "limit": 5},
        {"order": "any", "reverse": "true"},
        {"after": "nonsense"},
        {"after": "%%%"},
        {"after": ""},
    ],
)
def test_bad_questions_are_400(http: httpx.Client, query: dict[str, str]) -> None:
    answer = http.get("/messages", params=query)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_token_says_all_but_the_size_of_the_page(http: httpx.Client, db: ts.Database) -> None:
    db.store([_message("whole/a", number) for number in range(5)])
    token = http.get("/messages", params={"filter": "whole/#", "limit": 2}).headers[NEXT]
    assert http.get("/messages", params={"after": token, "filter": "#"}).status_code == 400
    rest = http.get("/messages", params={"after": token})
    assert decode_lines(rest.content) == list(db.replay("whole/#"))[2:]


def test_a_token_of_another_database_or_a_changed_one_is_refused(
    http: httpx.Client, db: ts.Database, tmp_path: Path
) -> None:
    db.store([_message("foreign/a", number) for number in range(3)])
    token = http.get("/messages", params={"filter": "foreign/#", "limit": 1}).headers[NEXT]
    other = ts.open(tmp_path / "other", backend="memory")
    with other, serving_http(other) as server, client_of(server) as elsewhere:
        answer = elsewhere.get("/messages", params={"after": token})
    assert answer.status_code == 400
    assert answer.json()["title"] == "WrongDatabaseError"
    for place in range(len(token)):
        changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
        if changed.rstrip("=")[:-1] != token[:-1]:  # the token's last character may have unused bits
            assert http.get("/messages", params={"after": changed}).status_code == 400


def test_a_token_of_what_a_database_has_lost_is_refused(tmp_path: Path) -> None:
    """A page token is refused if the database was restored from a copy that is older than the token's position.

    The copy lacks the rest of the replay, and may have other messages at that position.
    """
    with ts.open(tmp_path / "db", timestamps="message") as db, serving_http(db) as server, client_of(server) as http:
        db.checkpoint(tmp_path / "copy")
        db.store([_message("a", number) for number in range(3)])
        token = http.get("/messages", params={"limit": 1}).headers[NEXT]
    with ts.open(tmp_path / "copy") as db, serving_http(db) as server, client_of(server) as http:
        answer = http.get("/messages", params={"after": token})
    assert (400, "PlaceAheadError") == (answer.status_code, answer.json()["title"])


def test_times_are_compared_with_positions_or_timestamps(http: httpx.Client, db: ts.Database) -> None:
    old = 1_700_000_000_000_000
    db.store([ts.Message("times/a", b"old", timestamp=old), ts.Message("times/a", b"new")])
    got = http.get("/messages", params={"filter": "times/#", "start": "-1h", "by": "timestamp"})
    assert [message.payload for message in decode_lines(got.content)] == [b"new"]
    got = http.get("/messages", params={"filter": "times/#", "until": "2023-12-01", "by": "timestamp"})
    assert [message.payload for message in decode_lines(got.content)] == [b"old"]
    got = http.get("/messages", params={"filter": "times/#", "start": "-1h"})
    assert [message.payload for message in decode_lines(got.content)] == [b"old", b"new"]
    query = {"filter": "times/#", "until": "2023-12-01"}
    assert http.delete("/messages", params=query).json() == {"deleted": 0}
    assert http.delete("/messages", params=query | {"by": "timestamp"}).json() == {"deleted": 1}
    assert [message.payload for message in db.replay("times/#")] == [b"new"]


def test_a_page_ends_where_it_would_be_too_large(http: httpx.Client, db: ts.Database) -> None:
    db.store([ts.Message("large/a", bytes(9 << 20)) for _ in range(3)])
    sizes, query = [], {"filter": "large/#", "limit": 10}
    while True:
        answer = http.get("/messages", params=query, headers={"Accept": ARROW})
        sizes.append(_arrow(answer).num_rows)
        if NEXT not in answer.headers:
            break
        query = {"after": answer.headers[NEXT], "limit": 10}
    assert sizes == [1, 1, 1]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_parameter_that_nothing_reads_is_refused(http: httpx.Client, db: ts.Database, method: str) -> None:
    """An unknown query parameter is refused, so that a misspelled one can't replay or delete too much."""
    topic = f"misspelled/{method}"
    db.store([_message(topic, number) for number in range(3)])
    answer = http.request(method, "/messages", params={"filter": topic, "untill": "2025-01-01"})
    assert 400 == answer.status_code
    mistake = {"message": "the route doesn't have it; is 'until' meant?", "key": "untill", "source": "query"}
    assert [mistake] == answer.json()["errors"]
    assert 3 == len(list(db.replay(topic)))
    told = http.get("/info", params={"x": "1"}).json()["errors"][0]["message"]
    assert "the route doesn't have it; it has none" == told


def test_deleting_needs_a_filter_and_says_how_many_went(http: httpx.Client, db: ts.Database) -> None:
    db.store([_message(f"gone/{number % 2}", number) for number in range(10)])
    assert http.delete("/messages").status_code == 400
    assert http.delete("/messages", params={"filter": "gone/0"}).json() == {"deleted": 5}
    assert {message.topic for message in db.replay("gone/#")} == {"gone/1"}


# --- pages of a replay ------------------------------------------------------------------


@pytest.fixture(scope="module", params=["reference", "wildcard_optimized", "block"])
def paged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ts.Database, Server]]:
    """Servers of databases with each kind of layout: the simplest, one with epochs, one with merged blocks."""
    path = tmp_path_factory.mktemp("paged") / "db"
    layout: str = request.param  # short epochs, because a replay waits for an epoch's end
    options = {layout: {"epoch_bits": 10}} if layout == "wildcard_optimized" else None
    with ts.open(path, backend="memory", layout=layout, shards=3, options=options) as db, serving_http(db) as server:
        yield db, server


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pages_are_together_the_replay_though_messages_are_stored_meanwhile(
    paged: tuple[ts.Database, Server], data: st.DataObject
) -> None:
    db, server = paged
    topics = st.sampled_from(["p/a", "p/b", "p/c/d"])
    batches = st.lists(st.lists(st.tuples(topics, st.integers(0, 20)), max_size=30), min_size=1, max_size=4)

    def store() -> None:
        for batch in data.draw(batches):
            db.store([_message(topic, number) for topic, number in batch])

    store()
    reverse, by = data.draw(st.booleans()), data.draw(st.sampled_from(["position", "timestamp"]))
    topic_filter = data.draw(st.sampled_from(["#", "p/+", "p/c/#"]))
    expected = list(db.replay(topic_filter, reverse=reverse, by=by))
    got: list[ts.Message] = []
    with client_of(server) as client:
        query: dict[str, object] = {"filter": topic_filter, "reverse": reverse, "by": by}
        more = True
        while more:
            limit = data.draw(st.none() | st.integers(1, 40)) if "after" in query else data.draw(st.integers(1, 40))
            answer = client.get("/messages", params={**query, **({} if limit is None else {"limit": limit})})
            assert answer.status_code == 200, answer.text
            page = decode_lines(answer.content)
            assert limit is None or len(page) <= limit
            got += page
            more = NEXT in answer.headers
            query = {"after": answer.headers.get(NEXT)}
            store()
    assert got == expected


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_place_or_refused(data: bytes) -> None:
    with pytest.raises(ts.InvalidCursorError):
        ReplayPlace.from_bytes(data)
