"""Bounds on messages that wait for a session: its oldest unread messages are skipped, and stay stored for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.sessions import Publish, Sessions, Skipped, backlog
from topicstore_conformance.faults.clock import Clock

Publishing = Callable[..., None]
Crash = Callable[[], Sessions]


def delivered(sessions: Sessions, client_id: str = "client") -> list[bytes]:
    """Connect a client, and return the payloads of the messages delivered to it."""
    session = sessions.open(client_id, expiry_interval=None)
    found = []
    while packets := session.deliver():
        found += [packet.message.payload for packet in packets if isinstance(packet, Publish)]
    session.disconnect()
    return found


@pytest.mark.parametrize("absent", [True, False])
@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_messages": 4}, 4),
        ({"max_bytes": 6}, 3),
        ({"max_messages": 2, "max_bytes": 100}, 2),
        ({"max_bytes": 1}, 0),
    ],
)
def test_the_oldest_are_skipped(
    db: ts.Database,
    sessions: Sessions,
    publish: Publishing,
    clock: Clock,
    crash: Crash,
    absent: bool,
    limits: dict[str, int],
    left: int,
) -> None:
    """Above a limit, the oldest messages are skipped for good, in absent and connected sessions, and stay stored."""
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1)
    session.subscribe("b", 1)
    other = sessions.open("other", expiry_interval=None)
    other.subscribe("#", 1)
    other.disconnect()
    if absent:
        session.disconnect()
    sent = [b"%02d" % number for number in range(10)]
    for number, payload in enumerate(sent):
        clock.now += 1_000_000
        publish(payload.decode(), topic="b" if number % 3 == 2 else "a/b", client_id=f"p{number}")
    skipped = Skipped(10 - left, 2 * (10 - left))
    assert {"client": skipped} == sessions.bound_backlogs(["client", "nobody"], **limits)
    assert {} == sessions.bound_backlogs(["client"], **limits)
    sessions = crash()
    assert sent[10 - left :] == sorted(delivered(sessions))
    assert sent == sorted(delivered(sessions, "other"))
    assert 10 == sum(1 for _ in db.replay("#"))


def test_what_is_in_flight_does_not_count(sessions: Sessions, publish: Publishing) -> None:
    """Messages in flight are neither counted nor skipped; reading continues after the skipped messages."""
    session = sessions.open("client", expiry_interval=None, receive_maximum=3)
    session.subscribe("#", 1)
    for number in range(9):
        publish(str(number))
    first = session.deliver()
    assert ["0", "1", "2"] == [one.message.payload.decode() for one in first]  # type: ignore[union-attr]
    assert {"client": Skipped(2, 2)} == sessions.bound_backlogs(["client"], max_messages=4)
    session.puback(*[one.packet_id for one in first])
    found = []
    while packets := session.deliver():
        found += [one.message.payload.decode() for one in packets]  # type: ignore[union-attr]
        session.puback(*[one.packet_id for one in packets])
    assert ["5", "6", "7", "8"] == found


@pytest.mark.parametrize("overlapping", ["each", "once"])
def test_overlapping_filters_count_each(sessions: Sessions, publish: Publishing, overlapping: str) -> None:
    """A message that matches several filters counts for each of them; newer messages are all delivered."""
    session = sessions.open("client", expiry_interval=None, overlapping=overlapping)  # type: ignore[arg-type]
    session.subscribe("a/#", 1)
    session.subscribe("a/b", 1)
    for number in range(8):
        publish(str(number), topic="a/b")
    assert {"client": Skipped(10, 10)} == sessions.bound_backlogs(["client"], max_messages=6)
    found = [one.message.payload.decode() for one in session.deliver()]  # type: ignore[union-attr]
    assert {"5", "6", "7"} == set(found)
    assert (3 if overlapping == "once" else 6) == len(found)


def test_a_long_backlog_is_bounded_in_steps(
    sessions: Sessions, publish: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a call may read only a part of a backlog, each call skips a part, but never more than exceeds the limit."""
    monkeypatch.setattr(backlog, "_LOOKED", 5)
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a", 1)
    session.subscribe("b", 1)
    session.disconnect()
    for number in range(60):
        publish(f"{number:02}", topic="a" if number < 30 or number % 2 else "b", client_id=f"p{number % 4}")
    skipped = Skipped()
    while some := sessions.bound_backlogs(["client"], max_messages=4).get("client"):
        skipped += some
    assert Skipped(56, 112) == skipped
    assert [b"56", b"57", b"58", b"59"] == sorted(delivered(sessions))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8),
    st.one_of(st.none(), st.integers(1, 30)),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_the_cut_never_skips_too_many(parts: list[tuple[int, bool]], most: int | None, most_bytes: int | None) -> None:
    """Skipping leaves at least as many messages as the limits allow, or all unread ones, whatever part was read."""
    import numpy as np

    rng = np.random.default_rng(len(parts))
    unread = []
    for number, (size, whole) in enumerate(parts):
        positions = np.sort(rng.choice(10_000, 5 * size + 1, replace=False)).astype(np.uint64)
        sizes = rng.integers(0, 4, len(positions))
        unread.append(backlog._Unread("#", number, positions, sizes, whole=whole))
    cut = backlog._cut(unread, backlog._MOST if most is None else most, most_bytes)
    everything = sorted(
        (int(position), int(size)) for one in unread for position, size in zip(one.positions, one.sizes, strict=True)
    )
    left = [(position, size) for position, size in everything if cut is None or position > cut]
    within = (most is None or len(left) <= most) and (most_bytes is None or sum(size for _, size in left) <= most_bytes)
    if all(one.whole for one in unread):
        assert within
    if cut is not None:
        gone = everything[: len(everything) - len(left)]
        one_more = [gone[-1], *left]
        assert (most is not None and len(one_more) > most) or (
            most_bytes is not None and sum(size for _, size in one_more) > most_bytes
        )
        assert all(one.whole or cut <= int(one.positions[-1]) for one in unread)
