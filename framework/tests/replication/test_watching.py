"""Detection of silent sites, and the order of takeovers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from topicstore.replication.watching import OwnersProgress, Rest, Silences, patience


def test_a_site_is_silent_since_its_beat_was_first_seen() -> None:
    """A site's silence counts from the time its current heartbeat number was first read, even if the number decreased.

    A site that is no longer looked at is forgotten.
    """
    silences, a, b = Silences(), b"process of a", b"process of b"
    assert {"a": 0.0, "b": 0.0} == silences.look({"a": (a, 7), "b": (b, 1)}, 100.0)
    assert {"a": 5.0, "b": 0.0} == silences.look({"a": (a, 7), "b": (b, 2)}, 105.0)
    assert {"a": 0.0} == silences.look({"a": (a, 1)}, 110.0)
    assert {"a": 2.0, "b": 0.0} == silences.look({"a": (a, 1), "b": (b, 2)}, 112.0)


def test_a_new_process_is_not_silent_before_its_first_beat() -> None:
    """A site that was silent counts at once when a new process of it has entered, although it has not beaten yet."""
    silences = Silences()
    silences.look({"a": (b"first", 7)}, 100.0)
    assert {"a": 50.0} == silences.look({"a": (b"first", 7)}, 150.0)
    assert {"a": 0.0} == silences.look({"a": (b"second", 7)}, 160.0)


def test_the_owners_progress_is_remembered_for_some_seconds() -> None:
    """Progress of owners is returned when it is as old as asked for, and never when it is more than twice as old."""
    progress = OwnersProgress(3.0)
    assert {} == progress.look({0: 10}, 100.0)
    assert {} == progress.look({0: 20}, 102.0)
    assert {0: 10} == progress.look({0: 30}, 104.0)
    assert {0: 20} == progress.look({0: 40, 1: 7}, 105.0)
    assert {} == progress.look({0: 90, 1: 9}, 115.0)


def test_a_rest_doubles_with_each_failure_up_to_a_bound() -> None:
    """Each failure of a site makes its rest twice as long, up to 256 times the first, until it was sound for as long.

    A rest begins when the failure is over, and repeated looks at one failure are one.
    """
    rest, now = Rest(2.0), 1_000.0
    assert 0.0 == rest.look(False, now)
    for length in (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 512.0):
        assert [length] * 2 == [rest.look(True, now), rest.look(True, now + 50.0)]
        assert length - 1.0 == rest.look(False, now + 51.0)
        now += 50.0 + length
        assert 0.0 == rest.look(False, now)
    assert 2.0 == rest.look(True, now + 512.0)


SITES = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1)


@given(SITES)
def test_who_is_furthest_waits_least_and_no_two_wait_equally(applied: dict[str, int]) -> None:
    """The most advanced replica waits least before it takes over, and no two replicas wait for the same time."""
    waits = {site: patience(8.0, 1, site, applied) for site in applied}
    assert [8.0 + 2.0 * turn for turn in range(len(applied))] == sorted(waits.values())
    assert max(applied.values()) == applied[min(waits, key=lambda site: waits[site])]
    assert patience(8.0, 1, "unknown", applied) > max(waits.values())
