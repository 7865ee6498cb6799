"""Winners, comparisons with peers, and failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from topicstore_benchmarks.report.quantities import quantity
from topicstore_benchmarks.report.run import Run, load
from topicstore_benchmarks.report.verdict import (
    Criterion,
    Grid,
    Ranking,
    against_peers,
    criteria,
    failures,
    losses,
    results,
    winners,
)

RunMaker = Callable[..., Path]


def ranking(grids: list[Grid], criterion: str, column: int = 0) -> Ranking:
    """Return the ranking by a criterion for the first durability and the workload in a column of the table."""
    (rankings,) = [rankings for one, rankings in grids[0].rows if one.name == criterion]
    found = rankings[column]
    assert found is not None
    return found


def test_the_best_median_wins_whichever_way_is_better(make_run: RunMaker) -> None:
    run = load(make_run())
    found = winners(run)
    assert {"block on rocksdb"} == {one.result.contender.name for one in found[0].rankings()}
    assert len(criteria(run)) == len(found[0].rankings())


def test_limits_take_no_part_and_warming_up_does_not_count(make_run: RunMaker) -> None:
    found = ranking(winners(load(make_run(repetitions=2))), "Replay all")
    assert "topicstore" == found.result.contender.kind
    assert 2 == len(found.result.values)


def test_the_reference_layout_takes_no_part(make_run: RunMaker) -> None:
    """The reference layout doesn't win and is no rival, however fast it is, and its figures are still shown."""
    fast = {("reference on rocksdb", phase): 90.0 for phase in ("store", "replay all")}
    run = load(make_run(changes=fast))
    for grids in (winners(run), against_peers(run)):
        for one in grids[0].rankings():
            assert "reference" not in {one.result.contender.layout, one.other and one.other.contender.layout}
    shown = results(run, criteria(run)[0], "fleet", "commit")
    assert "reference on rocksdb" in {one.label for one in shown}


def test_losses_are_what_the_other_does_better(make_run: RunMaker) -> None:
    """Losses are the criteria for which the peer is ahead, the clear ones first; there are none if it is behind."""
    slower = load(make_run(name="slower"))
    pair, peer = (slower.contenders[name] for name in ("block on rocksdb", "SQLite"))
    assert [] == losses(slower, pair, peer)

    found = losses(load(make_run(name="faster", changes={("SQLite", "store"): 30.0})), pair, peer)
    assert [("Store", "fleet", "commit")] == [(one.criterion.name, one.workload, one.durability) for one in found]
    assert found[0].ranking.clear
    assert found[0].ranking.other is not None
    assert "SQLite" == found[0].ranking.other.label


def test_a_contender_is_not_its_own_rival_when_compacted(make_run: RunMaker) -> None:
    """A winner is compared with another contender, even if its own compacted and uncompacted results are both ahead."""
    far_ahead = {("block on rocksdb", phase): 9.0 for phase in ("replay all", "replay all, compacted")}
    found = ranking(winners(load(make_run(changes=far_ahead))), "Replay all")
    assert "block on rocksdb, compacted" == found.result.label
    assert found.other is not None
    assert "block on rocksdb" != found.other.contender.name


def test_a_peer_that_is_faster_is_said_to_be(make_run: RunMaker) -> None:
    run = load(make_run(changes={("SQLite", "store"): 30.0}))
    against_peer, winner = ranking(against_peers(run), "Store"), ranking(winners(run), "Store")
    assert against_peer.other is not None
    assert against_peer.lead is not None
    assert ("block on rocksdb", "SQLite", False, True) == (
        against_peer.result.label,
        against_peer.other.label,
        against_peer.ahead,
        against_peer.clear,
    )
    assert 10 == pytest.approx(1 / against_peer.lead.median, rel=0.1)
    assert ("SQLite", True, True) == (winner.result.label, winner.ahead, winner.clear)


def test_noise_and_a_single_repetition_leave_it_open(make_run: RunMaker) -> None:
    """If a difference is within the noise, or comes from a single repetition, the verdict says that it isn't clear."""
    level = {("SQLite", "store"): 3.0, ("NATS JetStream", "store"): 2.4}
    assert not ranking(against_peers(load(make_run(repetitions=6, noise=0.2, changes=level))), "Store").clear
    once = against_peers(load(make_run("once", repetitions=1)))
    assert not any(one.clear for one in once[0].rankings())
    assert all(one.ahead for one in once[0].rankings())


def test_failures_come_first_and_each_reason_once(wide_run: Path) -> None:
    found = failures(load(wide_run))
    assert ["failed", "skipped"] == [failure.status for failure in found[:2]]
    assert "wildcard; lorawan" == found[0].where
    assert len(found) == len({(failure.contender, failure.reason) for failure in found})
    (absent,) = [failure for failure in found if "rabbitmq" in failure.reason]
    assert ("RabbitMQ streams", "") == (absent.contender, absent.where)


def test_what_failed_is_not_ranked(wide_run: Path) -> None:
    run = load(wide_run)
    (wildcard,) = [one for one in criteria(run) if one.name == "Wildcard"]
    assert "Redis Streams" not in names(run, "lorawan", wildcard)
    assert "Redis Streams" in names(run, "fleet", wildcard)


def names(run: Run, workload: str, criterion: Criterion) -> list[str]:
    return [one.contender.name for one in results(run, criterion, workload, "commit", "topicstore", "peer")]


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


def test_rows_of_no_value_are_reported_and_break_nothing(make_run: RunMaker) -> None:
    def without_values_of_nats(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"value": None} if row["contender"] == "NATS JetStream" else row

    run = load(make_run(edit=without_values_of_nats))

    assert not any(key.contender == "NATS JetStream" for key in run.values)
