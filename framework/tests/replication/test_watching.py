"""Detection of unresponsive sites, the order of takeovers, and the back-off after failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from topicstore.replication.watching import BackOff, OwnersProgress, Silences, patience


def test_a_site_is_unresponsive_since_its_heartbeat_was_first_seen() -> None:
    """The time without a heartbeat counts from the first reading of a site's current number, even if it decreased.

    A site that is missing from a call is forgotten.
    """
    silences, a, b = Silences(), b"process of a", b"process of b"
    assert {"a": 0.0, "b": 0.0} == silences.look({"a": (a, 7), "b": (b, 1)}, 100.0)
    assert {"a": 5.0, "b": 0.0} == silences.look({"a": (a, 7), "b": (b, 2)}, 105.0)
    assert {"a": 0.0} == silences.look({"a": (a, 1)}, 110.0)
    assert {"a": 2.0, "b": 0.0} == silences.look({"a": (a, 1), "b": (b, 2)}, 112.0)


def test_a_new_process_is_not_unresponsive_before_its_first_heartbeat() -> None:
    """A new process of an unresponsive site counts as alive when it enters the cluster, before its first heartbeat."""
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


def test_a_back_off_doubles_with_each_failure_up_to_a_bound() -> None:
    """Each failure of a site doubles its back-off, up to 256 times the first; without a failure for as long it resets.

    The back-off begins when the failure is over, and recording the same failure repeatedly doesn't double it.
    """
    back_off, now = BackOff(2.0), 1_000.0
    assert 0.0 == back_off.look(False, now)
    for length in (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 512.0):
        assert [length] * 2 == [back_off.look(True, now), back_off.look(True, now + 50.0)]
        assert length - 1.0 == back_off.look(False, now + 51.0)
        now += 50.0 + length
        assert 0.0 == back_off.look(False, now)
    assert 2.0 == back_off.look(True, now + 512.0)


SITES = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1)


@given(SITES)
def test_who_is_furthest_waits_least_and_no_two_wait_equally(applied: dict[str, int]) -> None:
    """The most advanced replica waits least before it takes over, and no two replicas wait for the same time."""
    waits = {site: patience(8.0, 1, site, applied) for site in applied}
    assert [8.0 + 2.0 * turn for turn in range(len(applied))] == sorted(waits.values())
    assert max(applied.values()) == applied[min(waits, key=lambda site: waits[site])]
    assert patience(8.0, 1, "unknown", applied) > max(waits.values())
