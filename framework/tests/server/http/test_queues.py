"""Queues over HTTP."""

from __future__ import annotations

import httpx
import pytest
import topicstore as ts


def messages(*payloads: str) -> list[dict[str, str]]:
    """Return messages as JSON."""
    return [{"topic": "t", "payload": payload} for payload in payloads]


def payloads(answer: httpx.Response) -> list[str]:
    """Return the payloads of the messages in a response."""
    return [one["message"]["payload"] for one in answer.json()["items"]]


def test_what_is_appended_is_read_until_it_is_committed(http: httpx.Client) -> None:
    """Messages appended to a queue can be read until a commit removes them for all readers.

    Each reader has its own read position.
    """
    assert http.put("/queues/way", json={}).json()["messages"] == 0
    ids = http.post("/queues/way/messages", json=messages("1", "2", "3")).json()["ids"]
    assert ids == sorted(ids)
    first = http.get("/queues/way/messages", params={"limit": 2})
    assert (payloads(first), first.json()["next"]) == (["1", "2"], str(ids[1]))
    assert payloads(http.get("/queues/way/messages", params={"after": first.json()["next"]})) == ["3"]
    assert payloads(http.get("/queues/way/messages")) == ["1", "2", "3"]
    assert http.get("/queues/way/messages", params={"after": ids[2]}).json() == {"items": [], "next": None}
    assert [http.post("/queues/way/commit", json={"upto": ids[1]}).json()["committed"] for _ in range(2)] == [2, 0]
    assert payloads(http.get("/queues/way/messages")) == ["3"]
    assert http.delete("/queues/way").json() == {"queue": "way", "dropped": 1}
    assert http.get("/queues/way").status_code == 404


def test_an_id_may_be_text_which_no_reader_of_json_rounds(http: httpx.Client) -> None:
    """A message id may be sent as text, which JSON parsers don't round.

    JavaScript and jq round numbers of this size, perhaps to an id after messages that weren't read.
    """
    http.put("/queues/rounded", json={})
    ids = http.post("/queues/rounded/messages", json=messages(*"1234")).json()["ids"]
    assert {int(float(one)) for one in ids}.isdisjoint(ids[1:3])
    page = http.get("/queues/rounded/messages", params={"limit": 2})
    assert http.post("/queues/rounded/commit", json={"upto": page.json()["next"]}).json() == {"committed": 2}
    assert payloads(http.get("/queues/rounded/messages")) == ["3", "4"]
    for wrong in ("", "-1", "x", "1.0", " 1", "1" * 21, "\u0661"):
        assert http.post("/queues/rounded/commit", json={"upto": wrong}).status_code == 400


def test_reading_by_http_leaves_the_program_s_place(http: httpx.Client, db: ts.Database) -> None:
    """Reading a queue over HTTP doesn't move the read position of `Queue.read`."""
    queue = db.queues.open("shared")
    queue.append([ts.Message("t", b"1"), ts.Message("t", b"2")])
    assert queue.read(1).messages[0].payload == b"1"
    assert payloads(http.get("/queues/shared/messages")) == ["1", "2"]
    assert queue.read(1).messages[0].payload == b"2"


def test_bounds_hold_and_change(http: httpx.Client) -> None:
    """A full queue answers 507 or drops messages, as set; changing one setting of a queue keeps the others."""
    assert http.put("/queues/full", json={"max_messages": 1}).json()["max_messages"] == 1
    assert http.post("/queues/full/messages", json=messages("1", "2")).status_code == 507
    changed = http.put("/queues/full", json={"overflow": "drop_newest"}).json()
    assert (changed["max_messages"], changed["overflow"], changed["messages"]) == (1, "drop_newest", 0)
    assert len(http.post("/queues/full/messages", json=messages("1", "2")).json()["ids"]) == 1
    for wrong in (0, 1 << 64):
        assert http.put("/queues/full", json={"max_messages": wrong}).status_code == 400
    assert http.put("/queues/full", json={"most": 1}).status_code == 400


@pytest.mark.parametrize("name", ["../../up", "..", "a/b//c", "%2F", "é", "x" * 500])
def test_any_name_is_one_queue_within_the_database(http: httpx.Client, db: ts.Database, name: str) -> None:
    """Any name is one queue within the database: names that look like paths don't escape its directory.

    A listing returns each name unchanged.
    """
    path = f"/queues/{httpx.QueryParams({'n': name})!s}".replace("n=", "").replace("+", "%20").replace("..", "%2E%2E")
    before = {one.name for one in db.path.parent.iterdir()}
    assert http.put(path, json={}).json()["name"] == name
    assert name in [one["name"] for one in http.get("/queues").json()["items"]]
    assert {one.name for one in db.path.parent.iterdir()} == before
    assert http.delete(path).json()["queue"] == name


def test_a_queue_that_is_missing_is_not_made(http: httpx.Client, db: ts.Database) -> None:
    """A missing queue is created by PUT only."""
    assert http.post("/queues/missing/messages", json=messages("1")).status_code == 404
    assert http.get("/queues/missing/messages").status_code == 404
    assert http.post("/queues/missing/commit", json={"upto": 1}).status_code == 404
    assert http.delete("/queues/missing").status_code == 404
    assert "missing" not in db.queues


@pytest.mark.parametrize(
    "wrong", [{"topic": "t"}, {"topic": "t", "payload": "1", "payload_base64": "MQ=="}, {"topic": "+", "payload": ""}]
)
def test_a_wrong_message_appends_none(http: httpx.Client, wrong: dict[str, str]) -> None:
    """A body with one bad message is refused, and nothing is appended."""
    http.put("/queues/wrong", json={})
    assert http.post("/queues/wrong/messages", json=[*messages("1"), wrong]).status_code == 400
    assert http.get("/queues/wrong").json()["messages"] == 0
