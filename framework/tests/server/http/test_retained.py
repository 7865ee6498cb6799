"""Retained messages over HTTP."""

from __future__ import annotations

import base64

import httpx
import pytest
import topicstore as ts


def topics(answer: httpx.Response) -> list[str]:
    """Return the topics in a response, which must have status 200."""
    assert answer.status_code == 200, answer.text
    return [one["topic"] for one in answer.json()["items"]]


def test_retained_messages_come_in_pages(http: httpx.Client, db: ts.Database) -> None:
    """Retained messages are listed in pages, in the order of topics; `next` starts the next page."""
    db.publish([ts.Message(f"kept/{number}", b"\xff", retain=True) for number in range(3)])
    first = http.get("/retained", params={"filter": "kept/+", "limit": 2})
    assert topics(first) == ["kept/0", "kept/1"]
    assert base64.b64decode(first.json()["items"][0]["payload_base64"]) == b"\xff"
    rest = http.get("/retained", params={"filter": "kept/+", "limit": 2, "after": first.json()["next"]})
    assert (topics(rest), rest.json()["next"]) == (["kept/2"], None)
    whole = http.get("/retained", params={"filter": "kept/+", "limit": 3})
    assert (topics(whole), whole.json()["next"]) == (["kept/0", "kept/1", "kept/2"], None)
    assert http.get("/retained", params={"filter": "a/#/b"}).status_code == 400


def test_a_retained_message_is_set_and_cleared(http: httpx.Client, db: ts.Database) -> None:
    """A retained message is set and cleared as if a client had published it."""
    answer = http.put("/retained", json={"topic": "set/1", "payload": "on", "properties": {"content_type": "text"}})
    assert answer.json()["retain"] is True
    (message,) = db.retained("set/1")
    assert (message.payload, message.properties) == (b"on", ts.Properties(content_type="text"))
    assert http.delete("/retained", params={"topic": "set/1"}).json() == {"topic": "set/1", "cleared": True}
    assert db.retained("set/1") == []
    assert http.delete("/retained", params={"topic": "set/1"}).status_code == 404
    assert http.delete("/retained", params={"topic": "#"}).status_code == 400


@pytest.mark.parametrize("body", [{"topic": "x", "payload": ""}, {"topic": "x/#", "payload": "1"}, {"topic": "x"}, []])
def test_what_can_t_be_retained_is_refused(http: httpx.Client, db: ts.Database, body: object) -> None:
    """A message that can't be retained is refused, and nothing is published."""
    assert http.put("/retained", json=body).status_code == 400
    assert db.retained("x") == []
