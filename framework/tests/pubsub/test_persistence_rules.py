"""Persistence rules: which messages are stored permanently, by topic, publisher and QoS."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.pubsub.persistence_rules import PersistenceRule, PersistenceRules
from topicstore.shard.state import FrameworkWrite
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries

RULES = st.builds(
    PersistenceRule,
    st.sampled_from(["#", "+", "a", "a/#", "a/+", "+/b", "$s/#"]),
    client_id=st.sampled_from([None, "", "me", "you"]),
    least_qos=st.integers(0, 2),
)
TOPICS = ["a", "b", "a/b", "c/b", "a/b/c", "$s", "$s/x"]


@settings(COSTLY, max_examples=tries(40, 100))
@given(changes=st.lists(st.tuples(st.booleans(), RULES), max_size=8))
def test_what_the_rules_say(changes: list[tuple[bool, PersistenceRule]]) -> None:
    """A message is selected if at least one present rule matches it, in a batch or alone, after every change."""
    rows = [
        ts.Message(topic, b"", client_id, qos)
        for topic, client_id, qos in itertools.product(TOPICS, ["", "me", "you", "other"], range(3))
    ]
    batch = ts.MessageBatch.from_messages(rows)
    with ts.open("nowhere", backend="memory") as db:
        rules: set[PersistenceRule] = set()
        for adding, rule in changes:
            if adding:
                added = db.persistence.add(rule.topic_filter, client_id=rule.client_id, least_qos=rule.least_qos)
                assert rule == added
                rules.add(rule)
            else:
                assert (rule in rules) == db.persistence.remove(rule)
                rules.discard(rule)
            expected = [
                any(
                    ts.matches(r.topic_filter, m.topic) and r.client_id in (None, m.client_id) and m.qos >= r.least_qos
                    for r in rules
                )
                for m in rows
            ]
            assert expected == db.persistence.matching(batch).tolist()
            assert expected[::7] == [bool(db.persistence.matching(batch[n : n + 1])[0]) for n in range(0, len(rows), 7)]
        assert rules == set(db.persistence)
        assert rules == set(PersistenceRules(db.state(0)))
        assert len(rules) == len(db.persistence)
        assert all((rule in rules) == (rule in db.persistence) for rule in [*rules, PersistenceRule("never/added")])


def test_they_are_there_after_a_restart(tmp_path: Path) -> None:
    """Rules and their removal survive a restart, and a rule that is added twice is stored once."""
    with ts.open(tmp_path / "db", shards=2) as db:
        long = db.persistence.add("x" * 65_535, client_id="y" * 65_535)
        rule = db.persistence.add("a/#", least_qos=1)
        db.persistence.add("a/#", least_qos=1)
    with ts.open(tmp_path / "db") as db:
        assert [rule, long] == list(db.persistence)
        assert [False, True] == [bool(db.publish([ts.Message("a/b", b"", qos=qos)]).stored) for qos in (0, 1)]
        assert db.persistence.remove(rule)
    with ts.open(tmp_path / "db") as db:
        assert [long] == list(db.persistence)


@pytest.mark.parametrize(
    "arguments", [{"topic_filter": "a/#/b"}, {"client_id": "\0"}, {"least_qos": 3}, {"least_qos": True}]
)
def test_a_rule_that_is_none_is_refused(arguments: dict[str, object]) -> None:
    """A rule with an invalid filter, client id or QoS raises `InvalidArgumentError`."""
    with ts.open("nowhere", backend="memory") as db, pytest.raises(ts.InvalidArgumentError):
        db.persistence.add(**arguments)  # type: ignore[arg-type]


def test_many_topics_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached decisions about topics are limited in number, and decisions stay correct."""
    monkeypatch.setattr("topicstore.pubsub.persistence_rules._REMEMBERED", 10)
    with ts.open("nowhere", backend="memory") as db:
        db.persistence.add("even/#")
        for start in range(0, 100, 8):
            rows = [ts.Message(f"{'odd' if n % 2 else 'even'}/{n}", b"") for n in range(start, start + 8)]
            matching = db.persistence.matching(ts.MessageBatch.from_messages(rows))
            assert [n % 2 == 0 for n in range(start, start + 8)] == matching.tolist()
            assert len(db.persistence._loaded.least_qos) <= 10


def test_a_damaged_rule_is_an_error(tmp_path: Path) -> None:
    """A damaged stored rule raises `CorruptionError` when rules are listed."""
    with ts.open(tmp_path / "db", backend="memory") as db:
        db.state(0).write([FrameworkWrite(b"\1prx", b"damaged")])
        with pytest.raises(ts.CorruptionError, match="persistence rule"):
            list(db.persistence)
