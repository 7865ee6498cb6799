"""Tests of deletes, which remove exactly the matching messages, in bounded steps with other writes between them."""

from __future__ import annotations

from itertools import islice

import pytest
from topicstore import TopicFilter

from .fixtures import Fixtures, Stored, numbered
from .reading import FILTERS, TOPICS

__all__ = ["Deleting"]


class Deleting(Fixtures):
    """Tests of `Slab.delete`."""

    def test_exactly_what_matches_goes(self, stored: Stored) -> None:
        """A delete removes and counts exactly the matching messages from its first to its last position (inclusive)."""
        for gap in (1, 9, 1):
            stored.put(numbered(TOPICS, 120), gap)
        positions = [row[0] for row in stored.rows]
        for topic_filter, first, last in (
            ("f/y/3/s", 0, None),
            ("f/+/4/+", positions[100], positions[200]),
            ("f/+/+/t", positions[30], positions[31]),
            ("#", positions[300], positions[300]),
            ("#", positions[310] + 1, positions[311] - 1),
            ("$SYS/#", 0, positions[150]),
            ("no/such/topic", 0, None),
            ("+", positions[50], None),
        ):
            stored.delete(topic_filter, first, last)
            stored.check_all()
            assert stored.delete(topic_filter, first, last) == 0
        stored.reopen()
        stored.check_all()
        for topic_filter in FILTERS:
            stored.check(topic_filter)

    def test_what_is_to_be_spared_stays(self, stored: Stored) -> None:
        """A delete keeps matching messages whose topics also match one of the filters to spare."""
        stored.put(numbered(TOPICS, 200), 3)
        stored.compact()
        stored.put(numbered(TOPICS, 100), 3)
        positions = [row[0] for row in stored.rows]
        for topic_filter, first, last, spare in (
            ("f/+/+/t", 0, positions[60], ["f/x/#"]),
            ("f/y/#", positions[30], positions[250], ["+/+/3/+", "f/y/4/s"]),
            ("#", positions[200], None, ["no/such/topic", "f/x/1/+", "g/#"]),
            ("#", 0, positions[20], ["#"]),
            ("#", 0, None, ["f/#"]),
        ):
            stored.delete(topic_filter, first, last, spare)
            stored.check_all()
            assert stored.delete(topic_filter, first, last, spare) == 0
        stored.reopen()
        stored.check_all()
        for topic_filter in FILTERS:
            stored.check(topic_filter)

    def test_everything_can_go(self, stored: Stored) -> None:
        """After everything was deleted neither readers nor `verify` find a message, and new ones can be stored."""
        stored.put(numbered(TOPICS, 300), 5)
        stored.compact()
        stored.put(numbered(TOPICS, 100), 5)
        for topic_filter in stored.everything():
            stored.delete(topic_filter)
        assert stored.rows == []
        assert stored.pairs() == []
        stored.check_all()
        stored.put(numbered(TOPICS, 50))
        stored.reopen()
        stored.check_all()

    def test_steps_are_bounded(self, stored: Stored) -> None:
        """A delete of 3,000 messages takes several steps, each of which removes at most 2,000."""
        for _ in range(300):
            stored.put(numbered(["a", "b"], 20))
        steps = stored.commit(stored.slab.delete(TopicFilter("a"), 0, stored.last))
        assert sum(steps) == 3_000
        assert max(steps) <= 2_000
        stored.forget("a", 0, stored.last)
        stored.check_all()

    def test_others_write_between_steps(self, stored: Stored) -> None:
        """Messages stored between two steps of a delete stay; all that matched when the delete began are removed."""
        for _ in range(100):
            stored.put(numbered(TOPICS, 30))
        last = stored.last
        for number, step in enumerate(stored.slab.delete(TopicFilter("f/+/+/t"), 0, last)):
            stored.engine.write(step.write)
            if number < 20:
                stored.put(numbered(["f/x/1/t", f"f/new/{number}/t", "g"], 9))
        stored.forget("f/+/+/t", 0, last)
        stored.check_all()
        stored.check("f/+/+/t")

    @pytest.mark.parametrize("taken", [0, 1, 2])
    def test_a_delete_is_resumed(self, stored: Stored, taken: int) -> None:
        """A delete that is abandoned after some steps has removed these steps' messages; another removes the rest."""
        for _ in range(150):
            stored.put(numbered(["a", "b", "c/d"], 20))
        gone = stored.commit(islice(stored.slab.delete(TopicFilter("b"), 0, stored.last), taken))
        stored.reopen()
        rest = stored.commit(stored.slab.delete(TopicFilter("b"), 0, stored.last))
        assert len(stored.wanted("b")) == sum(gone) + sum(rest)
        stored.forget("b", 0, stored.last)
        stored.check_all()
