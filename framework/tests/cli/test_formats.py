"""Every format that `replay` writes can be imported again, and yields the same messages."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from topicstore.cli import cli
from topicstore.contract.positions import MAX_TIME
from topicstore.files.formats import (
    CSV_COLUMNS,
    PLAIN,
    csv_parser,
    csv_record,
    decode_line,
    decode_lines,
    decode_list,
    encode_lines,
)
from topicstore.files.mapping import ColumnMap

text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
topics = text.map(lambda t: t.replace("#", "").replace("+", "") or "/")
properties = st.builds(
    ts.Properties,
    st.none() | st.integers(0, 1),
    st.none() | st.integers(0, 2**32 - 1),
    st.none() | text,
    st.none() | topics,
    st.none() | st.binary(max_size=8),
    st.lists(st.tuples(text, text), max_size=3).map(tuple),
)
messages = st.builds(
    ts.Message,
    topics,
    st.binary(max_size=12) | st.text(max_size=8).map(str.encode),
    text,
    st.integers(0, 2),
    st.booleans(),
    st.none() | st.integers(0, MAX_TIME),
    st.none() | properties,
)

AWKWARD = [
    ts.Message("a/b", b"plain", "c1", 1, retain=True, timestamp=1),
    ts.Message("a//", b"", "", 0, retain=False, timestamp=2),
    ts.Message("a/b", b"\xff\xfe\0", "c1", 2, retain=False, timestamp=2),
    ts.Message('é/"\r\n,', 'é "quoted",\r\nnext \u2028 line\r\0'.encode(), "ü,\n", timestamp=3),
    ts.Message("$SYS/x", b"\xef\xbb\xbfnot a mark", "c2", timestamp=1_425_708_022_000_001),
    ts.Message(
        "p",
        b"{}",
        "c3",
        timestamp=1_425_708_022_000_001,
        properties=ts.Properties(1, 7, "text/plain", "r/s", b"\0\xff", (("k", "v"), ("k", "w"), ("", "é"))),
    ),
    ts.Message("p", b"{}", "c3", timestamp=1_425_708_022_000_001, properties=ts.Properties()),
]


def run(*arguments: object, stdin: bytes | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(map(str, arguments)), input=stdin)
    assert (result.exit_code, result.stderr if code == 0 else "") == (code, ""), result.output
    return result


def stored(path: Path) -> list[ts.Message]:
    with ts.open(path, mode="r+") as db:
        return [*db.replay("#", order="time"), *db.replay("$SYS/#")]


@given(st.lists(messages, max_size=5))
def test_json_lines_keep_messages(rows: list[ts.Message]) -> None:
    lines = encode_lines(rows)
    assert decode_lines(lines) == rows
    assert [decode_line(line) for line in lines.splitlines(keepends=False)] == rows


@given(st.lists(st.tuples(st.sampled_from([None, 1]), st.sampled_from(["", "\n", "\r\n", " ", "\n \n"])), max_size=4))
def test_a_line_is_one_object(objects: list[tuple[int | None, str]]) -> None:
    """Two objects in one line, and one object in several lines, are refused."""
    row = {"topic": "a", "payload": "}{", "properties": {}}
    text = "".join(json.dumps(row, indent=indent) + end for indent, end in objects).encode()
    try:
        expected = [json.loads(line) for line in text.split(b"\n") if line.strip()]
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own, which has no narrower one here
            decode_lines(text)
    else:
        assert [ts.Message("a", b"}{", properties=ts.Properties())] * len(expected) == decode_lines(text)


FIELDS = {"topic": "é", "payload": 'a, "b": 1', "qos": 1, "client_id": "", "properties": {"content_type": "é"}}


@given(st.sampled_from([None, *FIELDS, "content_type"]), st.permutations(list(FIELDS)), st.booleans(), st.booleans())
def test_a_name_twice_is_an_error(twice: str | None, names: list[str], escaped: bool, mapped: bool) -> None:
    """A repeated name in a message or its properties is an error in every format, because one value would be lost."""
    written = {name: json.dumps(FIELDS[name], ensure_ascii=escaped) for name in names}
    if twice == "content_type":
        written["properties"] = '{"content_type": "a", "content_type": "b"}'
    names += [twice] if twice in FIELDS else []
    text = ("{" + ", ".join(f'"{name}":{written[name]}' for name in names) + "}").encode()
    mapping = ColumnMap.given([], (), ["more"]) if mapped else PLAIN
    if twice is None:
        assert [decode_line(text, mapping)] == decode_lines(text, mapping) == decode_lines(text + b"\n" + text)[1:]
        return
    with pytest.raises(ValueError, match=f"'{twice}' twice"):
        decode_lines(text, mapping)
    with pytest.raises(ValueError, match=f"'{twice}' twice"):
        decode_line(text, mapping)
    with pytest.raises(ValueError, match="twice"):
        decode_list(b"[" + text + b"]")


@given(st.lists(messages, max_size=5))
def test_csv_keeps_messages(rows: list[ts.Message]) -> None:
    written = io.StringIO(newline="")
    csv.writer(written).writerows(map(csv_record, rows))
    parse = csv_parser(CSV_COLUMNS)
    written.seek(0)
    assert [parse(record) for record in csv.reader(written, strict=True)] == rows


@pytest.fixture
def original(tmp_path: Path) -> Path:
    with ts.open(tmp_path / "original", mode="x", timestamps="message") as db:
        db.store(AWKWARD)
    return tmp_path / "original"


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json", "x.csv", "x.csv.gz", "x.parquet"])
def test_every_format_brings_back_what_was_written(original: Path, tmp_path: Path, name: str) -> None:
    run("replay", original, "--output", tmp_path / name)
    run("replay", original, "$SYS/#", "--output", tmp_path / f"system-{name}")
    run("import", tmp_path / "copy", tmp_path / name, tmp_path / f"system-{name}", "--batch-size", 2)
    assert stored(tmp_path / "copy") == stored(original)
    assert sorted(path.name for path in tmp_path.glob("*x.*")) == sorted([name, f"system-{name}"])


@pytest.mark.parametrize("file_format", ["jsonl", "csv"])
def test_through_pipes(original: Path, tmp_path: Path, file_format: str) -> None:
    written = run("replay", original, "--format", file_format).stdout_bytes
    run("import", tmp_path / "copy", "--format", file_format, stdin=written)
    assert stored(tmp_path / "copy") == [m for m in stored(original) if m.topic[0] != "$"]
    run("import", tmp_path / "packed", "-", "--format", file_format, stdin=gzip.compress(written))
    assert stored(tmp_path / "packed") == stored(tmp_path / "copy")


def test_json_lines_say_what_the_message_is(original: Path) -> None:
    lines = [json.loads(line) for line in run("replay", original).stdout.split("\n") if line]
    assert lines[0] == {
        "timestamp": 1,
        "topic": "a/b",
        "client_id": "c1",
        "qos": 1,
        "retain": True,
        "payload": "plain",
    }
    assert lines[2]["payload_base64"] == "//4A"
    assert "payload" not in lines[2]
    assert lines[4]["properties"]["user_properties"] == [["k", "v"], ["k", "w"], ["", "é"]]


def test_parquet_has_the_published_schema(original: Path, tmp_path: Path) -> None:
    run("replay", original, "--output", tmp_path / "x.parquet", "--limit", 3)
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.schema.remove_metadata().equals(ts.SCHEMA)
    assert table["payload"].to_pylist() == [m.payload for m in AWKWARD[:3]]


def test_a_table_shows_nothing_that_acts_on_the_terminal(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", mode="x") as db:
        db.store([ts.Message("a/\x1b[2J", b"\x1b[31m[bold]", "c"), ts.Message("b", b"\xff", "c")])
    shown = run("replay", tmp_path / "db", "--format", "table").stdout
    assert "\x1b" not in shown
    assert "\\x1b[31m[bold]" in shown
    assert "0xff" in shown


def test_limits_and_times(tmp_path: Path) -> None:
    rows = [ts.Message("a", b"%d" % n, "c", timestamp=n * 1_000_000) for n in range(10)]
    with ts.open(tmp_path / "db", mode="x", timestamps="message") as db:
        db.store(rows)
    span = ("--start", "1970-01-01T00:00:02", "--until", "1970-01-01T01:00:08+01:00")
    for order in ("time", "any"):
        written = run("replay", tmp_path / "db", "a", *span, "--limit", 4, "--order", order).stdout_bytes
        assert decode_lines(written) == rows[2:6]
    assert decode_lines(run("replay", tmp_path / "db", "+", *span).stdout_bytes) == rows[2:8]
    assert run("replay", tmp_path / "db", "--start", "-1h").stdout == ""
    assert run("replay", tmp_path / "db", "--limit", 0).stdout == ""
    run("replay", tmp_path / "db", "--limit", 4, "--output", tmp_path / "four.parquet")
    assert pq.read_metadata(tmp_path / "four.parquet").num_rows == 4


def test_times_may_be_text_and_columns_few(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"topic":"t","payload":"1","timestamp":"1970-01-01T00:00:01Z"}\n')
    (tmp_path / "b.csv").write_bytes(
        b"\xef\xbb\xbfpayload,topic,timestamp\r\n2,t,1970-01-01T00:00:02\r\n\r\n3,t,13000000000"
    )
    pq.write_table(pa.table({"topic": ["t"], "payload": ["4"], "timestamp": [14_000_000_000]}), tmp_path / "c.parquet")
    run("import", tmp_path / "db", *(tmp_path / name for name in ("a.jsonl", "b.csv", "c.parquet")))
    assert [(m.payload, m.timestamp) for m in stored(tmp_path / "db")] == [
        (b"1", 1_000_000),
        (b"2", 2_000_000),
        (b"3", 13_000_000_000),
        (b"4", 14_000_000_000),
    ]


def test_an_unfinished_output_leaves_nothing(original: Path, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("before\n")
    run("replay", original, "a/#/b", "--output", tmp_path / "x.jsonl", code=2)
    assert (tmp_path / "x.jsonl").read_text() == "before\n"
    assert list(tmp_path.glob(".*")) == []
    run("replay", original, "--output", tmp_path / "missing" / "x.jsonl", code=2)
    run("replay", original, "--format", "parquet", code=2)
