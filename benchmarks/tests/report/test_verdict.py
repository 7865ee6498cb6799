"""Who wins, and that the page says so of peers too."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from topicstore_benchmarks.report.quantities import quantity
from topicstore_benchmarks.report.questions import QUESTIONS, Standing, standings
from topicstore_benchmarks.report.run import Run, load
from topicstore_benchmarks.report.verdict import defeats, duels, gaps, leads, matrices, places, sentence, summaries

RunMaker = Callable[..., Path]


def standing(run: Run, question: str) -> Standing:
    (found,) = [one for one in standings(run) if one.question.name == question]
    return found


def test_the_best_median_comes_first_whichever_way_is_better(make_run: RunMaker) -> None:
    run = load(make_run())

    for question in QUESTIONS:
        names = [one.contender.name for one in standing(run, question.name).entrants]
        assert ("block on rocksdb", "table on duckdb") == (names[0], names[-1])


def test_limits_take_no_part_and_warming_up_does_not_count(make_run: RunMaker) -> None:
    run = load(make_run(repetitions=2))

    found = standing(run, "Replay all")
    assert {"topicstore", "peer"} == {one.contender.kind for one in found.entrants}
    assert {2} == {one.spread.repetitions for one in found.entrants}


def test_a_contender_is_not_its_own_rival_when_compacted(make_run: RunMaker) -> None:
    """Even if both of its forms are ahead of all others."""
    far_ahead = {("block on rocksdb", phase): 9.0 for phase in ("replay all", "replay all, compacted")}
    found = standing(load(make_run(changes=far_ahead)), "Replay all")

    assert ["block on rocksdb, compacted", "block on rocksdb"] == [one.label for one in found.entrants[:2]]
    assert found.next is found.entrants[2]
    assert () == found.tied


def test_a_peer_that_is_faster_is_said_to_be(make_run: RunMaker) -> None:
    run = load(make_run(changes={("SQLite", "store"): 30.0}))

    ((duel,),) = defeats(duels(standings(run)), clear=True)
    assert ("behind", "SQLite", "block on rocksdb") == (duel.outcome, duel.peer.label, duel.ours.label)
    assert 10 == pytest.approx(1 / duel.lead.median, rel=0.1)
    said = sentence(duel.standing.question, "SQLite", "our best pair", "fleet", duel.lead.inverse())
    assert said.startswith("SQLite stores fleet ")
    assert said.endswith(" times as fast as our best pair")
    (matrix,) = matrices(run, standings(run))
    _, (place,) = matrix.rows[0]
    assert place is not None
    assert ("peer", ("SQLite",), True) == (place.kind, place.winners, place.clear)


def test_where_and_by_how_much_is_said_shortly(wide_run: Path) -> None:
    run = load(wide_run)

    (store,) = [one for one in summaries(duels(standings(run))) if one.question.name == "Store"]
    assert "fleet, lorawan" == places(run, store.ahead)
    assert "hot-topic" == places(run, store.behind)
    assert "hot-topic (sync)" == places(run, [duel for duel in store.behind if duel.standing.durability == "sync"])
    assert "all workloads" == places(run, [*store.ahead, *store.behind])
    assert re.fullmatch(r"1\.\d( to 1\.\d)? times", leads(store.behind))


def test_noise_leaves_it_open(make_run: RunMaker) -> None:
    """The same speed, by turns the one and the other is ahead."""
    level = {("SQLite", "store"): 3.0, ("NATS JetStream", "store"): 2.4}
    run = load(make_run(repetitions=6, noise=0.2, changes=level))

    (summary,) = [one for one in summaries(duels(standings(run))) if one.question.name == "Store"]
    assert ((), ()) == (summary.ahead, summary.behind)
    (matrix,) = matrices(run, standings(run))
    _, (place,) = matrix.rows[0]
    assert place is not None
    assert "open" == place.kind
    assert not place.decided


def test_the_colour_is_that_of_a_winner_and_of_none_where_there_is_none(make_run: RunMaker) -> None:
    """Also where all that are ahead by turns are topicstore's."""
    level = {("skipstream on rocksdb", "store"): 2.4 / 2.1, ("wildcard_optimized on rocksdb", "store"): 2.4 / 1.8}
    run = load(make_run(repetitions=6, noise=0.2, changes=level))

    (matrix,) = matrices(run, standings(run))
    _, (place,) = matrix.rows[0]
    assert place is not None
    assert len(place.winners) > 1
    assert "open" == place.kind
    assert all(one.kind != "open" for _, places in matrix.rows for one in places if one and one.decided)


def test_what_was_measured_once_is_never_clear(make_run: RunMaker) -> None:
    run = load(make_run(repetitions=1))

    met = duels(standings(run))
    assert {"ahead"} == {duel.outcome for duel in met}
    assert not any(duel.clear for duel in met)


def test_failures_come_first_and_one_by_one_and_skips_together(wide_run: Path) -> None:
    found = gaps(load(wide_run))

    assert [("Redis Streams",)] * 2 == [gap.contenders for gap in found if gap.status == "failed"]
    assert "failed" == found[0].status == found[1].status
    assert [("lorawan",), ("lorawan",)] == [gap.workloads for gap in found[:2]]
    (limits,) = [gap for gap in found if gap.reason.startswith("a limit")]
    assert ("Parquet", "RocksDB alone") == limits.contenders
    assert ((), ()) == (limits.workloads, limits.durabilities)
    (absent,) = [gap for gap in found if "rabbitmq" in gap.reason]
    assert ((), ()) == (absent.phases, absent.workloads)


def test_what_failed_is_not_ranked(wide_run: Path) -> None:
    run = load(wide_run)

    (found,) = [
        one
        for one in standings(run)
        if (one.question.name, one.workload, one.durability) == ("Wildcard", "lorawan", "commit")
    ]
    assert "Redis Streams" not in [one.contender.name for one in found.entrants]


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"contender": ["x"]}), tmp_path / "other.parquet")

    with pytest.raises(ValueError, match="holds no results: it has no column "):
        load(tmp_path / "other.parquet")
    with pytest.raises(FileNotFoundError):
        load(tmp_path)


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("messages_per_second", 1_254_000, "1.25 M messages/s"),
        ("messages_per_second", 999_999, "1.00 M messages/s"),
        ("read_p99_ms", 0.214, "0.21 ms"),
        ("read_p99_ms", 1_010.0, "1.01 s"),
        ("store_p999_ms", 999.4, "999 ms"),
        ("store_p999_ms", 999.6, "1.00 s"),
        ("seconds", 1_234.5, "1,234 s"),
        ("seconds", 0.00031, "0.00031 s"),
        ("bytes_per_message", 1_234.0, "1.23 kB"),
        ("memory_before", 51_200_000, "51.2 MB"),
        ("bytes_per_message", 37.46, "37.5 bytes"),
        ("peak_memory", 212_300_000, "212 MB"),
        ("peak_memory", 512, "512 B"),
        ("disk_bytes", 0, "0.00 B"),
    ],
)
def test_quantities_have_three_digits_and_a_unit(metric: str, value: float, expected: str) -> None:
    assert expected == quantity(metric, value)


def test_a_value_of_what_failed_does_not_count(make_run: RunMaker) -> None:
    def failing(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"status": "failed", "reason": "died"} if row["contender"] == "SQLite" else row

    run = load(make_run(edit=failing))
    assert not any(key.contender == "SQLite" for key in run.values)
    assert ("SQLite", "died") in [(problem.contender, problem.reason) for problem in run.problems]


def test_rows_of_no_value_are_told_of_and_break_nothing(make_run: RunMaker) -> None:
    def without_values_of_nats(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"value": None} if row["contender"] == "NATS JetStream" else row

    run = load(make_run(edit=without_values_of_nats))

    assert not any(key.contender == "NATS JetStream" for key in run.values)
