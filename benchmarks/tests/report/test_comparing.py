"""`topicstore bench compare`: the changes between two runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from topicstore_benchmarks.comparing import Change, Comparison, compare, compare_command

RunMaker = Callable[..., Path]
SLOWER = {("block on rocksdb", "store"): 0.5}
FASTER = {("block on rocksdb", "store"): 2.0}


def of(found: Comparison, contender: str, phase: str, metric: str = "messages_per_second") -> list[Change]:
    return [
        one for one in found.changes if (contender, phase, metric) == (one.key.contender, one.key.phase, one.key.metric)
    ]


def verdicts(changes: list[Change]) -> set[str]:
    return {change.verdict for change in changes}


def on_another_machine(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as measured on another machine that is half as fast."""
    slower = {"messages/s": 0.5, "s": 2.0, "ms": 2.0}.get(row["unit"], 1.0)
    value = None if row["value"] is None else row["value"] * slower
    return row | {"value": value, "machine": json.dumps({"processor": "Slow Processor 1"})}


def test_a_run_is_the_same_as_itself(make_run: RunMaker) -> None:
    """A run compared with itself has no changes and no differences."""
    run = make_run()
    found = compare(run, run / "results.parquet")

    assert 0 == found.count("better") == found.count("worse")
    assert found.count("same") > 0
    assert () == found.differences == found.only_before == found.only_after


def test_what_became_slower_is_worse_and_what_became_faster_better(make_run: RunMaker) -> None:
    before = make_run("before", repetitions=5)
    slower, faster = (
        make_run("slower", repetitions=5, changes=SLOWER),
        make_run("faster", repetitions=5, changes=FASTER),
    )

    (worse, *_) = of(compare(before, slower), "block on rocksdb", "store")
    assert {"worse"} == verdicts(of(compare(before, slower), "block on rocksdb", "store"))
    assert {"better"} == verdicts(of(compare(before, faster), "block on rocksdb", "store"))
    assert worse.better.high < 1
    assert worse.after < worse.before


def test_less_is_better_of_seconds(make_run: RunMaker) -> None:
    changes = {("SQLite", "reopen"): 3.0}
    found = compare(make_run("before", repetitions=5), make_run("after", repetitions=5, changes=changes))

    (one, *_) = of(found, "SQLite", "reopen", "seconds")
    assert "better" == one.verdict
    assert one.after < one.before
    assert one.better.median > 2


def test_what_changed_less_than_the_noise_is_too_noisy(make_run: RunMaker) -> None:
    changes = {("SQLite", "store"): 1.1}
    found = compare(make_run("before", noise=0.5), make_run("after", noise=0.5, changes=changes))

    assert {"too noisy"} == verdicts(of(found, "SQLite", "store"))


def test_a_change_below_the_threshold_is_none(make_run: RunMaker) -> None:
    runs = make_run("before", repetitions=5), make_run("after", repetitions=5, changes=FASTER)

    assert {"better"} == verdicts(of(compare(*runs, threshold=0.05), "block on rocksdb", "store"))
    assert {"same"} == verdicts(of(compare(*runs, threshold=9), "block on rocksdb", "store"))
    with pytest.raises(ValueError, match="more than 0"):
        compare(*runs, threshold=0)


def test_one_repetition_is_too_noisy_whatever_changed(make_run: RunMaker) -> None:
    found = compare(make_run("before", repetitions=1), make_run("after", repetitions=1, changes=SLOWER))

    assert {"too noisy"} == verdicts(list(found.changes))


def test_another_machine_makes_everything_worse_but_not_relative_to_a_contender(make_run: RunMaker) -> None:
    runs = make_run("before", repetitions=5), make_run("after", repetitions=5, edit=on_another_machine, changes=SLOWER)

    absolute, relative = compare(*runs), compare(*runs, relative_to="SQLite")
    assert "machine: " == absolute.differences[0][:9]
    assert {"worse"} == verdicts(of(absolute, "NATS JetStream", "replay all"))
    assert "worse" not in verdicts(of(relative, "NATS JetStream", "replay all"))
    assert {"worse"} == verdicts(of(relative, "block on rocksdb", "store"))
    (change, *_) = of(relative, "block on rocksdb", "store")
    assert 0.5 == pytest.approx(change.better.median, rel=0.1)


def test_sizes_are_not_relative(make_run: RunMaker) -> None:
    """Sizes are compared in bytes and not relative to the reference contender, whose size may change, too."""

    def larger(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"value": row["value"] * 4} if (row["contender"], row["unit"]) == ("SQLite", "bytes") else row

    found = compare(make_run("before"), make_run("after", edit=larger), relative_to="SQLite")
    (ours,) = of(found, "block on rocksdb", "store", "bytes_per_message")
    (reference,) = of(found, "SQLite", "store", "bytes_per_message")
    assert (1, 0.25) == (pytest.approx(ours.better.median, rel=0.1), pytest.approx(reference.better.median, rel=0.1))


def test_compacted_is_relative_to_the_reference_as_it_stored(make_run: RunMaker) -> None:
    run = make_run()

    assert of(compare(run, run, relative_to="SQLite"), "block on rocksdb", "replay all, compacted")


def test_a_reference_that_was_not_measured_is_refused(make_run: RunMaker) -> None:
    run = make_run()

    with pytest.raises(ValueError, match="no figures of 'RabbitMQ streams'"):
        compare(run, run, relative_to="RabbitMQ streams")


def test_what_only_one_has_is_reported(make_run: RunMaker) -> None:
    def without_sqlite(row: dict[str, Any]) -> dict[str, Any] | None:
        return None if row["contender"] == "SQLite" else row

    found = compare(make_run("before"), make_run("after", edit=without_sqlite))

    assert {"SQLite"} == {key.contender for key in found.only_before}
    assert () == found.only_after


def test_workloads_of_another_size_are_not_compared(make_run: RunMaker) -> None:
    sizes = {"fleet": (10, 5, 100), "lorawan": (1_000, 10, 1_000)}
    found = compare(make_run("before", workloads=sizes), make_run("after", workloads=sizes | {"fleet": (20, 5, 200)}))

    assert {"lorawan"} == {change.key.workload for change in found.changes}
    assert found.differences[0].startswith("workload fleet is not the same and not compared: 10 messages, then 20")


def test_other_versions_are_said_once_for_all(make_run: RunMaker) -> None:
    def newer(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"versions": json.dumps({"library": "2.0"})}

    (difference,) = compare(make_run("before"), make_run("after", edit=newer)).differences
    assert difference.startswith("library 1.2, then 2.0 (")
    assert "SQLite" in difference


def test_a_durability_that_only_one_has_makes_no_difference_of_settings(make_run: RunMaker) -> None:
    found = compare(make_run("before", durabilities=("commit", "sync")), make_run("after"))

    assert () == found.differences
    assert {"sync"} == {key.durability for key in found.only_before}


def test_the_command_shows_and_fails_on_a_regression_only_if_asked(make_run: RunMaker) -> None:
    before, after = make_run("before", repetitions=5), make_run("after", repetitions=5, changes=SLOWER)
    arguments = [str(before), str(after)]

    shown = CliRunner().invoke(compare_command, arguments, terminal_width=200)
    assert 0 == shown.exit_code
    assert "worse" in shown.output
    assert 1 == CliRunner().invoke(compare_command, [*arguments, "--fail-on-regression"]).exit_code
    assert 0 == CliRunner().invoke(compare_command, [*arguments[::-1], "--threshold", "60"]).exit_code
    same = [arguments[0], arguments[0], "--fail-on-regression"]
    assert 0 == CliRunner().invoke(compare_command, same).exit_code


def test_the_command_gives_json(make_run: RunMaker) -> None:
    before, after = make_run("before", repetitions=1), make_run("after", repetitions=1)

    document = json.loads(CliRunner().invoke(compare_command, [str(before), str(after), "--json"]).output)
    assert {"relative_to", "differences", "changes", "only_before", "only_after"} == set(document)
    assert {None} == {change["interval"] for change in document["changes"]}


def test_the_command_says_what_is_wrong(tmp_path: Path, make_run: RunMaker) -> None:
    run = str(make_run())

    assert 2 == CliRunner().invoke(compare_command, [run, str(tmp_path / "absent")]).exit_code
    refused = CliRunner().invoke(compare_command, [run, run, "--relative-to", "nobody"])
    assert 2 == refused.exit_code  # exit code 1 would mean a regression
    assert "no figures of 'nobody'" in refused.output
