"""Tests that compare the parts of a database with models, in random sequences of calls, crashes and kills."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.profiles import MACHINE
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.parts.fixtures import Fixtures
from topicstore_conformance.parts.machines import World, shows_at_once
from topicstore_conformance.parts.overlapping_machine import OverlappingHistories
from topicstore_conformance.parts.publishing_machine import PublishingHistories
from topicstore_conformance.parts.queue_machine import QueueHistories
from topicstore_conformance.parts.retention_machine import RetentionHistories
from topicstore_conformance.parts.sessions_machine import KilledSessionsHistories, SessionsHistories
from topicstore_conformance.parts.shared_machine import KilledSharedHistories, SharedHistories
from topicstore_conformance.parts.subscriptions_machine import SubscriptionHistories
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Histories"]

_AHEAD = pytest.mark.filterwarnings("ignore:shard .* its last position lies:UserWarning")


def run(machine: type[RuleBasedStateMachine], pair: Pair, quick: int, full: int, steps: int = 50) -> None:
    """Run a state machine on a pair, with a number of histories for each mode, tripled for databases in memory."""
    more = 1 if "persistent" in pair.capabilities else 3
    examples = tries(more * quick, more * full, pair.capabilities)
    how = settings(MACHINE, max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(type("Machine", (machine,), {"pair": pair}), settings=how)


class Histories(Fixtures):
    """Tests that compare the parts of a database with models."""

    def test_publishing_histories(self, pair: Pair) -> None:
        """In any history each shard has its model's stored and retained messages, and routed ones are sent once."""
        run(PublishingHistories, pair, 6, 40, steps=40)

    def test_subscription_histories(self, pair: Pair, world: World) -> None:
        """In any history each subscription yields the matching messages after its place once, in order."""
        if not shows_at_once(world.db):
            pytest.skip("is about layouts without epochs")
        run(SubscriptionHistories, pair, 6, 40, steps=40)

    @_AHEAD
    def test_sessions_histories(self, pair: Pair) -> None:
        """In any history each session is sent exactly its due messages, and at the end no message is due."""
        killed = "persistent" in pair.capabilities
        run(KilledSessionsHistories if killed else SessionsHistories, pair, 9, 50)

    @_AHEAD
    def test_overlapping_histories(self, pair: Pair) -> None:
        """In any history one delivery of a message serves all subscriptions that wait for it; none waits for ever."""
        run(OverlappingHistories, pair, 8, 100)

    @_AHEAD
    def test_shared_histories(self, pair: Pair) -> None:
        """In any history each message goes to one member, and to another only if the first hasn't acknowledged it."""
        killed = "persistent" in pair.capabilities
        run(KilledSharedHistories if killed else SharedHistories, pair, 6, 50, steps=40)

    @requires("persistent")
    def test_queue_histories(self, pair: Pair) -> None:
        """In any history a queue equals its model, and a call with a fault takes effect as a whole or not at all."""
        run(QueueHistories, pair, 5, 50, steps=40)

    @pytest.mark.filterwarnings("ignore:shard .* in the future")
    @pytest.mark.filterwarnings("ignore:the clock is .* ahead")
    @pytest.mark.filterwarnings("ignore:what is due could not be archived")
    def test_retention_histories(self, pair: Pair) -> None:
        """In any history reads return every message that must be there once, and none that must be gone."""
        run(RetentionHistories, pair, 4, 50, steps=40)
