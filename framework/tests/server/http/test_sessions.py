"""Sessions over HTTP, some held by MQTT clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import httpx
import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.wire import Will

WEEK = 604_800


@contextmanager
def connected(served: tuple[ts.Database, Server], client_id: str, *filters: str) -> Iterator[RawClient]:
    """Connect a client whose session lasts a week, and subscribe it at QoS 1."""
    with RawClient(int(served[1].addresses[0].rpartition(":")[2])) as client:
        client.connect(client_id, clean=False, session_expiry_interval=WEEK, receive_maximum=10)
        if filters:
            client.subscribe(*filters, options=1)
        yield client


def away(db: ts.Database, client_id: str, topic_filter: str) -> None:
    """Create a session with a subscription, and end its client's connection."""
    session = db.sessions.open(client_id, expiry_interval=WEEK)
    session.subscribe(topic_filter)
    session.disconnect()


def names(answer: httpx.Response) -> list[str]:
    """Return the client ids of a page."""
    assert answer.status_code == 200, answer.text
    return [one["client_id"] for one in answer.json()["items"]]


def test_a_session_shows_subscriptions_window_and_lag(
    http: httpx.Client, db: ts.Database, served: tuple[ts.Database, Server]
) -> None:
    """A session shows its subscriptions, lag, number of unacknowledged messages, and the client's receive maximum."""
    with connected(served, "show/1", "show/#") as client:
        db.publish([ts.Message("show/a", b"1", "p", 1)])
        client.publishes(1)
        shown = http.get("/sessions/show%2F1").json()
    assert shown["connected"] is True
    assert [one["filter"] for one in shown["subscriptions"]] == ["show/#"]
    assert shown["subscriptions"][0]["lag"] == {"messages": 0, "exact": True, "seconds": 0.0}
    assert shown["in_flight"] == 1
    assert shown["connection"]["receive_maximum"] == 10
    assert shown["expiry_interval"] == WEEK


def test_a_session_shows_where_its_client_is_and_its_will(
    http: httpx.Client, db: ts.Database, served: tuple[ts.Database, Server]
) -> None:
    """A connected session shows its client's address and will; a session of the server's own process has no address."""
    with RawClient(int(served[1].addresses[0].rpartition(":")[2])) as client:
        client.connect(
            "where", clean=False, session_expiry_interval=WEEK, will=Will(topic="where/will", payload=b"gone")
        )
        host, port = client.socket.getsockname()
        shown = http.get("/sessions/where").json()
    away(db, "where/else", "x/#")
    db.sessions.open("where/here", expiry_interval=WEEK)
    here = http.get("/sessions/where%2Fhere").json()
    assert shown["connection"]["address"] == f"{host}:{port}"
    assert shown["will_delay"] == 0
    assert here["connection"]["address"] is None
    assert http.get("/sessions/where%2Felse").json()["will_delay"] is None


def test_a_kicked_client_gets_the_reason_and_keeps_its_session(
    http: httpx.Client, served: tuple[ts.Database, Server]
) -> None:
    """A kicked client gets a DISCONNECT with 0x98, and keeps its session for the next connection."""
    with connected(served, "kicked", "kicked/#") as client:
        assert http.post("/sessions/kicked/kick").json() == {"client_id": "kicked", "kicked": True}
        assert client.farewell() == ("DISCONNECT", 0x98)
    shown = http.get("/sessions/kicked").json()
    assert (shown["connected"], shown["connection"]) == (False, None)
    assert http.post("/sessions/kicked/kick").json() == {"client_id": "kicked", "kicked": False}
    with RawClient(int(served[1].addresses[0].rpartition(":")[2])) as again:
        assert again.connect("kicked", clean=False, session_expiry_interval=WEEK).present


def test_an_expired_session_is_gone(http: httpx.Client, served: tuple[ts.Database, Server]) -> None:
    """Expiring a session closes its client's connection; afterwards the session is not found."""
    with connected(served, "expired", "expired/#") as client:
        assert http.delete("/sessions/expired").json() == {"client_id": "expired", "expired": True}
        last = client.ended()
        assert last.reason == 0x98
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/kick")):
        answer = http.request(method, f"/sessions/expired{path}")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def test_sessions_come_in_pages_and_are_searched(
    http: httpx.Client, db: ts.Database, served: tuple[ts.Database, Server]
) -> None:
    """Sessions are listed in pages in the order of client ids, each once, and can be searched."""
    for number in range(5):
        away(db, f"page-{number}", "page/#")
    first = http.get("/sessions", params={"prefix": "page-", "limit": 3})
    assert (names(first), first.json()["next"]) == (["page-0", "page-1", "page-2"], "page-2")
    rest = http.get("/sessions", params={"prefix": "page-", "limit": 3, "after": first.json()["next"]})
    assert (names(rest), rest.json()["next"]) == (["page-3", "page-4"], None)
    assert names(http.get("/sessions", params={"search": "ge-4"})) == ["page-4"]
    with connected(served, "page-3"):
        found = {
            flag: names(http.get("/sessions", params={"prefix": "page-", "connected": flag}))
            for flag in ("true", "false")
        }
    assert found == {"true": ["page-3"], "false": ["page-0", "page-1", "page-2", "page-4"]}


def test_those_that_wait_longest_come_first(http: httpx.Client, db: ts.Database) -> None:
    """Sorted by lag, the session whose next message has waited longest comes first.

    Sessions without waiting messages are omitted.
    """
    for name in ("idle", "late", "early", "both"):
        away(db, f"lag-{name}", f"lag/{name}/#")
    for name in ("both", "early", "late", "both"):
        db.store([ts.Message(f"lag/{name}/x", b"1", "p", 1)])
    answer = http.get("/sessions", params={"prefix": "lag-", "sort": "lag"})
    assert names(answer) == ["lag-both", "lag-early", "lag-late"]
    assert [one["lag"]["messages"] for one in answer.json()["items"]] == [2, 1, 1]
    assert names(http.get("/sessions", params={"prefix": "lag-", "sort": "lag", "limit": 1})) == ["lag-both"]
    assert http.get("/sessions", params={"sort": "lag", "after": "x"}).status_code == 400


def test_lag_is_what_the_library_counts(http: httpx.Client, db: ts.Database) -> None:
    """The lag by client and filter over HTTP equals the lag that the Python API reports."""
    away(db, "counted", "counted/#")
    db.store([ts.Message("counted/x", b"1", "p", 1)] * 3)
    (lag,) = db.sessions.lag("counted")["counted"].values()
    assert http.get("/lag", params={"client_id": "counted"}).json() == {"counted": {"counted/#": attrs.asdict(lag)}}
    assert lag.messages == 3
    assert http.get("/lag", params={"client_id": "nobody"}).status_code == 404


def test_groups_show_who_shares_and_how_far_they_are(http: httpx.Client, db: ts.Database) -> None:
    """A shared subscription shows its members and the lag of the whole group."""
    for name in ("one", "two"):
        away(db, f"group-{name}", "$share/workers/group/#")
    db.store([ts.Message("group/x", b"1", "p", 1)] * 4)
    (group,) = [one for one in http.get("/groups").json()["items"] if one["topic_filter"] == "group/#"]
    assert (group["name"], [one["client_id"] for one in group["members"]]) == ("workers", ["group-one", "group-two"])
    assert group["lag"]["messages"] == 4


@pytest.mark.parametrize("limit", ["0", "10001", "x"])
def test_a_page_has_a_bound(http: httpx.Client, limit: str) -> None:
    """An invalid page limit is refused with the parameter's name."""
    answer = http.get("/sessions", params={"limit": limit})
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["key"] == "limit"
