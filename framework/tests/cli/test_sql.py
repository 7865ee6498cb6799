"""``topicstore sql``: output formats, values, and refused statements."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore import Message
from topicstore.cli import cli
from topicstore.cli.commands.sql import sql
from topicstore_conformance.conditions.skipping import need

pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')

COUNTS = "SELECT topic, count(*) AS n FROM messages GROUP BY 1 ORDER BY 1"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["sql", *arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of three shards, which tests only change in copies."""
    path = tmp_path_factory.mktemp("sql") / "db"
    with ts.open(path, backend="duckdb", layout="table", shards=3) as db:
        db.store([Message(f"t/{n % 2}", b"\xff" if n else "é,\n".encode(), f"c{n}") for n in range(10)])
    return path


@pytest.fixture
def path(tmp_path: Path, made: Path) -> Path:
    """A copy of the database that `made` returns."""
    return shutil.copytree(made, tmp_path / "db")


def test_rows_of_all_shards_as_a_table(path: Path) -> None:
    """A table has the rows of all shards, and then the number of rows."""
    done = run(str(path), COUNTS)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert 0 == done.exit_code, done.output
    assert ["topic", "n"] in lines
    assert ["t/0", "5"] in lines
    assert ["2", "rows"] == lines[-1]


def test_both_times_of_a_message(path: Path) -> None:
    """The SQL view has the time of a message's position, and the message's own timestamp, also of late messages."""
    moment = 1_748_779_200_000_000
    with ts.open(path) as db:
        db.store([Message("late", b"", timestamp=moment + n) for n in (-1, 0, 3_600_000_000)])
    among = "timestamp >= '2025-06-01 12:00:00+00' AND timestamp < '2025-06-01 13:00:00+00'"
    assert [moment] == ts_sql(path, f"SELECT epoch_us(timestamp) FROM messages WHERE {among}")
    assert [3] == ts_sql(path, "SELECT count(*) FROM messages WHERE topic = 'late' AND time > '2026-01-01 00:00:00+00'")


def test_json_and_csv(path: Path) -> None:
    """In JSON and CSV, bytes that aren't text are hexadecimal, sums are numbers, and nested values are JSON."""
    query = "SELECT payload, sum(qos), [count(*)] AS counts, NULL AS nothing FROM messages GROUP BY 1 ORDER BY 3 DESC"
    expected = [["0xff", 0, [9], None], ["é,\n", 0, [1], None]]
    document = json.loads(run(str(path), query, "--json").stdout)
    assert {"columns": ["payload", "sum(qos)", "counts", "nothing"], "rows": expected} == document
    rows = list(csv.reader(io.StringIO(run(str(path), query, "--csv").stdout)))
    assert [["payload", "sum(qos)", "counts", "nothing"], ["0xff", "0", "[9]", ""], ["é,\n", "0", "[1]", ""]] == rows


def test_what_is_not_a_read_is_refused(path: Path) -> None:
    """A statement that isn't one query is refused in one line, and changes nothing."""
    for statement in ("DELETE FROM messages", "SELECT", "SELECT x FROM messages", "SELECT 1; SELECT 2"):
        done = run(str(path), statement)
        assert 2 == done.exit_code
        assert done.stderr.startswith("error: ")
        assert 1 == len(done.stderr.splitlines())
    assert [10] == ts_sql(path, "SELECT count(*) FROM messages")


def test_the_examples_of_the_help_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples in the help run and print what the help says, with times in UTC."""
    monkeypatch.chdir(tmp_path)
    with ts.open("data", backend="duckdb", layout="table", timestamps="message", shards=2) as db:
        rows = [Message(f"fleet/{n % 4 // 2}/speed", f"é{n}".encode(), f"c{n}", timestamp=10**15 + n) for n in range(9)]
        db.store(rows)
    examples = [
        shlex.split(line) for line in (sql.help or "").splitlines() if line.strip().startswith("topicstore sql")
    ]
    counts, newest, own, columns = (json.loads(run(*words[2:], "--json").stdout) for words in examples)
    assert [["fleet/0/speed", 5], ["fleet/1/speed", 4]] == counts["rows"]
    expected = [[f"2001-09-09T01:46:40.{n:06}Z", f"fleet/{n % 4 // 2}/speed"] for n in range(8, 0, -1)]
    assert expected == newest["rows"][:-1]
    assert [] == own["rows"]
    assert {"time", "topic", "payload", "payload_bytes", "position"} <= {row[0] for row in columns["rows"]}
    for words in examples:
        shown = run(*words[2:])
        assert (0, "") == (shown.exit_code, shown.stderr)
    assert "2001-09-09T01:46:40.000008Z" in run(*examples[1][2:], "--csv").stdout


def test_times_have_a_zone(path: Path) -> None:
    """Times are printed in UTC, with a zone or without; dates are printed as they are."""
    query = "SELECT TIMESTAMP '2024-01-01 12:00', TIMESTAMPTZ '2024-01-01 12:00+02', DATE '2024-01-01'"
    found = json.loads(run(str(path), query, "--json").stdout)
    assert [["2024-01-01T12:00:00Z", "2024-01-01T10:00:00Z", "2024-01-01"]] == found["rows"]


VALUES = {
    "'infinity'::timestamp": "infinity",
    "'-infinity'::timestamptz": "-infinity",
    "'infinity'::date": "infinity",
    "'infinity'::timestamp_ns": "infinity",
    "date '0044-03-15 (BC)'": "0044-03-15 (BC)",
    "date '0001-12-31 (BC)'": "0001-12-31 (BC)",
    "timestamp '0044-03-15 (BC) 01:02:03.5'": "0044-03-15T01:02:03.500000Z (BC)",
    "timestamp '2025-01-01' + interval 9000 year": "11025-01-01T00:00:00Z",
    "timestamp_ns '2025-01-01 00:00:00.123456789'": "2025-01-01T00:00:00.123456789Z",
    "time '24:00:00'": "24:00:00",
    "time '12:00:00.5'": "12:00:00.500000",
    "[date 'infinity', date '2020-01-01', null]": ["infinity", "2020-01-01", None],
    "{'a': {'b': 'infinity'::date}, 'c': 1}": {"a": {"b": "infinity"}, "c": 1},
    "map {'k': 'infinity'::date}": [["k", "infinity"]],
    "union_value(k := 'infinity'::date)": "infinity",
    "'-inf'::double": "-inf",
    "['nan'::float]": ["nan"],
}


def test_values_that_python_or_json_lacks(path: Path) -> None:
    """Values that Python or JSON can't represent are printed as text in every format."""
    names = [f"x{n}" for n in range(len(VALUES))]
    columns = ", ".join(f"{value} AS {name}" for value, name in zip(VALUES, names, strict=True))
    query = f"SELECT {columns} UNION ALL SELECT {', '.join('NULL' for _ in names)} ORDER BY 1 NULLS LAST"
    found = json.loads(run(str(path), query, "--json").stdout)["rows"]
    assert [list(VALUES.values()), [None] * len(VALUES)] == found
    flat = [one if isinstance(one, str) else json.dumps(one, separators=(",", ":")) for one in VALUES.values()]
    rows = list(csv.reader(io.StringIO(run(str(path), query, "--csv").stdout)))
    assert [names, flat, [""] * len(VALUES)] == rows
    assert flat == re.split(" {2,}", run(str(path), query).stdout.splitlines()[2].strip())


def ts_sql(path: Path, statement: str) -> list[object]:
    with ts.open(path) as db:
        found: list[object] = db.sql(statement).column(0).to_pylist()
        return found


def test_any_backend(tmp_path: Path) -> None:
    """The command runs statements over a database on another engine, and over its counts."""
    need("leveldb", "block")
    with ts.open(tmp_path / "db", backend="leveldb") as db:
        db.store([Message(f"t/{n % 2}", b"%d" % n) for n in range(5)])
    done = run(str(tmp_path / "db"), COUNTS, "--json")
    assert {"columns": ["topic", "n"], "rows": [["t/0", 3], ["t/1", 2]]} == json.loads(done.stdout)
    done = run(str(tmp_path / "db"), "select topic, messages from topics", "--csv")
    assert "topic,messages\nt/0,3\nt/1,2\n" == done.stdout
