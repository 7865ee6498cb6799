"""The benchmarks measure what they say: complete rounds, true ratios, and a table at the end."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import topicstore
from click.testing import CliRunner

pytest.importorskip("rocksdict", reason="the extra 'bench' is not installed")

from topicstore_benchmarks import __main__ as program
from topicstore_benchmarks import ratios
from topicstore_benchmarks.cases import BATCH, CASES, PAYLOAD, PAYLOADS, Case, batches
from topicstore_benchmarks.limits import VALUE, RawEngine
from topicstore_benchmarks.opening import measure_opening
from topicstore_benchmarks.ratios import Outcome, Round, measure

ONE_ROUND = ["--messages", "2000", "--rounds", "1"]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the command from binding the tests' process to one core."""
    monkeypatch.setattr(program.os, "sched_setaffinity", lambda *_: None, raising=False)


@every_case
@pytest.mark.parametrize("payload", list(PAYLOADS))
def test_a_round_of_each_case(case: Case, payload: str) -> None:
    """Every phase took time, and there are as many streams as the case claims."""
    outcome = measure(case, payload, "lz4", 2_000, 1)
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


def test_ratios_are_medians_of_ratios_within_rounds() -> None:
    """A slow round slows both sides, and doesn't count twice."""
    rounds = tuple(
        Round(put=speed * 2, store=speed * put, scan=speed * 3, replay=speed * 2, arrow=speed)
        for speed, put in ((1, 1), (10, 4), (100, 2))
    )
    outcome = Outcome(case=CASES[0], payload="json", messages=100, streams=1, bytes_a_message=1, rounds=rounds)
    assert (1.0, 1.5, 2.0) == (outcome.store, outcome.replay, outcome.arrow)
    assert (100 / 20, 100 / 40) == (outcome.rate("put"), outcome.rate("store"))


@pytest.mark.parametrize("lost", ["messages", "arrow"])
def test_a_replay_that_is_not_complete_does_not_count(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast answer that lacks a message is none."""
    name = "replay" if lost == "messages" else "replay_arrow"
    whole = getattr(topicstore.Database, name)

    def partial(db: topicstore.Database, topic_filter: str) -> list[object]:
        return list(whole(db, topic_filter))[:-1]

    monkeypatch.setattr(topicstore.Database, name, partial)
    with pytest.raises(AssertionError, match=r"a replay returned [\d,]+ of 2,000 messages"):
        measure(CASES[0], "json", "lz4", 2_000, 1)


def test_the_engine_alone(tmp_path: Path) -> None:
    """It is put into, scanned, and counted too."""
    raw = RawEngine(tmp_path / "raw", 2_500)
    assert raw.put() > 0
    assert raw.scan() > 0
    assert {VALUE} == {len(value) for value in raw._values}
    raw._keys.append(bytes(24))
    with pytest.raises(AssertionError, match=r"2,500 of 2,501"):
        raw.scan()
    raw.close()


def test_opening_is_timed() -> None:
    """Even of an empty database."""
    assert 0 < measure_opening(0, 2) < 60


def test_the_command_prints_a_table() -> None:
    """One line a case and payload, with both sides' rates and what a ratio should be."""
    result = CliRunner().invoke(
        program.main, [*ONE_ROUND, "--case", "1 topic", "--payload", "random", "--no-opening"], catch_exceptions=False
    )
    assert 0 == result.exit_code
    lines = [line for line in result.output.splitlines() if line.strip("│┃ ").startswith("1 topic")]
    assert 1 == len(lines)
    assert ["1 topic", "random", "1"] == [cell.strip() for cell in lines[0].strip("│").split("│")][:3]
    assert "2,000 messages" in result.output
    assert "(1.2)" in lines[0]


def test_the_command_times_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is told not to."""
    monkeypatch.setattr(program, "measure_opening", lambda messages, rounds: messages / 1e7 * rounds)
    result = CliRunner().invoke(program.main, [*ONE_ROUND, "--case", "1 topic", "--payload", "json"])
    assert "opening a database of 1,000,000 messages: 100 ms" in result.output


def test_the_command_refuses_what_it_does_not_know() -> None:
    """And lists what there is."""
    result = CliRunner().invoke(program.main, ["--case", "2 topics"])
    assert 2 == result.exit_code
    assert CASES[1].name in result.output


def test_python_runs_the_package() -> None:
    """With ``-m``, as its docstring says."""
    command = [sys.executable, "-m", "topicstore_benchmarks", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "Measure store and replay" in done.stdout
    assert "" == done.stderr


def test_every_replay_is_counted() -> None:
    """The check itself knows one from two."""
    ratios._count(iter([]), 0)
    with pytest.raises(AssertionError, match="0 of 1"):
        ratios._count(iter([]), 1)
