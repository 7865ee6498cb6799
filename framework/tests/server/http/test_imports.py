"""``/imports``: rows together with the progress of their import; invalid requests store nothing."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest
import topicstore as ts

MSGPACK = {"Content-Type": "application/vnd.msgpack"}


def rows(*messages: ts.Message) -> bytes:
    """Return messages as an Arrow IPC stream."""
    batch = ts.MessageBatch.of(messages).to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def body(**changed: Any) -> bytes:
    """Return a valid body with some fields changed."""
    message = ts.Message("imports/a", b"1", retain=True)
    marker = {"shard": 0, "key": b"import/one", "value": b"how far"}
    return msgspec.msgpack.encode({"rows": rows(message), "markers": [marker], **changed})


def test_rows_and_progress_are_stored_together(http: httpx.Client, db: ts.Database) -> None:
    """An import stores its rows and its progress in one write, and a request for imports lists the progress."""
    done = http.post("/imports", content=body(retained=[True]), headers=MSGPACK)
    assert (200, {"count": 1, "lifted": 0}) == (done.status_code, done.json())
    assert [b"1"] == [one.payload for one in db.replay("imports/#")]
    assert ["imports/a"] == [one.topic for one in db.retained("imports/#")]
    assert [{"shard": 0, "key": "aW1wb3J0L29uZQ==", "value": "aG93IGZhcg=="}] == http.get("/imports").json()


def test_the_servers_own_topics_come_from_who_runs_it_alone(
    owner: dict[str, str], http: httpx.Client, db: ts.Database
) -> None:
    """Only the server's own token may import ``$SYS`` topics; for other tokens the import is refused with 400."""
    content = body(rows=rows(ts.Message("$SYS/imports", b"1")))
    for headers, status in ((MSGPACK, 400), ({**MSGPACK, **owner}, 200)):
        assert http.post("/imports", content=content, headers=headers).status_code == status
    assert [b"1"] == [one.payload for one in db.replay("$SYS/#")]


@pytest.mark.parametrize(
    "wrong",
    [
        body(rows=b"no stream"),
        body(rows=rows()[:40]),
        body(markers=[{"shard": 0, "key": b"session/one", "value": b"x"}]),
        body(markers=[{"shard": 0, "key": b"\1ps", "value": b"x"}]),
        body(markers=[{"shard": 9, "key": b"import/one", "value": b"x"}]),
        body(retained=[True, False]),
        body(stored=[], retained=[True]),
        body(more=1),
        b"\xc1",
        b"",
    ],
)
def test_what_is_wrong_is_refused(http: httpx.Client, db: ts.Database, wrong: bytes) -> None:
    """An invalid import is refused with a problem document that says why, and stores no row and no state."""
    before = [list(db.replay("imports/#")), list(db.state(0).scan())]
    refused = http.post("/imports", content=wrong, headers=MSGPACK)
    assert 400 == refused.status_code, refused.text
    assert refused.json()["detail"]
    assert before == [list(db.replay("imports/#")), list(db.state(0).scan())]


def test_the_first_wrong_row_is_named_as_it_lies_in_all_rows(http: httpx.Client) -> None:
    """The index of the first bad row counts across all batches of the body."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("topic", pa.string()), ("payload", pa.binary())])) as writer:
        for topics in (["imports/a", "imports/b"], ["imports/c", "imports/#"]):
            writer.write_batch(pa.record_batch({"topic": topics, "payload": [b"", b""]}))
    refused = http.post("/imports", content=body(rows=sink.getvalue().to_pybytes()), headers=MSGPACK)
    assert (400, 3) == (refused.status_code, refused.json()["index"])
