"""``topicstore recommend``: its inputs, its output, and rejected arguments."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli
from topicstore.files.formats import encode_lines
from topicstore_benchmarks.recommend import command
from topicstore_conformance.faults.threads import PATIENCE

ROWS = [
    ts.Message(f"fleet/{n % 4}/{'ab'[n % 2]}", b"%d" % n, f"bus-{n % 5}", timestamp=1_000 * n) for n in range(1, 1_301)
]


def run(*arguments: object, code: int = 0, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(cli, ["recommend", *map(str, arguments)], input=stdin)
    assert result.exit_code == code, result.output
    if code:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
    return result


def document(*arguments: object) -> dict[str, Any]:
    found = json.loads(run(*arguments, "--json").stdout)
    assert isinstance(found, dict)
    return found


def asked(found: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the filters with their weights, except the first and the last, which replay everything."""
    return [(question["topic_filter"], question["weight"]) for question in found["questions"]][1:-1]


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    (tmp_path / "sample.jsonl").write_bytes(encode_lines(ROWS))
    return tmp_path / "sample.jsonl"


def test_for_scripts(sample: Path) -> None:
    found = document(sample, "--filter", "fleet/+/a", "--filter", "fleet/1/b")
    fields = "sample, backend, messages, topics, questions, layouts, left_out, recommended, reason, caveats"
    assert fields == ", ".join(found)
    assert (str(sample), "rocksdb", 1_300, 4) == tuple(found[n] for n in ("sample", "backend", "messages", "topics"))
    assert [("fleet/+/a", 1), ("fleet/1/b", 1)] == asked(found)
    names = [one["layout"] for one in found["layouts"]]
    assert {"reference", "block"} <= set(names)
    assert found["recommended"] in names
    assert "reference" != found["recommended"]
    of_each = (
        "layout, store_rate, compact_seconds, merged, bytes_per_message, delay_seconds, replays, total_seconds, "
        "unmerged_seconds, cost"
    )
    for one in found["layouts"]:
        assert of_each == ", ".join(one)
        assert [1_300, 650, 325, 13] == [replay["messages"] for replay in one["replays"]]
        assert one["replays"][0].keys() == {"messages", "seconds", "rate"}


def test_for_people(sample: Path) -> None:
    shown = run(sample, "--filter", "fleet/+/a").stdout
    for words in ("1,300 messages in 4 topics, on rocksdb", "Layouts", "Replays", "fleet/+/a", "block", "recommended:"):
        assert words in shown
    assert "reference" not in shown.partition("recommended:")[2]
    rows = {line.split()[0]: line.split() for line in shown.partition("Replays")[0].splitlines() if line}
    assert "-" == rows["reference"][2] == rows["reference"][-1]  # the reference layout merges nothing
    assert "-" not in rows["block"]


def test_the_next_step_can_be_taken(sample: Path, tmp_path: Path) -> None:
    """The printed next commands work, and use the recommended layout with the measured options."""
    shown = run(sample, "--filter", "#", "--option", "rocksdb.compression=zstd", "--option", "block.level=2").stdout
    best = shown.partition("recommended: ")[2].split()[0]
    steps = shown.partition("next:\n")[2].splitlines()
    assert 2 == len(steps)
    for step in steps:
        program, *arguments = shlex.split(step.replace("DIR", str(tmp_path / "db")))
        assert "topicstore" == program
        done = CliRunner().invoke(cli, arguments)
        assert (0, "") == (done.exit_code, done.stderr)
    with ts.open(tmp_path / "db", mode="r+") as db:
        assert [best, best] == [one.layout for one in db.generations()]
        assert {"compression": "zstd"} == db.manifest.options["rocksdb"]


def test_filters_of_the_sample(sample: Path) -> None:
    """Without filters the command uses the topic with median traffic, the busiest one, and a wildcard filter."""
    sample.write_bytes(sample.read_bytes() + encode_lines(ROWS[-3:-2]))
    assert [("fleet/3/b", 1), ("fleet/2/a", 1), ("fleet/+/b", 1)] == asked(document(sample))


def test_a_file_of_filters(sample: Path, tmp_path: Path) -> None:
    """A file of filters has one in each line, spaces included; a filter in the file and in an option counts twice."""
    file = tmp_path / "filters.txt"
    file.write_bytes("\ufefffleet/+/a\r\n\n  \na b\u2028c\nfleet/1/b".encode())
    found = document(sample, "--filters", file, "--filter", "fleet/1/b")
    assert [("fleet/1/b", 2), ("fleet/+/a", 1), ("a b\u2028c", 1)] == asked(found)
    assert "nothing in the sample matches a b\u2028c" in found["caveats"]


@pytest.mark.parametrize(("limit", "cut"), [(1, True), (1_000, True), (1_299, True), (1_300, False), (100_000, False)])
def test_a_limit(limit: int, cut: bool, sample: Path) -> None:
    """The command reads at most ``--limit`` rows, and knows whether the file has more."""
    taken = command._read_sample(sample, None, limit)
    assert (min(limit, 1_300), cut) == (sum(map(len, taken.batches)), taken.cut)


def test_standard_input(sample: Path) -> None:
    """The sample can be read from standard input, with a limit."""
    shown = run("-", "--limit", 1_000, stdin=sample.read_bytes()).stdout
    assert "standard input: 1,000 messages" in shown
    assert "only the first 1,000 messages" in shown


def test_nothing_stays_behind(sample: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    run(sample, "--directory", place, "--filter", "fleet/1/b")
    run(sample, "--directory", place, "--option", "block.level=99", code=2)
    assert [] == list(place.iterdir())


def test_bad_samples(sample: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert "has no messages" in run(tmp_path / "empty.jsonl", code=2).stderr
    assert "No such file" in run(tmp_path / "missing.jsonl", code=2).stderr
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    assert "bad.parquet: " in run(tmp_path / "bad.parquet", code=2).stderr
    sample.write_bytes(sample.read_bytes() + b'{"topic": "a/+", "payload": "x"}\n')
    assert "sample.jsonl, row 1,301: topic 'a/+'" in run(sample, code=2).stderr
    sample.write_bytes(encode_lines(ROWS[:2]) + b"{nonsense\n")
    assert "sample.jsonl, row 3: " in run(sample, code=2).stderr
    (tmp_path / "notes.txt").write_text("hello")
    assert "--format" in run(tmp_path / "notes.txt", code=2).stderr


def test_bad_filters(sample: Path, tmp_path: Path) -> None:
    assert "'#' must be alone" in run(sample, "--filter", "a/#/b", code=2).stderr
    assert "a filter itself is given with --filter" in run(sample, "--filters", "fleet/+", code=2).stderr
    run(sample, "--filters", tmp_path, code=2)
    file = tmp_path / "filters.txt"
    for content, says in (
        (b"", "holds no filters"),
        (b"\xff\xfe", "not a text file of UTF-8"),
        (b"ok\n\na+b\n", "filters.txt, line 3: "),
    ):
        file.write_bytes(content)
        assert says in run(sample, "--filters", file, code=2).stderr


def test_bad_options(sample: Path) -> None:
    for bad in (
        ("--backend", "nonsense"),
        ("--option", "block.colour=1"),
        ("--option", "nonsense.x=1"),
        ("--limit", 0),
    ):
        run(sample, *bad, code=2)


LAYOUTS = """
from topicstore import hookimpl
from topicstore.contract.plugin_specs import LayoutSpec
from topicstore_layouts.reference import ReferenceLayout, ReferenceSlab

class Lossy(ReferenceLayout):
    def open(self, engine, shard, generation):
        return LossySlab(engine, shard, generation)

class LossySlab(ReferenceSlab):
    def store(self, batch, write):
        super().store(batch[1:], write)

@hookimpl
def topicstore_layouts():
    return [
        LayoutSpec(name="{name}", target="other_layouts:Lossy", summary="a test", requires={requires}),
        LayoutSpec(name="absent", target="nowhere:Nothing", summary="a test", needs=("no_such_module_",)),
    ]
"""


def with_layouts(tmp_path: Path, requires: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the program with another package installed that provides layouts."""
    (tmp_path / "other_layouts.py").write_text(LAYOUTS.format(name="lossy", requires=requires))
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[topicstore]\nother_layouts = other_layouts\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    program = [sys.executable, "-m", "topicstore.cli", "recommend", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_a_layout_that_loses_messages(sample: Path, tmp_path: Path) -> None:
    """Layouts of other packages are measured, and one that loses messages is reported as an error."""
    done = with_layouts(tmp_path, "()", sample, "--filter", "fleet/+/b")
    assert (1, "") == (done.returncode, done.stdout)
    says = "lossy, replay all: wrong replay: a replay of '#' from 0 gave 1,298 of 1,300 messages"
    assert f"error: layout {says}\n" == done.stderr


def test_layouts_that_do_not_fit(sample: Path, tmp_path: Path) -> None:
    """Incompatible layouts are listed with the reason."""
    done = with_layouts(tmp_path, "('sql',)", sample, "--filter", "#", "--json")
    assert (0, "") == (done.returncode, done.stderr)
    left_out = json.loads(done.stdout)["left_out"]
    assert "lacks sql" in left_out["lossy"]
    assert "needs no_such_module_" in left_out["absent"]
