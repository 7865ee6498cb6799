"""Following messages over HTTP: server-sent events, resuming after a disconnect, heartbeats, the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx
import msgspec
import pytest
import topicstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topicstore.server import Server
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of, connected

Event = dict[str, str]


def _events(answer: httpx.Response) -> Iterator[Event]:
    """Yield events parsed as the HTML standard says; a comment is an event with one key."""
    event: Event = {}
    for line in answer.iter_lines():
        if line.startswith(":"):
            event["comment"] = line[1:]
        elif line:
            name, _, value = line.partition(": ")
            event[name] = value
        else:
            yield event
            event = {}


def _payload(event: Event) -> str:
    payload: str = msgspec.json.decode(event["data"])["payload"]
    return payload


@pytest.fixture
def client(served: tuple[ts.Database, Server]) -> Iterator[httpx.Client]:
    """A client without a timeout."""
    with client_of(served[1], timeout=None) as client:
        yield client


def test_what_is_stored_comes_first_and_then_what_is_new(client: httpx.Client, db: ts.Database) -> None:
    db.store([ts.Message("tail/a", b"old")])
    with client.stream("GET", "/messages/tail", params={"filter": "tail/#", "start": "-1h"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = _events(answer)
        assert "data" not in next(events)  # the position at which the stream begins
        old = next(events)
        assert _payload(old) == "old"
        db.store([ts.Message("tail/a", b"new")])
        assert _payload(next(events)) == "new"
    with client.stream("GET", "/messages/tail", params={"filter": "tail/#", "after": old["id"]}) as answer:
        assert [_payload(event) for event in _events_with_data(answer, 1)] == ["new"]


def _events_with_data(answer: httpx.Response, number: int) -> list[Event]:
    return list(islice((event for event in _events(answer) if "data" in event), number))


def test_without_a_start_it_begins_now_and_messages_that_are_not_stored_come_too(
    client: httpx.Client, db: ts.Database
) -> None:
    db.store([ts.Message("now/a", b"before")])
    with client.stream("GET", "/messages/tail", params={"filter": "now/#"}) as answer:
        events = _events(answer)
        place = next(events)["id"]
        db.publish([ts.Message("now/a", b"passed on")])
        passed = next(events)
        assert (_payload(passed), "id" in passed) == ("passed on", False)
        db.store([ts.Message("now/a", b"stored")])
        assert _payload(next(events)) == "stored"
    with client.stream("GET", "/messages/tail?filter=now/%23", headers={"Last-Event-ID": place}) as answer:
        assert [_payload(event) for event in _events_with_data(answer, 1)] == ["stored"]


def test_comments_come_while_nothing_else_does(client: httpx.Client) -> None:
    with client.stream("GET", "/messages/tail", params={"filter": "silence", "heartbeat": 0.01}) as answer:
        events = _events(answer)
        next(events)
        assert [next(events), next(events)] == [{"comment": ""}] * 2


@pytest.mark.parametrize("position", ["", "x", "0x1", "-1", "f" * 17, "f" * 5_000, "1-1"])
def test_a_place_of_nowhere_is_refused(client: httpx.Client, db: ts.Database, position: str) -> None:
    shards = len(db.info().shards)
    for place in (
        position,
        f"{db.id.hex()}-{'-'.join([position] * shards)}",
        f"{bytes(16).hex()}-{'-'.join('1' * shards)}",
    ):
        with client.stream("GET", "/messages/tail", params={"after": place or "x"}) as answer:
            assert answer.status_code == 400


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_client_that_is_cut_off_anywhere_misses_nothing_and_gets_nothing_twice(
    client: httpx.Client, db: ts.Database, data: st.DataObject
) -> None:
    """A client that is cut off after any byte and resumes misses nothing and gets nothing twice.

    An event counts once it was read to its end.
    """
    level = f"cut/{db.clock()}"
    sent = 0

    def store() -> None:
        nonlocal sent
        batch = data.draw(st.integers(1, 20))
        clients = data.draw(st.integers(1, 5))
        db.store([ts.Message(level, b"%d" % (sent + one), f"c{one % clients}") for one in range(batch)])
        sent += batch

    got: list[int] = []
    with client.stream("GET", "/messages/tail", params={"filter": level}) as answer:
        last = next(_events(answer))["id"]
    store()
    while len(got) < sent:
        if sent < 40 and data.draw(st.booleans()):
            store()
        left = data.draw(st.integers(300, 6_000))
        with client.stream(
            "GET", "/messages/tail", params={"filter": level}, headers={"Last-Event-ID": last}
        ) as answer:
            text = b""
            for piece in answer.iter_raw():
                text += piece[:left]
                left -= len(piece)
                if left <= 0 or text.count(b"\ndata: ") == sent - len(got):
                    break
        for event in text.split(b"\n\n")[:-1]:
            fields = dict(line.split(b": ", 1) for line in event.split(b"\n"))
            last = fields[b"id"].decode()
            if b"data" in fields:
                got.append(int(msgspec.json.decode(fields[b"data"])["payload"]))
    assert sorted(got) == list(range(sent))


def _chunks(server: Server, path: str) -> Iterator[bytes]:
    """Yield the body of a response in the pieces that the server sent."""
    with connected(server) as connection, connection.makefile("rb") as answer:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        while answer.readline() != b"\r\n":
            pass
        while True:
            yield answer.read(int(answer.readline(), 16))
            answer.readline()


def test_a_client_that_does_not_read_has_little_in_memory(served: tuple[ts.Database, Server], db: ts.Database) -> None:
    """For a client that doesn't read, the server encodes one message at a time, even if many messages wait."""
    sizes = [10, 600_000, *[40_000] * 50, 0]
    db.store([ts.Message("pieces/a", bytes(size)) for size in sizes])
    pieces, got = [], b""
    for piece in _chunks(served[1], "/api/v5/messages/tail?filter=pieces/%23&start=-1h"):
        pieces.append(len(piece))
        got += piece
        if got.count(b"data: ") == len(sizes):
            break
    assert max(pieces) < 6 * 600_000 + 1_000  # a single message: each of its 600,000 zero bytes takes six bytes of JSON
    assert len(pieces) > 8
    found = [json.loads(line.removeprefix(b"data: ")) for line in got.splitlines() if line.startswith(b"data: ")]
    assert [len(message["payload"]) for message in found] == sizes


def test_a_generation_that_was_dropped_is_reported_once_also_to_who_connects_again(tmp_path: Path) -> None:
    db = ts.open(tmp_path / "db", backend="memory", shards=1)
    with db, serving_http(db) as server, client_of(server, "/api/v5/messages/tail", None) as client:
        with client.stream("GET", "") as answer:
            place = next(_events(answer))["id"]
        db.store([ts.Message("a", b"lost")])
        db.add_generation()
        db.drop_generation(1)
        with client.stream("GET", "", params={"after": place}) as answer:
            events = _events(answer)
            next(events)
            assert {"event": "dropped", "data": "[1]"} == next(events)
            place = next(events)["id"]
        with client.stream("GET", "", params={"after": place}) as answer:
            events = _events(answer)
            next(events)
            db.store([ts.Message("a", b"new")])
            assert _payload(next(events)) == "new"


def test_tails_end_with_the_server_and_leave_nothing_behind(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db) as server:
        context = server.http.context if server.http is not None else None
        assert context is not None
        url = f"{server.urls_of_http[0]}/api/v5/messages/tail"
        begun = len(context.on_stop)
        with httpx.Client(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
            answers = [client.send(client.build_request("GET", url), stream=True) for _ in range(100)]
            events = [_events(answer) for answer in answers]
            assert all("id" in next(each) for each in events)
            db.store([ts.Message("a", b"1")])
            assert [_payload(next(each)) for each in events] == ["1"] * 100
            assert len(context.on_stop) == begun + 100
            server.http.stop()  # type: ignore[union-attr]
            assert [list(each) for each in events] == [[]] * 100
            assert len(context.on_stop) == begun
            for answer in answers:
                answer.close()
