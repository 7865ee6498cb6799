"""The section ``layouts``: sets that are what they say, sides that give back what was stored, true figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import attrs
import pytest
from topicstore import Message
from topicstore_conformance.oracle.model import match

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[bench]"')

from topicstore_benchmarks.contenders import sqlite
from topicstore_benchmarks.contenders.contender import Contender
from topicstore_benchmarks.contenders.database import DatabaseContender
from topicstore_benchmarks.contenders.sqlite import SqliteContender
from topicstore_benchmarks.figures import comparison
from topicstore_benchmarks.figures.comparison import ENGINE, MERGED, SQLITE, STORE, Comparison, Round, compare
from topicstore_benchmarks.figures.growth import Growth, growth_of
from topicstore_benchmarks.figures.layouts import PROMISES, layouts_section
from topicstore_benchmarks.figures.message_sets import ALL, SETS, MessageSet, Task, fleet, fleet_batches
from topicstore_benchmarks.harness.expected import ExpectedReplay, WrongReplayError
from topicstore_conformance.conditions.skipping import need_data
from topicstore_conformance.subjects.pairs import layouts_on

MESSAGES = 4_000
LAYOUTS = layouts_on("rocksdb")

Make = Callable[[Path], Contender]
SIDES: dict[str, Make] = {SQLITE: lambda path: SqliteContender(SQLITE, path)} | {
    layout: lambda path, layout=layout: DatabaseContender(layout, path, layout) for layout in LAYOUTS
}


def quiet(text: str) -> None:
    pass


@pytest.fixture(params=list(SETS))
def data(request: pytest.FixtureRequest) -> MessageSet:
    if request.param == "bus":
        need_data("bus.parquet")
    return SETS[request.param](MESSAGES)


# --- sets ---


def test_a_set_knows_what_must_come_back(data: MessageSet) -> None:
    """Each answer is that of a plain walk over the messages, in order of time."""
    rows = list(data.rows())
    assert MESSAGES == data.messages == len(rows)
    assert len({message.topic for message in rows}) == data.topics
    assert sorted(times := [message.timestamp or 0 for message in rows]) == times
    for answer in chain.from_iterable(task.answers for task in data.tasks):
        found = [m for m in rows if match(answer.topic_filter, m.topic) and (m.timestamp or 0) >= answer.start]
        assert len(found) == answer.messages > 0
        answer.check(found)


def test_a_set_is_the_same_in_every_run(data: MessageSet) -> None:
    """Messages and requests."""
    assert data == SETS[data.name](MESSAGES)
    assert {1_000} == set(map(len, data.batches))


def test_the_fleet_is_what_it_says() -> None:
    """A device has a client id of its own and twenty messages of five metrics; a fifth is one metric."""
    data = fleet(MESSAGES)
    assert {20} == set(Counter(message.client_id for message in data.rows()).values())
    assert {4} == set(Counter(message.topic for message in data.rows()).values())
    assert MESSAGES // 5 == data.task("one metric").messages
    assert 20 == data.task("one device").messages
    assert data.batches == list(fleet_batches(MESSAGES))


# --- sides ---


@pytest.mark.parametrize("side", SIDES)
def test_a_side_gives_back_what_was_stored(side: str, data: MessageSet, tmp_path: Path) -> None:
    """For every request, topic by topic in order, after it was closed and opened again."""
    made = SIDES[side](tmp_path / side)
    made.open()
    for batch in data.batches:
        made.store(batch)
    made.close()
    assert made.disk_bytes() > 1_000
    made.open()
    for task in data.tasks:
        made.prepare([answer.topic_filter for answer in task.answers])
        for answer in task.answers:
            expected = [
                message
                for message in data.rows()
                if match(answer.topic_filter, message.topic) and (message.timestamp or 0) >= answer.start
            ]
            assert by_topic(expected) == by_topic(made.replay(answer.topic_filter, answer.start))
    made.close()


def by_topic(messages: Iterator[Message] | list[Message]) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = {}
    for message in messages:
        found.setdefault(message.topic, []).append(message)
    return found


@pytest.mark.parametrize("way", sqlite._WAYS)
def test_each_way_to_ask_sqlite_is_right(way: str, tmp_path: Path) -> None:
    """None takes a ``+`` for several levels, or a longer name for the same."""
    topics = ["a/b/c", "a/x/c", "a/b/x/c", "a/b/cc", "a/b", "aa/b/c", "a0/b/c", "a//c", "b/b/c"]
    side = SqliteContender(SQLITE, tmp_path / "side", ways=dict.fromkeys(["a/+/c", "a/b/+"], way))
    side.open()
    side.store([Message(topic, b"", timestamp=time) for time, topic in enumerate(topics)])
    for text in ("a/+/c", "a/b/+"):
        expected = {topic for topic in topics if match(text, topic)}
        assert expected == {message.topic for message in side.replay(text)}
    side.close()


def test_a_copy_is_merged_without_the_original(tmp_path: Path) -> None:
    """Both give back everything."""
    data = fleet(MESSAGES)
    side = DatabaseContender("block", tmp_path / "block", "block")
    side.open()
    for batch in data.batches:
        side.store(batch)
    side.close()
    before = side.disk_bytes()
    copied = side.copy("merged")
    copied.open()
    copied.compact()
    assert by_topic(list(data.rows())) == by_topic(copied.replay("#"))
    copied.close()
    assert before == side.disk_bytes() != copied.disk_bytes()


# --- rounds ---


def test_every_side_runs_every_task(data: MessageSet) -> None:
    """Each takes time; the engine is put into and scanned."""
    found = compare(data.name, MESSAGES, LAYOUTS, 2, quiet)
    assert 2 == len(found.rounds)
    sides = [SQLITE, *LAYOUTS, MERGED]
    for one in found.rounds:
        assert set(sides) == set(one.disk_bytes)
        stored = {(side, STORE) for side in (ENGINE, SQLITE, *LAYOUTS)}
        replayed = {(side, task.name) for side in sides for task in data.tasks}
        assert stored | replayed | {(ENGINE, ALL), (MERGED, comparison.MERGE)} == set(one.seconds)
        assert min(one.seconds.values()) > 0
    assert [] == found.data.batches


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda found: found[1:], "gave 199 of 200 messages"),
        (lambda found: found[::-1], "changed, or in another order"),
        (lambda found: [*found[1:], found[-1]], "changed, or in another order"),
    ],
    ids=["lost", "out of order", "another"],
)
def test_a_replay_that_is_wrong_does_not_count(
    wrong: Callable[[list[Message]], list[Message]], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that lacks a message, nor one that gives others, or in another order."""
    whole = DatabaseContender.replay
    monkeypatch.setattr(DatabaseContender, "replay", lambda *arguments: iter(wrong(list(whole(*arguments)))))
    with pytest.raises(WrongReplayError, match=complaint):
        compare("fleet", 4_000, ["reference"], 1, quiet)


# --- figures ---

TASKS = tuple(
    Task(name, (ExpectedReplay(topic_filter=name, start=0, messages=messages, topics=1, digest=0),))
    for name, messages in {
        ALL: 1_000,
        "one route": 100,
        "one vehicle": 50,
        "one metric": 200,
        "one device": 20,
        "median topic": 2,
        "busiest topic": 10,
        "last minute": 100,
    }.items()
)


def made_up(name: str, *rounds: Round) -> Comparison:
    data = MessageSet(name=name, batches=[], messages=1_000, topics=10, tasks=TASKS)
    return Comparison(data=data, rounds=rounds)


def one_round(**seconds: float) -> Round:
    """Return a round in which every side takes a second for everything but what is given for `skipstream`."""
    sides = [SQLITE, "block", MERGED, "skipstream"]
    every = {(side, task): 1.0 for side in sides for task in (STORE, *(task.name for task in TASKS))}
    every |= {(ENGINE, STORE): 1.0, (ENGINE, ALL): 1.0}
    every |= {("skipstream", task.replace("_", " ")): value for task, value in seconds.items()}
    return Round(seconds=every, disk_bytes={SQLITE: 800, "block": 200, MERGED: 100, "skipstream": 900})


def figure(found: Comparison, subject: str, name: str) -> tuple[float, bool | None]:
    section = layouts_section([found], {})
    (found_figure,) = (f for f in section.figures if (f.subject, f.name) == (subject, name))
    return round(found_figure.value, 6), found_figure.held


def test_promises_are_computed_from_times_of_one_round() -> None:
    """Medians over the rounds of what a round's own times give."""
    slow = attrs.evolve(one_round(), seconds=dict.fromkeys(one_round().seconds, 7.0))
    bus = made_up(
        "bus",
        one_round(store=0.25, all=2.0, last_minute=0.205),
        slow,
        one_round(store=0.25, all=2.0, last_minute=0.205),
    )
    assert (4.0, True) == figure(bus, "skipstream", "store, times SQLite")
    assert (0.5, True) == figure(bus, "skipstream", "replay all, times the engine's scan")
    assert (5.0, True) == figure(bus, "skipstream", "last minute, ms beyond what it returns")
    assert (4.0, False) == figure(bus, "block", "bytes on disk, times fewer than SQLite")
    assert (8.0, True) == figure(bus, MERGED, "bytes on disk, times fewer than SQLite")
    assert (1.0, False) == figure(bus, MERGED, "median topic, times as quick as all")


def test_what_a_topic_may_take() -> None:
    """Twice SQLite's time, and 3 ms."""
    bus = made_up("bus", one_round(median_topic=2.003, busiest_topic=2.5))
    assert (1.0, True) == figure(bus, "skipstream", "median topic, times (2 × SQLite + 3 ms)")
    assert figure(bus, "skipstream", "busiest topic, times (2 × SQLite + 3 ms)")[0] > 1


def test_a_fifth_may_take_a_fifth() -> None:
    """And a bit more."""
    found = made_up("fleet", one_round(one_metric=0.25))
    assert (1.25, True) == figure(found, "skipstream", "one metric, times a fifth of all")
    assert (5.0, False) == figure(found, "block", "one metric, times a fifth of all")
    assert (1000.0, False) == figure(found, "skipstream", "one device, ms")


def test_each_promise_is_of_a_task_that_its_set_has(data: MessageSet) -> None:
    """With all layouts named there, every promise gives a figure for each of its subjects."""
    subjects = {subject for promise in PROMISES for subject in promise.subjects}
    sides = [ENGINE, SQLITE, *sorted(subjects)]
    tasks = [STORE, *(task.name for task in data.tasks)]
    one = Round(
        seconds={(side, task): 1.0 for side in sides for task in tasks}, disk_bytes=dict.fromkeys(sides[1:], 1_000)
    )
    found = [f for promise in PROMISES for f in promise.figures(Comparison(data=data, rounds=(one,)))]
    expected = {(p.name, s) for p in PROMISES if p.data == data.name for s in p.subjects}
    assert expected == {(f.name, f.subject) for f in found}
    assert all(f.held is not None for f in found)


def test_the_overview_marks_the_best_layout() -> None:
    """Of each row, the highest rate or the shortest time."""
    section = layouts_section(
        [made_up("fleet", one_round(store=0.5, one_device=0.004))], {"block": Growth(early=2_000_000, late=0)}
    )
    text = section.sheets[0].markdown()
    assert "| store, 1,000 messages/s | 1.00 | 1.00 | 1.00 | 1.00 | **2.00** |" in text
    assert "| one device, `one device`: 20 messages, ms |  | 1,000 | 1,000 | 1,000 | **4.00** |" in text
    assert "| memory for the first messages of all topics, MB |  |  | 2.00 |  |  |" in text


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    """It grows with the first messages of topics."""
    grown = growth_of("reference", 40_000)
    if grown is None:
        pytest.skip("only Linux tells a process the most memory that it had")
    assert 100_000 < grown.early < 1 << 30
    assert 0 <= grown.late < 1 << 30
