"""Imports of devices' files: other names for the column of times, payloads that are objects, and mapped columns."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.cli.files.progress import Progress
from topicstore.cli.files.source_detection import open_source
from topicstore.files.formats import decode_lines
from topicstore.files.time_units import AUTO, UNITS, to_microseconds
from topicstore.pubsub.publish import store_retaining

from .conftest import run

Write = Callable[[list[dict[str, Any]]], Path]

TIME = 1_700_000_000_123_456
NESTED = '{"t":21.50,"on":true,"names":["é"],"far":123456789012345678901234567890}'


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture(params=["jsonl", "csv", "parquet"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    """Return a function that writes rows to a file, for each format."""

    def write(rows: list[dict[str, Any]]) -> Path:
        file = tmp_path / f"rows.{request.param}"
        if request.param == "jsonl":
            file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        elif request.param == "csv":
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {k: json.dumps(v) if isinstance(v, (dict, bool)) else v for k, v in r.items()} for r in rows
            )
            file.write_text(text.getvalue())
        else:
            pq.write_table(pa.Table.from_pylist(rows), file)
        return file

    return write


def stored(path: Path) -> list[ts.Message]:
    with ts.open(path, mode="r") as db:
        return list(db.replay("#", order="time"))


# --- times ---


@pytest.mark.parametrize(
    ("name", "time"),
    [
        ("ts", 1_700_000_000),
        ("time", 1_700_000_000_123),
        ("ts", TIME),
        ("time", TIME * 1_000 + 789),
        ("ts", 1_700_000_000.123456),
        ("time", "2023-11-14T22:13:20Z"),
    ],
)
def test_the_time_has_other_names_and_its_size_determines_the_unit(
    write: Write, target: Path, name: str, time: float | str
) -> None:
    run("import", target, write([{"topic": "a", "payload": "x", name: time}]))
    digits = {1_700_000_000: 0, "2023-11-14T22:13:20Z": 0, 1_700_000_000_123: 123_000}.get(time, 123_456)
    assert stored(target)[0].timestamp == 1_700_000_000_000_000 + digits


@given(st.integers(10**15, 5 * 10**15 - 1), st.sampled_from(sorted(UNITS)))
def test_a_time_is_found_in_whatever_unit_it_is_written(time: int, unit: str) -> None:
    """A time is converted in each unit, as an integer, with a fraction, and as text."""
    each = UNITS[unit]
    whole, rest = divmod(time * each, 10**6)
    for how in (AUTO, unit):
        assert to_microseconds(whole, how) == whole * 10**6 // each
        text = f"{whole}.{rest:06}"
        assert to_microseconds(text, how) == time
        if unit == "s":
            assert to_microseconds(float(text), how) == time


@pytest.mark.parametrize("time", [5, 20_240_131, 10**10, 1.5, True, [1], {}])
def test_a_number_of_an_ambiguous_unit_is_refused(tmp_path: Path, target: Path, time: object) -> None:
    """A number whose unit is ambiguous is refused with its row, and nothing is stored."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"topic": "a", "payload": "x", "ts": time}))
    assert "row 1: " in run("import", target, file, code=2).stderr
    assert not target.exists()


def test_the_unit_may_be_given(write: Write, target: Path) -> None:
    """With `--time-unit` any number is taken in that unit, without the check of plausible years."""
    file = write(
        [
            {"topic": "a", "payload": "x", "timestamp": 1_700_000_000},
            {"topic": "a", "payload": "y", "timestamp": 1_700_000_001},
        ]
    )
    assert "seconds" in run("import", target, file, code=2).stderr
    run("import", target, file, "--time-unit", "s")
    assert [message.timestamp for message in stored(target)] == [1_700_000_000_000_000, 1_700_000_001_000_000]


@pytest.mark.parametrize(
    ("name", "time", "unit"),
    [
        ("timestamp", "2023-11-14T22:13:20.123456789Z", "us"),
        ("ts", "2023-11-14T22:13:20.123456789+00:00", "us"),
        ("ts", "1700000000.123456789", "s"),
        ("ts", 1_700_000_000_123_456_789, "ns"),
        ("timestamp", "2023-11-14T22:13:20,123456000Z", ""),
        ("ts", 1_700_000_000_123_456_000, ""),
        ("ts", 1_700_000_000.123456, ""),
        ("ts", "1700000000.123456000", ""),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_digits_of_a_time_are_not_cut_in_silence(
    tmp_path: Path, target: Path, name: str, time: object, unit: str, ending: str
) -> None:
    """A time finer than microseconds is rounded down with a note, unless a unit is given; `decode_lines` refuses it."""
    file = tmp_path / f"x.{ending}"
    row = {"topic": "a", "payload": "x", name: time}
    text = json.dumps(row)
    if ending == "jsonl" and str(time)[:2] == "17":
        text = text.replace(f'"{time}"', f"{time}")  # a number with more digits than a float can hold
    csv_text = ",".join(row) + "\n" + ",".join(f'"{value}"' for value in row.values())
    file.write_text(text if ending == "jsonl" else csv_text)
    assert bool(unit) == ("were rounded down" in run("import", target, file).stderr)
    if unit:
        assert "" == run("import", target, file, "--again", "--time-unit", unit).stderr
        with pytest.raises(ValueError, match="finer than microseconds"):
            decode_lines(text.encode())
    assert {TIME} == {message.timestamp for message in stored(target)}


def test_two_names_of_the_time_are_one_too_many(write: Write, target: Path) -> None:
    file = write([{"topic": "a", "payload": "x", "ts": 1_700_000_000, "time": 1_700_000_000}])
    assert "ts and time" in run("import", target, file, code=2).stderr
    run("import", target, file, "--map", "timestamp=ts", "--ignore", "time")
    assert stored(target)[0].timestamp == 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("name", "how", "says"),
    [("when", ("--map", "timestamp=when"), ""), ("timestamp", (), "column 'timestamp' is timestamp[ns]")],
)
def test_times_of_arrow_are_what_they_are(
    tmp_path: Path, target: Path, name: str, how: tuple[str, ...], says: str
) -> None:
    """Arrow times with a fraction of a microsecond are refused with their row, unless a unit is given."""
    times = pa.array([1_000, TIME * 1_000 + 1], pa.timestamp("ns"))
    pq.write_table(pa.table({"topic": ["a", "a"], "payload": ["x", "y"], name: times}), tmp_path / "x.parquet")
    arguments = ("import", target, tmp_path / "x.parquet", *how)
    told = run(*arguments, code=2).stderr
    assert "row 2: " in told
    assert says in told
    assert [message.timestamp for message in stored(target)] == [1]
    run(*arguments, "--time-unit", "ns", "--again")
    assert [message.timestamp for message in stored(target)][-1] == TIME


@pytest.mark.parametrize("name", ["timestamp", "ts"])
@pytest.mark.parametrize(
    ("times", "how"),
    [
        (pa.array([TIME], pa.uint64()), ()),
        (pa.array([TIME * 1_000], pa.uint64()), ("--time-unit", "ns")),
        (pa.array([TIME / 1e6]), ("--unit", "s")),
        (pa.array([TIME / 1e3]), ("--time-unit", "ms")),
        (pa.array([Decimal(TIME) / 10**6]), ("--time-unit", "s")),
        (pa.array([TIME], pa.timestamp("us")), ()),
        (pa.array([TIME * 1_000], pa.timestamp("ns")), ()),
        (pa.array([TIME + 3_600_000_000], pa.timestamp("us")), ("--zone", "Europe/Berlin")),
        (pa.array([TIME], pa.timestamp("us", "Europe/Berlin")), ("--zone", "Asia/Tokyo")),
        (pa.array(["2023-11-14T23:13:20.123456"]), ("--zone", "Europe/Berlin")),
        (pa.array(["2023-11-14T22:13:20.123456Z"]), ("--zone", "Europe/Berlin")),
    ],
)
def test_types_of_times_in_parquet(
    tmp_path: Path, target: Path, name: str, times: pa.Array, how: tuple[str, ...]
) -> None:
    """Every type of time in Parquet is read, with `--time-unit` and `--zone` for a unit or zone that the type lacks."""
    pq.write_table(pa.table({"topic": ["a"], "payload": ["x"], name: times}), tmp_path / "x.parquet")
    run("import", target, tmp_path / "x.parquet", *how)
    assert [TIME] == [message.timestamp for message in stored(target)]


def test_what_a_time_lacks_is_asked_for(tmp_path: Path, target: Path) -> None:
    """A fractional number without `--time-unit`, and an unknown time zone, are refused."""
    pq.write_table(pa.table({"topic": ["a"], "payload": ["x"], "timestamp": [TIME / 1e6]}), tmp_path / "x.parquet")
    assert "row 1: " in (told := run("import", target, tmp_path / "x.parquet", code=2).stderr)
    assert "--time-unit" in told
    assert "no such time zone" in run("import", target, tmp_path / "x.parquet", "--zone", "Nowhere", code=2).stderr


# --- what other programs write ---

MOSQUITTO = r"""
{"tst":"2023-11-14T23:13:20.123456+0100","topic":"a/b","qos":0,"retain":0,"payloadlen":2,"payload":"hi"}
{"tst":"2023-11-14T23:13:20.123456Z+0100","topic":"a/b","qos":1,"retain":1,"mid":7,"payloadlen":9,"payload":{"x": 1.50}}
{"tst":"2023-11-14T22:13:20.123456+0000","topic":"a/b","qos":2,"retain":1,"mid":8,"payloadlen":0,"payload":null}
{"tst":"2023-11-14T22:13:20.123456Z","topic":"a/n","qos":0,"retain":0,"payloadlen":5,"payload":21.50,"properties":
"""


def test_what_mosquitto_sub_writes(tmp_path: Path, target: Path) -> None:
    """Output of `mosquitto_sub` with `-F %j` and `-F %J` can be imported."""
    properties = {
        "payload-format-indicator": 1,
        "message-expiry-interval": 60,
        "content-type": "text/plain",
        "response-topic": "r/s",
        "correlation-data": 'c"d',
        "subscription-identifier": 3,
        "user-properties": {"k": "v"},
    }
    written = json.dumps(properties).replace('{"k": "v"}', '{"k": "v", "k": "w"}') + "}"
    (tmp_path / "x.jsonl").write_text(MOSQUITTO.strip() + written)
    run("import", target, tmp_path / "x.jsonl")
    assert [
        ts.Message("a/b", b"hi", timestamp=TIME),
        ts.Message("a/b", b'{"x":1.50}', "", 1, True, TIME),
        ts.Message("a/b", b"", "", 2, True, TIME),
        ts.Message(
            "a/n",
            b"21.50",
            timestamp=TIME,
            properties=ts.Properties(1, 60, "text/plain", "r/s", b'c"d', (("k", "v"), ("k", "w"))),
        ),
    ] == stored(target)
    (tmp_path / "y.jsonl").write_text('{"topic":"a","payload":"x","mid":7}')
    assert "no column mid" in run("import", target, tmp_path / "y.jsonl", code=2).stderr


def test_null_in_optional_fields(tmp_path: Path, target: Path) -> None:
    names = ("timestamp", "client_id", "qos", "retain", "payload_base64", "properties")
    (tmp_path / "x.jsonl").write_text(json.dumps({"topic": "a", "payload": "x", **dict.fromkeys(names)}))
    run("import", target, tmp_path / "x.jsonl")
    assert [("a", b"x", "", 0, False, None)] == [
        (m.topic, m.payload, m.client_id, m.qos, m.retain, m.properties) for m in stored(target)
    ]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "json", "csv.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_is_reported(tmp_path: Path, target: Path, ending: str, encoding: str) -> None:
    text = "topic,payload\na,é\n" if "csv" in ending else '{"topic":"a","payload":"é"}'
    data = text.encode(encoding)
    (tmp_path / f"x.{ending}").write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    assert "seems to be in UTF-16" in run("import", target, tmp_path / f"x.{ending}", code=2).stderr
    assert not target.exists()


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("quoted", [False, True])
def test_separators_of_csv(tmp_path: Path, target: Path, separator: str, quoted: bool) -> None:
    """The header determines the separator of a CSV file, even if fields contain others; a resumed import keeps it."""
    with (tmp_path / "x.csv").open("w", newline="", encoding="utf-8-sig") as file:
        file.write("\n\n")
        writer = csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL)
        writer.writerows([("topic", "payload", ",;\t"), ("a", "1,5;\t\n", ""), ("b", "2;6", "")])
    for _ in range(2):
        run("import", target, tmp_path / "x.csv", "--ignore", ",;\t", "--limit", 1)
    assert [("a", b"1,5;\t\n"), ("b", b"2;6")] == [(m.topic, m.payload) for m in stored(target)]


# --- payloads ---


def test_a_payload_that_is_an_object_is_stored_as_its_json(tmp_path: Path, target: Path) -> None:
    """A payload that is a JSON value is stored as compact UTF-8, with numbers as written; a string stays as it is."""
    spaced = NESTED.replace(":", " : ").replace(",", " , ")
    payloads = [spaced, '"text"', "21.50", "true", "[ 1, 2 ]", '""', '"{ }"']
    (tmp_path / "x.jsonl").write_text("".join(f'{{"topic":"a","payload":{payload}}}\n' for payload in payloads))
    run("import", target, tmp_path / "x.jsonl")
    expected = [NESTED, "text", "21.50", "true", "[1,2]", "", "{ }"]
    assert [message.payload.decode() for message in stored(target)] == expected


def test_a_struct_of_arrow_is_stored_as_its_json(tmp_path: Path, target: Path) -> None:
    payload = pa.array([{"t": 21.5, "names": ["é"]}, None, {"t": None, "names": []}])
    pq.write_table(pa.table({"topic": ["a", "a", "a"], "payload": payload}), tmp_path / "x.parquet")
    assert "row 2: it has neither payload" in run("import", target, tmp_path / "x.parquet", code=2).stderr
    assert [message.payload.decode() for message in stored(target)] == ['{"t":21.5,"names":["é"]}']


@pytest.mark.parametrize("payload", ["null", None])
def test_no_payload_is_an_error(tmp_path: Path, target: Path, payload: str | None) -> None:
    (tmp_path / "x.jsonl").write_text('{"topic":"a"' + (f',"payload":{payload}' if payload else "") + "}")
    assert "row 1: it has neither payload" in run("import", target, tmp_path / "x.jsonl", code=2).stderr


def test_json_that_is_no_text_is_an_error(tmp_path: Path, target: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"topic":"a","payload":{"a":"\xff"}}')
    assert "row 1: " in run("import", target, tmp_path / "x.jsonl", code=2).stderr


# --- mappings ---

ROWS = [
    {"site": "north", "id": 7, "data": "41.5", "when": 1_700_000_000, "quality": 3},
    {"site": "south", "id": 12, "data": "", "when": 1_700_000_001, "quality": 4},
]
MAP = ("--map", "payload=data", "--map", "topic=plant/{site}/dev-{id}", "--map", "timestamp=when")
MORE = ("--map", "client_id={topic[-1]}", "--set", "qos=1", "--ignore", "quality")


def test_columns_are_mapped(write: Write, target: Path) -> None:
    """Columns can be mapped by name, by template and by topic level, and set to a constant, in every format."""
    run("import", target, write(ROWS), *MAP, *MORE)
    assert stored(target) == [
        ts.Message("plant/north/dev-7", b"41.5", "dev-7", 1, timestamp=1_700_000_000_000_000),
        ts.Message("plant/south/dev-12", b"", "dev-12", 1, timestamp=1_700_000_001_000_000),
    ]


def test_a_topic_gives_the_client_id_and_is_put_together_again(write: Write, target: Path) -> None:
    file = write([{"topic": "fleet/eu/bus-7/speed", "payload": "1"}])
    run("import", target, file, "--map", "client_id={topic[2]}")
    run(
        "import",
        target,
        file,
        "--map",
        "topic=x{{}}/{topic[2]}/{topic[-1]}",
        "--map",
        "payload=topic",
        "--ignore",
        "payload",
        "--again",
    )
    first, second = stored(target)
    assert (first.topic, first.client_id) == ("fleet/eu/bus-7/speed", "bus-7")
    assert (second.topic, second.payload) == ("x{}/bus-7/speed", b"fleet/eu/bus-7/speed")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (("--map", "topic=a/{site}"), "data, id, quality, when"),
        (("--map", "payload=dta", "--map", "topic=site", "--ignore", "id"), "data, quality, when"),
    ],
)
def test_a_column_that_nothing_takes_is_refused(write: Write, target: Path, how: Any, told: str) -> None:
    """A column that no mapping uses is refused by name; nothing is stored, and no database is left."""
    assert f"no column {told};" in run("import", target, write(ROWS), *how, code=2).stderr
    assert not target.exists()


@pytest.mark.parametrize("source", ["dta", "<{dta}>"])
def test_a_misspelt_column_is_named_beside_the_one_that_it_leaves_over(write: Write, target: Path, source: str) -> None:
    rows = [{"topic": "a", "data": "1"}]
    told = run("import", target, write(rows), "--map", f"payload={source}", code=2).stderr
    assert "no column data;" in " ".join(told.split())
    assert "--map names dta, which is not there" in " ".join(told.split())


def test_a_column_that_is_mapped_and_not_there_is_refused(write: Write, target: Path) -> None:
    told = run("import", target, write(ROWS), *MAP, *MORE, "--map", "retain=kept", code=2).stderr
    assert "kept" in told


@pytest.mark.parametrize("level", [4, -5])
def test_a_level_that_a_topic_has_not_is_reported_with_the_row(write: Write, target: Path, level: int) -> None:
    rows = [{"topic": "a/b/c/d/e", "payload": "1"}, {"topic": "a/b", "payload": "2"}]
    told = run("import", target, write(rows), "--map", f"client_id={{topic[{level}]}}", code=2).stderr
    assert f"row 2: its topic 'a/b' has no level {level}" in told
    assert len(stored(target)) == 1


@pytest.mark.parametrize(
    "how",
    [
        ("--map", "topic"),
        ("--map", "topic="),
        ("--map", "topc=x"),
        ("--map", "topic={"),
        ("--map", "topic={}"),
        ("--map", "topic={a!r}"),
        ("--map", "topic={a:9}"),
        ("--map", "qos={a}"),
        ("--map", "topic=a", "--map", "topic=b"),
        ("--map", "topic=a", "--set", "topic=b"),
        ("--set", "topic=a/#"),
        ("--set", "qos=many"),
        ("--set", "payload=x"),
        ("--time-unit", "h"),
    ],
)
def test_a_mapping_that_is_none_is_refused(tmp_path: Path, target: Path, how: Any) -> None:
    (tmp_path / "x.jsonl").write_text('{"topic":"a","payload":"x"}')
    run("import", target, tmp_path / "x.jsonl", *how, code=2)
    assert not target.exists()


def test_unknown_names_are_reported_with_their_line(tmp_path: Path, target: Path) -> None:
    """Unknown names in JSON lines, and in properties, are reported with their row."""
    good = '{"topic":"a","payload":"x"}\n'
    for bad in ('{"topic":"a","payload":"x","clientid":"c"}', '{"topic":"a","payload":"x","properties":{"contnt":1}}'):
        (tmp_path / "x.jsonl").write_text(good + good + bad)
        told = run("import", target, tmp_path / "x.jsonl", "--again", code=2).stderr
        assert "row 3: " in told
        assert "clientid" in told or "contnt" in told


# --- going on ---


def test_an_import_with_a_mapping_resumes_with_the_same_mapping(write: Write, target: Path) -> None:
    """An interrupted import must be resumed with the same mapping, but further `--ignore` options may be added."""
    file = write([*ROWS, {**ROWS[0], "data": "3"}])
    run("import", target, file, *MAP, *MORE, "--limit", 1, "--late", "lift")
    for other in ((*MAP, *MORE[:-4]), (*MAP, *MORE, "--time-unit", "ms"), (*MAP, *MORE, "--retain")):
        assert "--map payload=data" in run("import", target, file, *other, "--ignore", "quality", code=2).stderr
    run("import", target, file, *MORE, *MAP, "--ignore", "nothing")
    assert [message.payload for message in stored(target)] == [b"41.5", b"", b"3"]
    assert "already imported" in run("import", target, file, *MAP, *MORE).stdout
    run("import", target, file, *MAP, *MORE[:-4], "--ignore", "quality", "--again")
    assert [message.qos for message in stored(target)] == [1, 1, 1, 0, 0, 0]


def test_a_corrected_file_resumes_with_its_mapping(tmp_path: Path, target: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"t":"a","p":1}\n{"t":"b","q":1}\n')
    run("import", target, tmp_path / "x.jsonl", "--map", "topic=t", "--map", "payload=p", code=2)
    (tmp_path / "x.jsonl").write_text('{"t":"a","p":1}\n{"t":"b","p":1}\n')
    run("import", target, tmp_path / "x.jsonl", "--map", "topic=x{t}", "--map", "payload=p", code=2)
    run("import", target, tmp_path / "x.jsonl", "--map", "topic=t", "--map", "payload=p")
    assert [message.topic for message in stored(target)] == ["a", "b"]


# --- retained messages ---

RETAINED = [
    {"topic": f"t/{n % 5}", "payload": f"{n}", "client_id": f"c{n % 7}", "retain": n % 3 == 0} for n in range(60)
]


def last_retained() -> dict[str, bytes]:
    return {str(row["topic"]): str(row["payload"]).encode() for row in RETAINED if row["retain"]}


def retained(path: Path) -> dict[str, bytes]:
    with ts.open(path, mode="r") as db:
        return {message.topic: message.payload for message in db.retained("#")}


def test_retained_messages_are_kept_if_it_is_asked_for(write: Write, target: Path, tmp_path: Path) -> None:
    """Retained messages are set only with `--retain`; otherwise the import reports how many it didn't set."""
    file = write(RETAINED)
    told = run("import", tmp_path / "other", file).stdout
    assert "20 messages with the retain flag did not become retained messages; --retain does that" in told
    assert retained(tmp_path / "other") == {}
    assert "--retain" not in run("import", target, file, "--retain", "--shards", 3, "--batch-size", 7).stdout
    assert retained(target) == last_retained()
    assert len(stored(target)) == len(stored(tmp_path / "other")) == 60


@pytest.mark.parametrize(("write", "committed"), [("jsonl", 0), ("parquet", 1), ("jsonl", 2)], indirect=["write"])
def test_a_crash_between_shards_loses_no_retained_message(write: Write, target: Path, committed: int) -> None:
    """After a crash between shards, the next import adds the messages that a shard lacks, and no older ones."""
    file = write(RETAINED)
    with ts.open(target, shards=3, timestamps="message") as db, open_source(file) as source:
        progress = Progress(db, source, retain=True)
        for number, rows in enumerate(source.read(0, 20)):
            state, batch = progress.state(rows), rows.batch()
            clients = [db.shard_of(client) for client in rows.client_ids()]
            topics = [db.shard_of(topic) for topic in rows.topics()]
            whole = number == 0
            store_retaining(
                db.storage,
                batch,
                state if whole else {committed: state[committed]},
                stored=[whole or shard == committed for shard in clients],
                retained=[whole or shard == committed for shard in topics],
            )
            if not whole:
                break
            progress.stored(rows)
    run("import", target, file, "--retain", "--batch-size", 9)
    assert retained(target) == last_retained()
    found = stored(target)
    assert len(found) == 60
    assert {message.payload for message in found} == {str(row["payload"]).encode() for row in RETAINED}


KILLED = """
from topicstore.cli import cli
counts(RocksdbEngine, "write")
cli(["import", *map(str, arguments)])
"""


@pytest.mark.slow
def test_killed_with_a_mapping_it_ends_like_one_that_was_not(
    tmp_path: Path, write: Write, target: Path, run_until: Callable[..., object]
) -> None:
    """After kills at any write, messages and retained messages equal those of an uninterrupted import."""
    rows = [
        {"site": f"s{n % 7}", "id": n % 11, "data": f"{n}", "ts": 1_700_000_000 + n, "retain": n % 3 == 0}
        for n in range(600)
    ]
    mapping = ("--map", "topic={site}/{id}", "--map", "payload=data", "--map", "client_id={topic[-1]}", "--retain")
    how = (write(rows), *mapping, "--batch-size", 20, "--shards", 3)
    run("import", tmp_path / "clean", *how)
    for number, moment in ((12, "before"), (8, "within"), (17, "after"), (11, "within")):
        run_until((number, moment), KILLED, target, *how)
    run("import", target, *how)
    assert retained(target) == retained(tmp_path / "clean")
    found: dict[str, list[ts.Message]] = {}
    for message in stored(tmp_path / "clean"):
        found.setdefault(message.client_id, []).append(message)
    for message in stored(target):
        assert message == found[message.client_id].pop(0)
    assert not any(found.values())


@pytest.mark.parametrize("column", ["topic", "timestamp", "payload", "other"])
def test_a_column_that_a_file_has_twice_is_bad_input(tmp_path: Path, column: str) -> None:
    """An import refuses a file with a repeated column before it stores anything, as bad input and not as damage."""
    columns = {"topic": ["a"], "payload": [b"x"], "timestamp": [1_700_000_000_000_000], "other": [1]}
    names = [*columns, column]
    pq.write_table(pa.Table.from_arrays([pa.array(columns[name]) for name in names], names), tmp_path / "file.parquet")
    (tmp_path / "file.csv").write_text(f"{','.join(names)}\n{','.join('a' for _ in names)}\n")
    for name in ("file.parquet", "file.csv"):
        done = run("import", tmp_path / "db", tmp_path / name, "--ignore", "other", code=2)
        assert f"columns twice: {column}" in done.stderr


def test_a_property_that_a_csv_field_has_twice_is_bad_input(tmp_path: Path) -> None:
    """A property that is repeated in a CSV field is refused, because one of the values would be lost."""
    (tmp_path / "file.csv").write_text(
        """topic,payload,properties\na,b,"{""content_type"":""a"",""content_type"":""b""}"\n"""
    )
    done = run("import", tmp_path / "db", tmp_path / "file.csv", code=2)
    assert "row 1: it has 'content_type' twice" in done.stderr
