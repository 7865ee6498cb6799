"""Message expiry: the remaining interval that subscribers receive, even after the wall clock was set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.positions import MAX_TIME, first_position
from topicstore.pubsub.message_expiry import Expiry, left_of
from topicstore_conformance.faults.clock import START, Clock

MOST = 0xFFFFFFFF
SECOND = 1_000_000

times = st.integers(0, MAX_TIME)


@given(interval=st.integers(0, MOST), since=times, now=times)
def test_what_is_left_is_within_the_published_interval(interval: int, since: int, now: int) -> None:
    """The remaining interval is rounded up to seconds, and at most the published interval.

    Columns yield the same values as single messages. Messages without an interval never expire.
    """
    expected = min(max(-((now - since - interval * SECOND) // SECOND), 0), interval)
    properties = [ts.Properties(message_expiry_interval=interval), None]
    assert expected == left_of(ts.Message("a", b"", properties=properties[0]), since, now)
    columns = Expiry.of(properties, np.array([first_position(since)] * 2, np.uint64))
    assert columns is not None
    assert ([expected, None], [now < since + interval * SECOND, True]) == (
        columns.left(slice(None), now),
        (columns.ends > now).tolist(),
    )


@pytest.mark.parametrize(
    ("stamp", "asked_at"),
    [(START + 50 * SECOND, START), (None, START - 30 * SECOND), (None, SECOND)],
    ids=["the clock of a device is ahead", "the wall clock was set back", "the wall clock begins in 1970"],
)
def test_no_interval_is_longer_than_was_published(tmp_path: Path, stamp: int | None, asked_at: int) -> None:
    """No subscriber receives a larger interval than was published [MQTT-3.3.2-6].

    The rule applies to stored, unstored and retained messages, and with overlapping subscriptions.
    """
    clock, timestamps = Clock(), "commit" if stamp is None else "message"
    with ts.open(tmp_path / "db", backend="memory", clock=clock, timestamps=timestamps) as db:
        each = db.sessions.open("each", expiry_interval=3600)
        once = db.sessions.open("once", expiry_interval=3600, overlapping="once")
        live = db.sessions.open("live")
        for session, qos in ((each, 1), (once, 1), (live, 0)):
            session.subscribe("a/+", qos=qos)
        once.subscribe("a/#", qos=1)
        intervals = {"a/short": 10, "a/longest": MOST}
        db.publish(
            [
                ts.Message(topic, b"x", "p", 1, True, stamp, ts.Properties(message_expiry_interval=seconds))
                for topic, seconds in intervals.items()
            ]
        )
        clock.now = asked_at
        for session in (each, once, live):
            assert intervals == {one.message.topic: one.expiry for one in session.deliver()}  # type: ignore[union-attr]
        retained = {m.topic: m.properties.message_expiry_interval for m in db.retained("a/+") if m.properties}
        assert intervals == retained
        late = db.sessions.open("late")
        late.subscribe("a/+", qos=1)
        assert intervals == {one.message.topic: one.expiry for one in late.deliver()}  # type: ignore[union-attr]
