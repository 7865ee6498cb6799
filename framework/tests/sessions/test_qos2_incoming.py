"""What clients publish through their sessions: QoS 2 exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import topicstore as ts
from topicstore.sessions import Sessions, SessionTakenOverError


def message(payload: str, qos: int = 2, client_id: str = "client") -> ts.Message:
    return ts.Message("a/b", payload.encode(), client_id, qos)


def stored(db: ts.Database) -> list[str]:
    return [found.payload.decode() for found in db.replay("#")]


@pytest.fixture
def listening(sessions: Sessions) -> None:
    """Somebody wants all messages stored."""
    sessions.open("listener", expiry_interval=None).subscribe("#", 2)


@pytest.mark.usefixtures("listening")
def test_a_repeated_packet_id_is_stored_once_until_it_is_released(db: ts.Database, sessions: Sessions) -> None:
    """In one call, in another, and behind a release it is a new message."""
    client = sessions.open("client", expiry_interval=None)
    assert 2 == client.publish([message("1"), message("1"), message("2")], [7, 7, 8]).count
    assert 0 == client.publish([message("1")], [7]).count
    assert 1 == client.publish([message("1", qos=1)], [7]).count
    assert client.pubrel(7)
    assert not client.pubrel(7)
    assert 1 == client.publish([message("3")], [7]).count
    assert 2 == client.pubrel(7, 8, 9)
    assert ["1", "2", "1", "3"] == stored(db)


@pytest.mark.usefixtures("listening")
def test_the_message_and_its_packet_id_survive_a_crash_together(
    db: ts.Database, sessions: Sessions, crash: Callable[[], Sessions]
) -> None:
    """So does the release."""
    client = sessions.open("client", expiry_interval=None)
    client.publish([message("1"), message("2")], [7, 8])
    client.pubrel(8)
    client = crash().open("client", expiry_interval=None)
    assert 0 == client.publish([message("1")], [7]).count
    assert 1 == client.publish([message("3")], [8]).count
    assert ["1", "2", "3"] == stored(db)


def test_what_nobody_wants_stored_is_known_all_the_same(db: ts.Database, sessions: Sessions) -> None:
    """Its id is committed, and it goes by only once."""
    zero = sessions.open("zero")
    zero.subscribe("#", 0)
    client = sessions.open("client", expiry_interval=None)
    client.publish([message("1")], [7])
    client.publish([message("1")], [7])
    assert [] == stored(db)
    assert 1 == len(zero.deliver())
    assert 1 == sessions["client"].awaiting_pubrel


@pytest.mark.usefixtures("listening")
def test_messages_without_ids_are_published_as_they_are(db: ts.Database, sessions: Sessions) -> None:
    """QoS 0 and 1 have nothing to remember."""
    client = sessions.open("client")
    client.publish([message("1", 0), message("2", 1)])
    client.publish([message("1", 0), message("2", 1)], [0, 9])
    assert ["1", "2", "1", "2"] == stored(db)


@pytest.mark.parametrize(
    ("messages", "ids"),
    [([message("1", client_id="other")], [1]), ([message("1")], [1, 2]), ([message("1")], [65_536])],
)
def test_what_makes_no_sense_is_refused(
    db: ts.Database, sessions: Sessions, messages: list[ts.Message], ids: list[int]
) -> None:
    """And nothing is stored."""
    client = sessions.open("client")
    with pytest.raises(ts.InvalidArgumentError):
        client.publish(messages, ids)
    assert [] == stored(db)
    assert 0 == sessions["client"].awaiting_pubrel


@pytest.mark.usefixtures("listening")
def test_an_owner_that_was_overtaken_stores_nothing(
    db: ts.Database, sessions: Sessions, crash: Callable[[], Sessions]
) -> None:
    """Its message and its id are refused together."""
    client = sessions.open("client", expiry_interval=None)
    newer = crash().open("client", expiry_interval=None)
    with pytest.raises(SessionTakenOverError):
        client.publish([message("1")], [7])
    assert [] == stored(db)
    assert 1 == newer.publish([message("1")], [7]).count
