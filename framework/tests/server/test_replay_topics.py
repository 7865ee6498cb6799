"""Clients request the history by a user property, or by a special filter, which MQTT 3.1.1 clients can use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import topicstore as ts
from topicstore.server.mqtt.reserved_topics import split_replay
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.paho_client import PahoClient, properties

both = pytest.mark.parametrize("version", [4, 5])
HISTORY = [f"{number}" for number in range(10)]


@pytest.fixture
def embedded(db: ts.Database) -> Iterator[Embedded]:
    """A server that stores all messages, and whose database has earlier messages."""
    with Embedded(db) as embedded:
        db.persistence.add("#")
        for payload in HISTORY:
            db.publish([ts.Message("log/a", payload.encode(), "past", 1)])
        yield embedded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", ("a/b", None)),
        ("$replay/beginning/a/#", ("a/#", "beginning")),
        ("$replay/-2h/a", ("a", "-2h")),
        ("$replay/2025-06-01T12:00//", ("/", "2025-06-01T12:00")),
        ("$share/g/$replay/-1d/a/+", ("$share/g/a/+", "-1d")),
        ("$replay/-1d/$share/g/a/+", ("$share/g/a/+", "-1d")),
        ("$share/g/a/$replay/-1d/b", ("$share/g/a/$replay/-1d/b", None)),
        ("$replayed/a/b", ("$replayed/a/b", None)),
    ],
)
def test_a_filter_says_where_to_begin(text: str, expected: tuple[str, str | None]) -> None:
    assert split_replay(text) == expected


@both
def test_a_late_client_gets_the_history_then_what_comes(embedded: Embedded, version: int) -> None:
    """A late client gets the history and then live messages, with their original topics."""
    with PahoClient(embedded.port, version=version) as client:
        assert client.subscribe("$replay/beginning/log/#") == 1
        client.received(len(HISTORY))
        embedded.db.publish([ts.Message("log/b", b"live", "program", 1)])
        assert client.payloads(len(HISTORY) + 1) == [*HISTORY, "live"]
        assert {message.topic for message in client.messages} == {"log/a", "log/b"}


@both
def test_only_what_is_newer_than_the_start_comes(embedded: Embedded, version: int) -> None:
    moment = [message.timestamp for message in embedded.db.replay("log/a")][6]
    with PahoClient(embedded.port, version=version) as client:
        assert client.subscribe(f"$replay/{moment}/log/a") == 1
        assert client.payloads(4) == HISTORY[6:]


def test_it_is_the_same_as_the_user_property(embedded: Embedded) -> None:
    with PahoClient(embedded.port) as client:
        asked = properties("SUBSCRIBE")
        asked.UserProperty = ("topicstore-start", "-1h")
        assert client.subscribe("log/a", values=asked) == 1
        assert client.payloads(len(HISTORY)) == HISTORY


@both
@pytest.mark.parametrize("text", ["$share/g/$replay/beginning/log/#", "$replay/beginning/$share/g/log/#"])
def test_a_group_may_share_the_history(embedded: Embedded, version: int, text: str) -> None:
    with PahoClient(embedded.port, version=version) as client:
        assert client.subscribe(text) == 1
        assert client.payloads(len(HISTORY)) == HISTORY
        assert [info.name for info in embedded.db.sessions.groups] == ["g"]


@both
@pytest.mark.parametrize("name", ["$replay/-1h/log/a", "log/a"])
def test_it_is_unsubscribed_by_either_name(embedded: Embedded, version: int, name: str) -> None:
    with PahoClient(embedded.port, version=version) as client:
        client.subscribe("$replay/now/log/a")
        assert client.unsubscribe(name) == (None if version == 4 else 0)
        embedded.db.publish([ts.Message("log/a", b"unheard", "program", 1)])
        client.subscribe("other")
        embedded.db.publish([ts.Message("other", b"heard", "program", 1)])
        assert client.payloads(1) == ["heard"]


@both
def test_a_start_that_is_none_refuses_the_filter(embedded: Embedded, version: int) -> None:
    plain = ("yesterday/log/a", "", "/a", "-2h", "-2h/", "-2h/$replay/-1h/a")
    texts = [*(f"$replay/{text}" for text in plain), "$share/g/$replay/x/a", "$share/g/$replay/-2h"]
    with PahoClient(embedded.port, version=version) as client:
        for text in texts:
            assert (text, client.subscribe(text)) == (text, 0x80 if version == 4 else 0x8F)
        assert client.subscribe("log/b") == 1


@both
def test_nobody_publishes_to_it(embedded: Embedded, version: int) -> None:
    with PahoClient(embedded.port, version=version) as client:
        assert client.publish("$replay/-2h/a") == (0 if version == 4 else 0x90)
    assert embedded.db.topics("$replay/#") == []


@both
@pytest.mark.parametrize("how", ["filter", "property"])
def test_no_message_comes_as_a_retained_copy_and_from_the_history(embedded: Embedded, version: int, how: str) -> None:
    embedded.db.publish([ts.Message("log/kept", text.encode(), "past", 1, retain=True) for text in ("old", "new")])
    with PahoClient(embedded.port, version=version) as client:
        if how == "filter" or version == 4:
            assert client.subscribe("$replay/beginning/log/kept") == 1
        else:
            values = properties("SUBSCRIBE", UserProperty=("topicstore-start", "beginning"))
            assert client.subscribe("log/kept", values=values) == 1
        embedded.db.publish([ts.Message("log/kept", b"live", "program", 1)])
        assert client.payloads(3) == ["old", "new", "live"]


def test_a_replay_of_a_filter_that_the_client_has_begins_it_anew(embedded: Embedded) -> None:
    """A replay with the filter of an existing subscription restarts that subscription, without duplicates later.

    Unsubscribing from the plain filter, without the prefix ``$replay``, ends the subscription.
    """
    with PahoClient(embedded.port) as client:
        assert client.subscribe("log/a") == 1
        embedded.db.publish([ts.Message("log/a", b"live", "program", 1)])
        assert client.payloads(1) == ["live"]
        assert client.subscribe("$replay/beginning/log/a") == 1
        assert client.payloads(len(HISTORY) + 2) == ["live", *HISTORY, "live"]
        embedded.db.publish([ts.Message("log/a", b"more", "program", 1)])
        assert client.payloads(len(HISTORY) + 3)[-1] == "more"
        client.unsubscribe("log/a")
        assert client.subscribe("log/b") == 1
        embedded.db.publish([ts.Message(topic, topic.encode(), "program", 1) for topic in ("log/a", "log/b")])
        assert client.payloads(len(HISTORY) + 4)[-1] == "log/b"
