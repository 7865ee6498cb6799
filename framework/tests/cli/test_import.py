"""``topicstore import``: resuming, errors, and output."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import re
import select
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import topicstore as ts
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from topicstore.cli.files.json_documents import split_objects
from topicstore.cli.files.progress import Progress
from topicstore.cli.files.source_detection import open_source
from topicstore.files.formats import CSV_COLUMNS, csv_record, decode_lines, encode_lines

from .conftest import document, run

ROWS = [ts.Message(f"a/{n % 7}", b"%d" % n, f"client-{n % 13}", n % 3, timestamp=1_000 + n // 2) for n in range(200)]


imported = partial(document, "import")


def stored(path: Path) -> list[ts.Message]:
    with ts.open(path, mode="r+") as db:
        assert db.verify().ok
        return list(db.replay("#", order="time"))


def by_client(rows: list[ts.Message]) -> dict[str, list[ts.Message]]:
    return {client: [m for m in rows if m.client_id == client] for client in sorted({m.client_id for m in rows})}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_bytes(encode_lines(ROWS))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "db"


def test_it_creates_the_database_by_the_messages_own_times(db: Path, file: Path) -> None:
    run("import", db, file, "--shards", 3, "--late", "lift", "--max-skew", "5s", "--option", "block.level=3")
    with ts.open(db, mode="r+") as found:
        manifest = found.manifest
    assert (manifest.timestamps, manifest.shards, manifest.late, manifest.max_skew) == ("message", 3, "lift", 5.0)
    assert manifest.options == {"block": {"level": 3}}
    assert by_client(stored(db)) == by_client(ROWS)


def test_limits_add_up(db: Path, file: Path) -> None:
    """Several imports with limits together import the whole file, whatever the batch size."""
    seen = 0
    for limit in (1, 6, 7, 50, 0, 100, 36):
        found = imported(db, file, "--limit", limit, "--batch-size", 7, "--shards", 4)
        assert found["messages"] == limit
        assert found["sources"][0]["resumed"] == seen
        seen += limit
    assert seen == 200
    assert imported(db, file)["sources"][0]["outcome"] in ("imported", "already imported")
    assert by_client(stored(db)) == by_client(ROWS)


def test_what_is_done_is_done(db: Path, file: Path, tmp_path: Path) -> None:
    assert imported(db, file)["messages"] == 200
    moved = file.rename(tmp_path / "renamed.jsonl")
    assert "already imported" in run("import", db, moved).stdout
    assert imported(db, moved)["sources"][0] | {"seconds": 0, "name": ""} == {
        "name": "",
        "format": "jsonl",
        "outcome": "already imported",
        "resumed": 200,
        "rows": 200,
        "messages": 0,
        "retain_flags": 0,
        "lifted": 0,
        "seconds": 0,
    }
    assert len(stored(db)) == 200


def test_again_imports_again_and_can_be_interrupted_too(db: Path, file: Path) -> None:
    imported(db, file, "--late", "lift", "--shards", 2)
    assert imported(db, file, "--again", "--limit", 70, "--batch-size", 30)["sources"][0]["lifted"] == 70
    assert imported(db, file)["messages"] == 130
    assert imported(db, file)["messages"] == 0
    assert by_client(stored(db)) == {client: rows * 2 for client, rows in by_client(ROWS).items()}


@pytest.mark.parametrize("first_shard", [0, 1])
def test_a_crash_between_two_shards(db: Path, file: Path, first_shard: int) -> None:
    """A batch that only one shard has committed is completed in the others, and stored once."""
    with ts.open(db, mode="x", shards=2, timestamps="message") as opened, open_source(file) as source:
        progress = Progress(opened, source)
        for number, rows in enumerate(source.read(0, 30)):
            state = progress.state(rows)
            if number < 2:
                opened.store(rows.messages, state=state)
                progress.stored(rows)
                continue
            mine = rows.only([opened.shard_of(client) == first_shard for client in rows.client_ids()])
            assert 0 < len(mine) < 30
            opened.store(mine.messages, state={first_shard: state[first_shard]})
            break
    found = imported(db, file, "--batch-size", 17)
    assert found["sources"][0]["resumed"] == 60
    assert by_client(stored(db)) == by_client(ROWS)


def bad_json(row: bytes) -> bytes:
    return row.replace(b'"qos"', b'"qus"')


def bad_qos(row: bytes) -> bytes:
    return row.replace(b'"qos":', b'"qos":1')


def bad_topic(row: bytes) -> bytes:
    return row.replace(b'"a/', b'"a/+')


def late(row: bytes) -> bytes:
    return re.sub(rb'"timestamp":[0-9]+', b'"timestamp":0', row)


SPOILT = [bad_json, bad_qos, bad_topic, late, lambda _: b"{\n", lambda _: b'{"topic":"\xff"}\n']


@pytest.mark.parametrize(
    ("row", "spoil"),
    [*((101, spoil) for spoil in SPOILT), *((row, spoil) for row in (0, 199) for spoil in (bad_json, bad_topic))],
)
def test_a_bad_row_is_named_and_a_corrected_file_resumes(
    db: Path, file: Path, row: int, spoil: Callable[[bytes], bytes]
) -> None:
    """The rows before a bad row are stored, and the corrected file resumes at that row."""
    lines = file.read_bytes().splitlines(keepends=True)
    good = lines[row]
    lines[row] = spoil(good)
    file.write_bytes(b"".join(lines))
    result = run("import", db, file, "--shards", 2, "--batch-size", 33, code=2)
    assert result.stderr.startswith(f"error: {file}, row {row + 1}: ")
    assert result.stderr.count("\n") == 1
    assert ("--late lift" in result.stderr) == (spoil is late)
    lines[row] = good
    file.write_bytes(b"".join(lines))
    found = imported(db, file)
    assert (found["sources"][0]["resumed"], found["messages"]) == (row, 200 - row)
    assert by_client(stored(db)) == by_client(ROWS)


def test_bad_csv_rows(db: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    good = 'topic,payload,qos,timestamp\nt,"two\nlines",1,1000000000000001\n\nt,2,2,1000000000000002\n'
    for bad, why in (
        ("t,3,3,1000000000000003\n", "QoS"),
        ("t,3,x,1000000000000003\n", "QoS"),
        ("t,3\n", "2 fields, not 4"),
        ("t,3,0,someday\n", "is not a time"),
        ('t,"3', "unexpected end"),
    ):
        file.write_text(good + bad)
        error = run("import", db, file, code=2).stderr
        assert "row 3: " in error
        assert why in error
    file.write_text(good + "t,3,0,1000000000000003\n")
    assert imported(db, file)["messages"] == 1
    assert [m.payload for m in stored(db)] == [b"two\nlines", b"2", b"3"]


@pytest.mark.parametrize("header", ["topic\n", "topic,payload,colour\n", "topic,topic,payload\n", "1,2,3\n"])
def test_bad_csv_headers(db: Path, tmp_path: Path, header: str) -> None:
    (tmp_path / "x.csv").write_text(header + "a,b,c\n")
    assert str(tmp_path / "x.csv") in run("import", db, tmp_path / "x.csv", code=2).stderr


def test_bad_parquet(db: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    columns = {"topic": ["t", "t", "t+", "t"], "payload": [b"1", b"2", b"3", b"4"], "timestamp": [1, 2, 3, 4]}
    pq.write_table(pa.table(columns), file)
    result = run("import", db, file, code=2)
    assert f"{file}, row 3: " in result.stderr
    assert "--skip 2" in result.stderr
    pq.write_table(pa.table({**columns, "topic": ["t", "t", "u", "t"]}), file)
    assert imported(db, file, "--skip", 2)["messages"] == 2
    assert [m.payload for m in stored(db)] == [b"1", b"2", b"3", b"4"]
    for table in (pa.table({"topic": ["t"]}), pa.table({**columns, "colour": [1, 2, 3, 4]})):
        pq.write_table(table, file)
        assert str(file) in run("import", db, file, code=2).stderr
    file.write_bytes(b"PAR1 or not")
    assert str(file) in run("import", db, file, code=2).stderr


def test_bad_utf8_in_parquet_names_its_row(db: Path, tmp_path: Path) -> None:
    topics = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")]
    )
    pq.write_table(pa.table({"topic": topics, "payload": [b"1", b"2", b"3"]}), tmp_path / "x.parquet")
    assert "row 2: " in run("import", db, tmp_path / "x.parquet", code=2).stderr
    assert [m.payload for m in stored(db)] == [b"1"]


def test_parquet_resumes_within_a_row_group(db: Path, tmp_path: Path) -> None:
    with ts.open(tmp_path / "other", mode="x", timestamps="message") as other:
        batch = other.store(ROWS).batch.to_arrow()
    pq.write_table(pa.Table.from_batches([batch]), tmp_path / "x.parquet", row_group_size=64)
    for limit, seen in ((10, 0), (60, 10), (58, 70), (200, 128)):
        found = imported(db, tmp_path / "x.parquet", "--limit", limit, "--batch-size", 16, "--shards", 3)
        assert found["sources"][0]["resumed"] == seen
    assert by_client(stored(db)) == by_client(ROWS)


@pytest.mark.parametrize(
    ("ending", "damage"),
    [("jsonl", "half"), ("jsonl", "end"), ("jsonl", "garbage"), *((e, "changed") for e in ("jsonl", "json", "csv"))],
)
def test_damaged_gzip(db: Path, tmp_path: Path, ending: str, damage: str) -> None:
    """All whole rows before damage in a gzip file are stored, and the repaired file resumes after them."""
    rows = [ts.Message("a/b", xxhash.xxh3_128_hexdigest(b"%d" % n).encode(), timestamp=n) for n in range(3_000)]
    text = encode_lines(rows)
    if ending == "csv":
        text = b"topic,payload,timestamp\n" + b"".join(b"a/b,%b,%016d\n" % (row.payload, row.timestamp) for row in rows)
    whole = gzip.compress(text)
    packed = {
        "half": whole[: len(whole) // 2],
        "end": whole[:-4],
        "garbage": whole + b"\x07 and more",
        "changed": whole[: len(whole) // 2] + b"\xff" * 99 + whole[len(whole) // 2 + 99 :],
    }[damage]
    file = tmp_path / f"x.{ending}.gz"
    file.write_bytes(packed)
    unpacker, unpacked = zlib.decompressobj(31), b""
    with contextlib.suppress(zlib.error):
        for byte in packed:
            unpacked += unpacker.decompress(bytes([byte]))
    good = 0  # the number of rows before the damage; later rows may be unpacked to other bytes
    for good, (found, expected) in enumerate(zip(unpacked.splitlines(), text.splitlines(), strict=False), 1):
        if found != expected:
            good -= 1
            break
    good -= ending == "csv"
    result = run("import", db, file, "--batch-size", 1_000_000, code=2)
    assert good == len(stored(db)) > 1_000
    assert f"row {good + 1:,}: " in result.stderr
    file.write_bytes(whole)
    assert imported(db, file)["sources"][0]["resumed"] == good
    assert rows == stored(db)


def array(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows)


def indented_array(rows: list[dict[str, Any]]) -> str:
    return "\ufeff" + json.dumps(rows, indent=1)


def indented(rows: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(row, indent=2) for row in rows)


def together(rows: list[dict[str, Any]]) -> str:
    return "".join(map(json.dumps, rows))


@pytest.mark.parametrize("form", [array, indented_array, indented, together])
def test_json_that_is_not_lines(db: Path, tmp_path: Path, form: Callable[[list[dict[str, Any]]], str]) -> None:
    """JSON objects that aren't one per line are imported; a later import resumes, even if the file has grown."""
    rows = [{"topic": f"t{n}", "payload": 'a "}{][" \\', "properties": {}, "timestamp": n} for n in range(30)]
    file = tmp_path / "x.json"
    for end, limit, seen in ((20, 7, 0), (20, 8, 7), (29, 10, 15)):
        file.write_text(form(rows[:end]))
        [source] = imported(db, file, "--limit", limit, "--batch-size", 3, "--shards", 2)["sources"]
        assert (seen, limit) == (source["resumed"], source["messages"])
    file.write_text(form([*rows[:27], {**rows[27], "qos": 7}, *rows[28:]]))
    assert "row 28: " in run("import", db, file, code=2).stderr
    file.write_text(form(rows))
    assert 3 == imported(db, file)["messages"]
    assert [f"t{n}" for n in range(30)] == [message.topic for message in stored(db)]
    lines = tmp_path / "x.jsonl"
    lines.write_text(form(rows))
    told = run("import", tmp_path / "other", lines, code=2).stderr
    assert f"{lines}, row 1: " in told
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("{}{}]", 3),
        ("[{},]", 2),
        ("[{}{}]", 2),
        ("[{}", 2),
        ("[{}, 7, {}]", 2),
        ("[{}][{}]", 2),
        ("[[{}]]", 1),
        ("{} {", 2),
        ("{},{}", 2),
        ("7", 1),
        ('{} "text', 2),
    ],
)
def test_json_that_is_no_objects(db: Path, text: str, row: int) -> None:
    text = text.replace("{}", '{"topic":"t","payload":{"a":[1]}}')
    assert f"row {row}: " in run("import", db, "-", "--format", "json", stdin=text.encode(), code=2).stderr
    if row > 1:
        assert row - 1 == len(stored(db))


@given(st.lists(st.integers(0, 400)), st.sampled_from([array, indented_array, indented, together]))
def test_json_in_pieces(cuts: list[int], form: Callable[[list[dict[str, Any]]], str]) -> None:
    """Objects are split correctly wherever a chunk of the text ends, also within a string or an escape."""
    rows = [{"topic": '\\"{[', "payload": n, "é": [{"\\": "\\\\"}]} for n in range(4)]
    text = form(rows).encode()
    ends = sorted({0, *cuts, len(text)})
    found = list(split_objects(filter(None, (text[a:b] for a, b in pairwise(ends))), 1_000))
    assert rows == [json.loads(one[one.index(b"{") :]) for one in found]
    assert text.startswith(b"".join(found))


PIPED = {
    "jsonl": (b"", b'{"topic":"a","payload":"two\\n%d"}\n'),
    "json": (b"[", b'{"topic":"a","payload":\n"two\\n%d"},'),
    "csv": (b"topic,payload\n", b'a,"two\n%d"\n'),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("file_format", list(PIPED))
def test_rows_of_a_pipe_are_stored_while_it_is_open(file_format: str, packed: bool) -> None:
    """Rows from a pipe are stored before a batch is full and at an interruption, but partial rows aren't."""
    head, row = PIPED[file_format]
    packer = zlib.compressobj(wbits=31)

    def put(text: bytes) -> None:
        os.write(end, packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH) if packed else text)

    @contextlib.contextmanager
    def interrupted() -> Iterator[None]:
        """Wait while the pipe has unread data, and raise `KeyboardInterrupt` otherwise."""
        if not select.select([begin], [], [], 0)[0]:
            raise KeyboardInterrupt
        yield

    begin, end = os.pipe()
    try:
        with open_source(Path(f"/dev/fd/{begin}"), file_format) as source:
            read = source.read(0, 4_096)
            put(head + b"".join(row % n for n in range(300)) + (row % 300)[:-4])  # the last row is incomplete
            assert 300 == len(next(read))
            put((row % 300)[-4:] + row % 301 + (row % 302)[:-4])
            source.waiting = interrupted
            assert [b"two\n300", b"two\n301"] == [message.payload for rows in [next(read)] for message in rows.messages]
            with pytest.raises(KeyboardInterrupt):
                next(read)
    finally:
        os.close(end)
        os.close(begin)


@pytest.mark.parametrize("name", [(), ("--source", "log")])
def test_a_file_that_grew(db: Path, tmp_path: Path, name: tuple[str, ...]) -> None:
    """The new rows of a file that grew are imported, whether the earlier import had finished or not."""
    file = tmp_path / "log.jsonl"
    file.write_bytes(encode_lines(ROWS[:100]))
    imported(db, file, "--limit", 40, "--shards", 2, *name)
    seen = 40
    for end in (150, 200):
        file.write_bytes(encode_lines(ROWS[:end]))
        assert imported(db, file, *name)["sources"][0]["resumed"] == seen
        seen = end
    assert by_client(stored(db)) == by_client(ROWS)
    assert imported(db, file, *name)["messages"] == 0


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_another_file_under_the_name_of_a_source(db: Path, tmp_path: Path, ending: str) -> None:
    """Another file with the name of an earlier source, such as a rotated log, is read from its first row, with a note.

    If the earlier file had no rows, there is no note.
    """
    file = tmp_path / f"log.{ending}"
    stored_rows: list[ts.Message] = []
    for day, count in enumerate((10, 15, 8, 0, 5)):
        rows = [ts.Message("t", b"%d" % n, timestamp=1_000 * day + n) for n in range(count)]
        write(file, rows)
        other = run("import", db, file, "--source", "log", "--limit", 4, "--batch-size", 3, "--shards", 2)
        assert (0 < day < 4) == ("is another, and read from its first row" in other.stderr)
        again = run("import", db, file, "--source", "log")
        assert "" == again.stderr
        stored_rows += rows
        assert stored_rows == stored(db)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_another_stream_under_the_name_of_a_source(db: Path, tmp_path: Path, ending: str) -> None:
    """An import from stdin under the source name of different earlier rows is refused.

    It would skip rows that can't be read again.
    """
    file = tmp_path / f"log.{ending}"
    how = ("--format", ending, "--source", "log")
    write(file, ROWS[:20])
    run("import", db, "-", *how, stdin=file.read_bytes())
    for rows in (ROWS[100:150], ROWS[100:110], ROWS[:19], ROWS[:12]):
        write(file, rows)
        assert (
            "were imported under its name before"
            in run("import", db, "-", *how, stdin=file.read_bytes(), code=2).stderr
        )
    write(file, [])
    run("import", db, "-", *how, stdin=file.read_bytes())
    write(file, ROWS[:30])
    assert 10 == imported(db, "-", *how, stdin=file.read_bytes())["messages"]
    assert ROWS[:30] == stored(db)


def test_a_file_that_begins_otherwise_is_another(db: Path, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(encode_lines(ROWS[:100]))
    imported(db, file, "--late", "lift")
    file.write_bytes(encode_lines([*ROWS[:99], ROWS[101]]))
    assert imported(db, file)["messages"] == 100
    file.write_bytes(encode_lines(ROWS[:98]))
    assert imported(db, file)["messages"] == 98


MANY = [ts.Message("a", b"%08d" % n * 32, timestamp=1_000 + n) for n in range(12_000)]
"""More bytes than the two mebibytes at a file's ends that imports compare."""


def write(path: Path, rows: list[ts.Message]) -> None:
    if path.suffix == ".jsonl":
        path.write_bytes(encode_lines(rows))
    elif path.suffix == ".json":
        path.write_bytes(b"[" + b",\n".join(encode_lines([row]).strip() for row in rows) + b"]")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([CSV_COLUMNS, *map(csv_record, rows)])
    else:
        with ts.open("nowhere", backend="memory", timestamps="message") as other:
            table = pa.Table.from_batches([other.store(rows).batch.to_arrow()])
        pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("limit", [(), ("--limit", 3_000)])
def test_a_file_that_differs_in_its_middle_is_another(
    db: Path, tmp_path: Path, ending: str, limit: tuple[str, ...]
) -> None:
    """A file that differs from an imported one only in the middle counts as another file.

    That holds after a whole or a partial import of a file with equal size, beginning and end.
    """
    first, second = tmp_path / f"first.{ending}", tmp_path / f"second.{ending}"
    write(first, MANY)
    write(second, [*MANY[:6_000], msgspec.structs.replace(MANY[6_000], payload=b"x" * 256), *MANY[6_001:]])
    one, other = first.read_bytes(), second.read_bytes()
    assert (len(one), one[: 1 << 20], one[-1 << 20 :]) == (len(other), other[: 1 << 20], other[-1 << 20 :])
    before = imported(db, first, "--late", "lift", *limit)["messages"]
    [source] = imported(db, second)["sources"]
    begins_as_the_first = ending == "jsonl" and bool(limit)
    assert source["outcome"] == "imported"
    assert source["resumed"] == (before if begins_as_the_first else 0)
    assert sum(message.payload == b"x" * 256 for message in stored(db)) == 1


def test_a_last_line_that_became_longer_is_another_row(db: Path, tmp_path: Path) -> None:
    """A last line that has become longer counts as a new row, unless only its line end was missing."""
    file = tmp_path / "x.csv"
    for text, new in (("t,1\nt,2", 2), ("t,1\nt,2\n", 0), ("t,1\nt,2\nt,3", 1), ("t,1\nt,2\nt,34", 1)):
        file.write_text(f"topic,payload\n{text}")
        assert imported(db, file)["messages"] == new


def test_blank_lines_are_rows_without_messages(db: Path, tmp_path: Path) -> None:
    lines = encode_lines(ROWS[:6]).splitlines(keepends=True)
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"\xef\xbb\xbf\n" + b"\r\n \n".join(lines[:4]) + b"{}\n" + b"".join(lines[4:]))
    assert "row 12: " in run("import", db, file, "--batch-size", 3, code=2).stderr
    file.write_bytes(b"\xef\xbb\xbf\n" + b"\r\n \n".join(lines[:4]) + b"\n" + b"".join(lines[4:]) + b"\n\n")
    assert imported(db, file, "--limit", 1)["sources"][0]["resumed"] == 11
    assert imported(db, file)["messages"] == 1
    assert stored(db) == ROWS[:6]


def test_standard_input(db: Path) -> None:
    """Standard input with a source name resumes after the stored rows; without a name, all of it is imported."""
    assert imported(db, stdin=encode_lines(ROWS[:50]))["messages"] == 50
    assert imported(db, "-", "--source", "feed", stdin=encode_lines(ROWS[50:100]))["messages"] == 50
    assert imported(db, "-", "--source", "feed", stdin=encode_lines(ROWS[50:]))["messages"] == 100
    assert stored(db) == ROWS
    assert "--skip 1" in run("import", db, stdin=encode_lines([ROWS[-1], ROWS[0]]), code=2).stderr
    assert imported(db, "-", "--skip", 3, stdin=encode_lines([*ROWS[:3], ROWS[-1]]))["messages"] == 1
    assert "name a file" in run("import", db, "--format", "parquet", code=2).stderr
    run("import", db, "a", "b", "--source", "x", code=2)


def test_a_time_ahead_of_the_clock(db: Path) -> None:
    row = encode_lines([ts.Message("a", b"", timestamp=7_000_000_000_000_000)])
    assert "--max-skew" in run("import", db, stdin=row, code=2).stderr


def test_a_database_by_commit_times_is_pointed_out(db: Path, file: Path) -> None:
    run("create", db)
    assert run("import", db, file).stderr.startswith("note: ")
    assert run("import", db, file, "--shards", 2, code=3).stderr.startswith("error: ")


def test_missing_and_unknown_files(db: Path, tmp_path: Path) -> None:
    assert "nothing.jsonl" in run("import", db, tmp_path / "nothing.jsonl", code=2).stderr
    (tmp_path / "x.txt").write_bytes(encode_lines(ROWS[:1]))
    assert "--format" in run("import", db, tmp_path / "x.txt", code=2).stderr
    assert imported(db, tmp_path / "x.txt", "--format", "jsonl")["messages"] == 1
    (tmp_path / "empty.csv").write_bytes(b"")
    assert imported(db, tmp_path / "empty.csv")["messages"] == 0


def test_several_files(db: Path, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_bytes(encode_lines(ROWS[number * 50 : number * 50 + 50]))
    files = [tmp_path / f"{number}.jsonl" for number in range(4)]
    found = imported(db, *files, "--limit", 120)
    assert [one["messages"] for one in found["sources"]] == [50, 50, 20, 0]
    assert imported(db, *files)["messages"] == 80
    assert stored(db) == ROWS
    assert decode_lines(run("replay", db).stdout_bytes) == ROWS


@pytest.mark.parametrize(
    ("timestamp", "unit"),
    [(1_700_000_000, "seconds"), (1_700_000_000_000, "milliseconds"), (1_700_000_000_000_000, "")],
)
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_times_in_another_unit(db: Path, tmp_path: Path, timestamp: int, unit: str, ending: str) -> None:
    """Times in seconds or milliseconds are refused, unless `--allow-ancient` is given."""
    file = tmp_path / f"x.{ending}"
    if ending == "jsonl":
        file.write_bytes(b'\n{"topic":"t","payload":"1","timestamp":%d}\n' % timestamp * 3)
    elif ending == "csv":
        file.write_text("topic,payload,timestamp\n" + f"t,1,{timestamp}\n" * 3)
    else:
        pq.write_table(pa.table({"topic": ["t"] * 3, "payload": [b"1"] * 3, "timestamp": [timestamp] * 3}), file)
    if unit:
        told = run("import", db, file, code=2).stderr
        assert re.search(rf"{2 if ending == 'jsonl' else 1}\b.*its time {timestamp} .* it seems to be {unit}", told)
    assert "" == run("import", db, file, *["--allow-ancient"] * bool(unit), "--batch-size", 1).stderr
    assert [timestamp] * 3 == [m.timestamp for m in stored(db)]


def test_times_that_are_no_numbers_are_what_they_say(db: Path, tmp_path: Path) -> None:
    """Rows without a time, and files without rows, are imported without the check of units."""
    for number, row in enumerate((b'{"topic":"t","payload":"1"}', b"")):
        (tmp_path / f"{number}.jsonl").write_bytes(row)
        assert "" == run("import", db, tmp_path / f"{number}.jsonl").stderr


def test_an_import_that_fails_at_first_leaves_no_database(db: Path, file: Path, tmp_path: Path) -> None:
    """An import that creates a database and fails before it stores a row removes the database again."""
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"{}\n")
    run("import", db, bad, code=2)
    run("import", db, tmp_path / "missing.jsonl", code=2)
    run("import", db, "-", "--format", "csv", stdin=b"{}\n", code=2)
    assert not db.exists()
    db.mkdir()
    run("import", db, bad, code=2)
    assert [] == list(db.iterdir())
    run("import", db, bad, file, code=2)
    assert [] == list(db.iterdir())
    run("import", db, file, bad, code=2)
    assert len(stored(db)) == 200
    run("create", tmp_path / "made", "--timestamps", "message")
    run("import", tmp_path / "made", bad, code=2)
    assert stored(tmp_path / "made") == []


def test_csv_from_standard_input(db: Path) -> None:
    """CSV from standard input needs `--format csv`."""
    text = b"topic,payload\nt,1\n"
    assert "row 1" in run("import", db, stdin=text, code=2).stderr
    assert imported(db, "--format", "csv", stdin=text)["messages"] == 1


_BOUNDED = """
import resource, sys
from click.testing import CliRunner
from topicstore.cli import cli
import topicstore_backends.memory, topicstore_layouts.block.layout

now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (900 << 20), -1))
result = CliRunner().invoke(cli, ["import", sys.argv[1], sys.argv[2], "--backend", "memory"])
print(result.exit_code, result.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "filling"),
    [
        ("line.jsonl.gz", b'{"topic":"t","payload":"', b"x"),
        ("line.csv.gz", b"topic,payload\nt,", b"x"),
        ("record.csv.gz", b'topic,payload\nt,"', b"xxxxxxxxxxxxxxx\n"),
        ("blank.csv.gz", b"topic,payload\n", b"\n"),
    ],
)
def test_a_little_file_takes_no_great_memory(tmp_path: Path, name: str, head: bytes, filling: bytes) -> None:
    """A small file that unpacks to a gigabyte is refused, or read within 900 MB of memory."""
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range({"line": 1_024, "record": 128, "blank": 5}[name.split(".")[0]]):
            file.write(filling * ((1 << 20) // len(filling)))
    command = [sys.executable, "-c", _BOUNDED, str(tmp_path / "db"), str(tmp_path / name)]
    code, _, told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition(" ")
    if name.startswith("blank"):
        assert "0" == code
    else:
        assert "2" == code
        assert "\nerror: " in told
        assert "is longer than" in told or "field larger than field limit" in told
