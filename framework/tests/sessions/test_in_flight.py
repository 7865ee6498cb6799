"""Packet ids are unique within the in-flight window.

`DatabasePartsSuite` tests messages in flight with random sequences of operations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from topicstore.sessions import PubRel, Sessions, SubscribeOptions
from topicstore.sessions.in_flight import MAX_PACKET_ID, InFlight, InFlightBatch
from topicstore.sessions.records import Keys


def test_ids_wrap_around_what_is_still_in_use() -> None:
    """If all packet ids except three are in use, those three are found, even by wrapping around."""
    in_flight = InFlight(Keys("client"))
    all_ids = range(1, MAX_PACKET_ID + 1)
    positions = np.arange(len(all_ids), dtype=np.uint64)
    in_flight.apply(
        in_flight.stage([InFlightBatch(0, "a", 0, SubscribeOptions(1), all_ids, 1, positions)], whole=False)
    )
    assert 3 == in_flight.puback_many([5, 40_000, 65_535])
    assert [5, 40_000, 65_535] == list(in_flight.free_ids(3))


def test_packet_ids_are_unique_over_the_whole_window(
    sessions: Sessions, publish: Callable[..., None], crash: Callable[[], Sessions]
) -> None:
    """Packet ids that wrap around skip the ids still in use, even after a crash."""
    session = sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/#", 1)
    publish(*map(str, range(50)))
    waiting = {item.packet_id for item in session.deliver()} - set(range(1, 40))
    session.puback(*range(1, 40))
    for _ in range(14):
        publish(*map(str, range(5_000)))
        while items := session.deliver(5_000):
            ids = [item.packet_id for item in items]
            assert len(ids) == len(set(ids))
            assert waiting.isdisjoint(ids)
            session.puback(*ids)
    session.checkpoint()
    session = crash().open("subscriber", expiry_interval=None)
    assert waiting == {item.packet_id for item in session.deliver()}
    publish("new")
    assert waiting.isdisjoint(item.packet_id for item in session.deliver())


def test_what_is_in_flight_to_one_client_is_not_in_flight_to_another(
    sessions: Sessions, publish: Callable[..., None]
) -> None:
    """At any QoS and step of one client's exchanges, an idle session has nothing in flight and nothing to send."""
    idle, busy = sessions.open("idle", expiry_interval=None), sessions.open("busy", expiry_interval=None)
    idle.subscribe("b/#", 2)
    busy.subscribe("a/#", 2)
    for qos in (1, 2, 1, 2):
        publish("one", "two", qos=qos)
        ids = [packet.packet_id for packet in busy.deliver()]
        assert 2 * (qos - 1) == busy.pubrec(*ids)
        assert [PubRel(one) for one in ids] * (qos - 1) == busy.deliver()
        assert 2 == busy.pubrec(*ids) + busy.puback(*ids)
        assert [PubRel(one) for one in ids] * (qos - 1) == busy.deliver()  # a repeated PUBREC is answered again
        assert (0, 0, "nothing") == (idle.status().in_flight, idle.status().to_resend, idle.status().waits_for)
        assert [] == idle.deliver()
        assert 2 * (qos - 1) == busy.pubcomp(*ids)
        busy.checkpoint()
        assert 0 == busy.status().in_flight
