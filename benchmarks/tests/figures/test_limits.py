"""The section ``limits`` measures what it says: complete rounds and true ratios."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import topicstore

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[bench]"')

from topicstore_benchmarks.contenders.raw_engine import RAW_ENGINES, VALUE
from topicstore_benchmarks.figures.cases import BATCH, CASES, PAYLOAD, PAYLOADS, Case, batches
from topicstore_benchmarks.figures.limits import Outcome, Round, limits_section, measure
from topicstore_benchmarks.figures.opening import measure_opening, opening_section
from topicstore_conformance.conditions.skipping import need

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
@pytest.mark.parametrize("payload", list(PAYLOADS))
def test_a_round_of_each_case(case: Case, payload: str) -> None:
    """Every phase took time, and there are as many streams as the case claims."""
    (outcome,) = measure(case, payload, "lz4", 2_000, 1, ["rocksdb"])
    assert (case, payload, 2_000, 1) == (outcome.case, outcome.payload, outcome.messages, len(outcome.rounds))
    assert case.streams == outcome.streams
    assert all(outcome.rate(phase) > 0 for phase in ("put", "store", "scan", "replay", "arrow"))
    assert all(ratio > 0 for ratio in (outcome.store, outcome.replay, outcome.arrow))
    assert PAYLOAD < outcome.bytes_a_message < 2 * PAYLOAD or payload == "json"


@every_case
def test_messages_are_the_same_in_every_run(case: Case) -> None:
    """Batches of a thousand, the last one shorter; a topic's messages have one publisher."""
    made = batches(case, "json", 2_500)
    assert made == batches(case, "json", 2_500)
    assert [BATCH, BATCH, 500] == list(map(len, made))
    messages = [message for batch in made for message in batch]
    assert set(case.topics) == {message.topic for message in messages}
    assert {PAYLOAD} == {len(message.payload) for message in messages}
    assert len(case.topics) == len({(message.topic, message.client_id) for message in messages})


def test_payloads_are_of_one_size() -> None:
    """Whatever a reading's numbers are."""
    source = random.Random(1)
    assert {PAYLOAD} == {len(make(source)) for make in PAYLOADS.values() for _ in range(500)}


def outcome_of(speeds: list[tuple[int, int]]) -> Outcome:
    rounds = tuple(
        Round(put=speed * 2, store=speed * put, scan=speed * 3, replay=speed * 2, arrow=speed) for speed, put in speeds
    )
    return Outcome(
        case=CASES[0], backend="rocksdb", payload="json", messages=100, streams=1, bytes_a_message=1, rounds=rounds
    )


def test_ratios_are_medians_of_ratios_within_rounds() -> None:
    """A slow round slows both sides, and doesn't count twice."""
    outcome = outcome_of([(1, 1), (10, 4), (100, 2)])
    assert (1.0, 1.5, 2.0) == (outcome.store, outcome.replay, outcome.arrow)
    assert (100 / 20, 100 / 40) == (outcome.rate("put"), outcome.rate("store"))


def test_figures_say_what_they_should_be() -> None:
    """A store ratio of 1 is below what the case asks for, a replay ratio of 1.5 is just enough."""
    section = limits_section([outcome_of([(1, 2)])], "lz4")
    held = {figure.name: figure.held for figure in section.figures if figure.held is not None}
    assert {"store / put": False, "replay / scan": True, "Arrow / objects": True} == held
    assert "| 1 topic | rocksdb | json | 1 | 1.00 |" in section.sheets[0].markdown()


@pytest.mark.parametrize("lost", ["messages", "arrow"])
def test_a_replay_that_is_not_complete_does_not_count(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast answer that lacks a message is none."""
    name = "replay" if lost == "messages" else "replay_arrow"
    whole = getattr(topicstore.Database, name)

    def partial(db: topicstore.Database, topic_filter: str, **how: Any) -> list[object]:
        return list(whole(db, topic_filter, **how))[:-1]

    monkeypatch.setattr(topicstore.Database, name, partial)
    with pytest.raises(AssertionError, match=r"a replay returned [\d,]+ of 2,000 messages"):
        measure(CASES[0], "json", "lz4", 2_000, 1, ["rocksdb"])


@pytest.mark.parametrize("backend", list(RAW_ENGINES))
def test_the_engine_alone(tmp_path: Path, backend: str) -> None:
    """It is put into, opened again, scanned, and counted too."""
    need(backend)
    raw = RAW_ENGINES[backend](tmp_path / "raw", 2_500)
    assert raw.put() > 0
    assert {VALUE} == {len(value) for value in raw._values}
    raw.close()
    raw = RAW_ENGINES[backend](tmp_path / "raw", 2_500)
    assert raw.scan() > 0
    raw._keys.append(bytes(24))
    with pytest.raises(AssertionError, match=r"2,500 of 2,501"):
        raw.scan()
    raw.close()


def test_opening_is_timed() -> None:
    """Even of an empty database."""
    seconds = measure_opening(0, 2)
    assert 0 < seconds
    (figure,) = opening_section(0, seconds).figures
    assert seconds * 1_000 == figure.value
