"""`Sessions.pace`, the intervals of periodic work; and the batch size, a session's limit for one delivery."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import topicstore as ts
from topicstore.sessions import Sessions
from topicstore_conformance.faults.clock import Clock


@pytest.mark.parametrize("pause", [0.25, 7.0])
def test_the_longest_pause_can_be_set(sessions: Sessions, pause: float) -> None:
    """`tick` returns at most the longest pause that is set, if nothing is due earlier."""
    assert sessions.tick() == 1.0
    sessions.pace.longest_pause = pause
    assert pause == sessions.tick()
    sessions.open("c", keep_alive=2)
    assert min(pause, 3.0) == sessions.tick()


@pytest.mark.parametrize(("passed", "lost"), [(39, 1), (40, 0)])
def test_acknowledgements_are_committed_as_often_as_is_set(
    sessions: Sessions,
    clock: Clock,
    publish: Callable[..., None],
    crash: Callable[[], Sessions],
    passed: int,
    lost: int,
) -> None:
    """Acknowledgements are committed at the interval that is set, and not before.

    Uncommitted acknowledgements are lost in a crash, so that their messages are redelivered.
    """
    sessions.pace.checkpoint_interval = 40
    session = sessions.open("c", expiry_interval=None)
    session.subscribe("a/+", 1)
    publish("1")
    [(one, [packet])] = sessions.deliver()
    one.puback(packet.packet_id)
    sessions.tick()
    clock.now += passed * 1_000_000
    sessions.tick()
    assert lost == len(crash().open("c", expiry_interval=None).deliver())


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), "1s", None, True])
def test_an_invalid_duration_is_refused(sessions: Sessions, wrong: object) -> None:
    """An invalid duration is refused, and the earlier value stays."""
    with pytest.raises(ts.InvalidArgumentError, match="is seconds above 0"):
        sessions.pace.longest_pause = wrong  # type: ignore[assignment]
    with pytest.raises(ts.InvalidArgumentError, match="is seconds above 0"):
        sessions.pace.checkpoint_interval = wrong  # type: ignore[assignment]
    assert (1.0, 15.0) == (sessions.pace.longest_pause, sessions.pace.checkpoint_interval)


def test_a_session_takes_no_more_than_its_batch_size(sessions: Sessions, publish: Callable[..., None]) -> None:
    """A session takes at most its batch size in each delivery; other sessions aren't limited, and nothing is lost."""
    few, many = sessions.open("few", batch_size=3), sessions.open("many")
    for session in (few, many):
        session.subscribe("a/+", 1)
    publish(*map(str, range(7)))
    counts: dict[str, list[int]] = {"few": [], "many": []}
    while delivered := sessions.deliver():
        for session, packets in delivered:
            counts[session.client_id].append(len(packets))
    assert counts == {"few": [3, 3, 1], "many": [7]}


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3"])
def test_a_batch_size_is_a_number(sessions: Sessions, wrong: object) -> None:
    """A batch size that isn't an integer of at least 1 is refused."""
    with pytest.raises(ts.InvalidArgumentError, match="batch_size"):
        sessions.open("c", batch_size=wrong)  # type: ignore[arg-type]
