"""Publishing over HTTP: formats, results, errors, and bodies that expand too much."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tracemalloc
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from topicstore.server.http.formats.columnar_bodies import arrow_batches, parquet_batches
from topicstore.server.http.formats.request_bodies import read

ARROW, PARQUET, LINES = "application/vnd.apache.arrow.stream", "application/vnd.apache.parquet", "application/x-ndjson"


def _arrow(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def _post(http: httpx.Client, body: bytes, kind: str, *, store: bool = True) -> httpx.Response:
    return http.post("/messages", params={"store": store}, content=body, headers={"Content-Type": kind})


def _payloads(db: ts.Database, topic_filter: str) -> list[bytes]:
    return [message.payload for message in db.replay(topic_filter)]


def test_json_may_be_one_message_or_a_list(http: httpx.Client, db: ts.Database) -> None:
    one = {"topic": "json/a", "payload": "text", "qos": 1, "properties": {"user_properties": [["k", "v"]]}}
    assert http.post("/messages?store=true", json=one).json() == {"count": 1, "stored": 1, "routed": 0, "retained": 0}
    more = [{"topic": "json/a", "payload": {"x": 1}}, {"topic": "json/a", "payload_base64": "/w=="}]
    assert http.post("/messages?store=true", json=more).json()["stored"] == 2
    assert _payloads(db, "json/a") == [b"text", b'{"x":1}', b"\xff"]
    assert next(db.replay("json/a")).properties == ts.Properties(user_properties=(("k", "v"),))


@pytest.mark.parametrize("kind", ["application/json", LINES])
def test_a_byte_order_mark_before_json_means_nothing(http: httpx.Client, db: ts.Database, kind: str) -> None:
    """A byte order mark before JSON is ignored, as RFC 8259 allows; within a payload it stays."""
    body = '\ufeff{"topic": "mark/a", "payload": "\ufeffx"}'.encode()
    assert _post(http, body, kind).json()["stored"] == 1
    assert [b"\xef\xbb\xbfx"] == _payloads(db, "mark/a")[-1:]
    rule = {"topic_filter": f"mark/{kind}"}
    posted = http.post("/persistence", content=b"\xef\xbb\xbf" + json.dumps(rule).encode())
    assert posted.is_success, posted.text


def test_json_lines_are_what_a_replay_writes(http: httpx.Client, db: ts.Database) -> None:
    db.store([ts.Message("lines/a", b"%d\xff" % number, f"c{number}") for number in range(10)])
    body = http.get("/messages", params={"filter": "lines/#"}).content
    assert _post(http, b"\n" + body, LINES).json()["stored"] == 10
    stored = list(db.replay("lines/#"))
    assert sorted(m.payload for m in stored[10:]) == sorted(m.payload for m in stored[:10])


@pytest.mark.parametrize("packed", [None, "zstd", "lz4"])
def test_arrow_may_be_packed(http: httpx.Client, db: ts.Database, packed: str | None) -> None:
    topic = f"arrow/{packed}"
    table = pa.table({"topic": [topic] * 1_000, "payload": [b"%d" % number for number in range(1_000)]})
    assert _post(http, _arrow(table, compression=packed), ARROW).json()["stored"] == 1_000
    encoded = table.set_column(0, "topic", table["topic"].dictionary_encode())
    assert _post(http, _arrow(encoded, compression=packed), ARROW).json()["stored"] == 1_000
    assert _payloads(db, topic) == [b"%d" % number for number in range(1_000)] * 2


@pytest.mark.parametrize(
    "options", [{}, {"compression": "zstd"}, {"data_page_version": "2.0"}, {"use_dictionary": False}]
)
def test_parquet_of_a_replay_is_published(http: httpx.Client, db: ts.Database, options: dict[str, Any]) -> None:
    topic = "parquet/" + "-".join(map(str, options.values()))
    properties = ts.Properties(content_type="text/plain", user_properties=(("k", "v"), ("k", "w")))
    db.store(
        [ts.Message(topic, b"%d" % number, properties=properties if number % 2 else None) for number in range(100)]
    )
    table = db.replay_arrow(topic).read_all()
    answer = _post(http, _parquet(table, row_group_size=30, **options), PARQUET)
    assert answer.json() == {"count": 100, "stored": 100, "routed": 0, "retained": 0}
    stored = list(db.replay(topic))
    assert stored[100:] == stored[:100]


def test_without_store_it_is_as_over_mqtt(http: httpx.Client, db: ts.Database) -> None:
    db.persistence.add("kept/#")
    messages = [
        {"topic": "kept/a", "payload": "1"},
        {"topic": "passed/a", "payload": "2"},
        {"topic": "passed/b", "payload": "3", "retain": True},
    ]
    with db.subscribe("passed/#") as subscription:
        assert http.post("/messages", json=messages).json() == {"count": 3, "stored": 1, "routed": 2, "retained": 1}
        assert [message.payload for message in subscription.fetch().messages] == [b"2", b"3"]
    assert [message.payload for message in db.retained("passed/#")] == [b"3"]
    assert _payloads(db, "passed/#") == []


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        ("application/json", b'[{"topic": "bad/a", "payload": "x"}, {"topic": "bad/+", "payload": "x"}]', "message 1 "),
        ("application/json", b'[{"topic": "bad/a", "payload": "x"}, {"topic": "bad/a"}]', "message 1 "),
        ("application/json", b'[{"topic": "bad/a", "payload": "x"}, 7]', "message 1 "),
        ("application/json", b'[{"topic": "bad/a"', "not JSON"),
        ("application/json", b'[{"topic": "bad/a", "payload": {}}, {"payload": 1}]', "message 1 "),
        ("application/json", b"", "message 0 "),
        ("application/json", b"[" * 100_000, "message 0 "),
        ("application/json", b'[{"topic": "bad/a", "payload": ' + b"[" * 100_000, "not JSON"),
        (LINES, b'{"topic": "bad/a", "payload": "x"}\n\n{"topic": "bad/a", "qos": 7, "payload": ""}\n', "message 1 "),
        (LINES, b'{"topic": "bad/a", "payload": "x"}\n{"topic": "bad/a", "other": 7, "payload": ""}\n', "message 1 "),
        (LINES, b"\xff\xfe", "message 0 "),
        (ARROW, b"", "Arrow"),
        (ARROW, b"\xff\xff\xff\xff\x10\x00\x00\x00" + b"x" * 40, "Arrow"),
        (ARROW, _arrow(pa.table({"topic": ["bad/a", "bad/#"], "payload": [b"", b""]})), "message 1 "),
        (ARROW, _arrow(pa.table({"topic": ["bad/a"], "payload": [b""], "more": [1]})), "more"),
        (ARROW, _arrow(pa.table({"topic": ["bad/a"]})), "payload"),
        (PARQUET, b"PAR1", "Parquet"),
        (PARQUET, b"PAR1" + b"\x00" * 40 + b"PAR1", "Parquet"),
        (PARQUET, _parquet(pa.table({"topic": ["bad/a", ""], "payload": [b"", b""]})), "message 1 "),
    ],
)
def test_a_bad_body_is_reported_and_publishes_nothing(
    http: httpx.Client, db: ts.Database, kind: str, body: bytes, told: str
) -> None:
    answer = _post(http, body, kind)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["detail"]
    assert _payloads(db, "bad/#") == []


@pytest.mark.parametrize("topic", ["$SYS/broker/version", "$share/g/x", "$replay/now/x"])
@pytest.mark.parametrize("store", [True, False])
def test_the_servers_own_topics_are_not_published(http: httpx.Client, db: ts.Database, topic: str, store: bool) -> None:
    """Topics of the server can't be published over HTTP, just as over MQTT.

    A subscriber would take such a message for the server's own.
    """
    rows = [{"topic": "own/a", "payload": "x"}, {"topic": topic, "payload": "x"}]
    answer = http.post("/messages", params={"store": store}, json=rows)
    assert (answer.status_code, answer.json()["index"]) == (400, 1)
    assert http.put("/retained", json={"topic": topic, "payload": "x"}).status_code == 400
    assert _payloads(db, topic) == _payloads(db, "own/#") == []
    assert db.retained(topic) == []


def test_other_formats_are_415(http: httpx.Client) -> None:
    for kind in ("text/plain", ""):
        assert _post(http, b"x", kind).status_code == 415


# --- bodies that expand too much --------------------------------------------------------

_MOST = 1 << 20


def _large(rows: int) -> pa.Table:
    return pa.table({"topic": ["t"] * rows, "payload": [bytes(1_000)] * rows})


def test_arrow_that_unpacks_to_too_much_is_refused_before_it_is_unpacked() -> None:
    body = _arrow(_large(100_000), compression="zstd")
    assert len(body) < _MOST
    before = pa.total_allocated_bytes()
    with pytest.raises(ts.InvalidMessageError, match="unpacks to more than"):
        next(arrow_batches(body, _MOST))
    assert pa.total_allocated_bytes() - before < _MOST


def _repeated(value: bytes, kind: pa.DataType, rows: int) -> pa.Table:
    payloads = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), pa.array([value], kind))
    return pa.table({"payload": payloads})


def _in_one_row(elements: pa.Array) -> pa.Table:
    """Return a row with a list of very many elements that take almost no bytes, but do when they are cast."""
    listed = pa.ListArray.from_arrays([0, len(elements)], elements)
    properties = pa.StructArray.from_arrays([listed], ["user_properties"])
    return pa.table({"topic": ["t"], "payload": [b""], "properties": properties})


@pytest.mark.parametrize(
    "table",
    [
        _repeated(bytes(600_000), pa.binary(), 2),
        _repeated(bytes(600_000), pa.binary(), 1_000_000),
        _repeated(bytes(8_000), pa.binary(8_000), 1_000),
        pa.table({"payload": pa.nulls(10_000_000)}),
        pa.table({"payload": pa.RunEndEncodedArray.from_arrays([10_000_000], ["x"])}),
        pa.table({"payload": pa.array(["x"], "string_view")}),
        _in_one_row(pa.nulls(10_000_000)),
        _in_one_row(pa.Array.from_buffers(pa.struct([]), 10_000_000, [None])),
        _in_one_row(pa.StructArray.from_arrays([pa.nulls(10_000_000)] * 2, ["name", "value"])),
    ],
    ids=lambda table: str(table.schema.types[-1]),
)
def test_arrow_that_is_small_and_means_much_is_bounded_too(table: pa.Table) -> None:
    """An Arrow body that is small but expands too much is refused.

    The size of a dictionary value counts at each reference, and elements of almost no bytes count, too.
    """
    body = _arrow(table, compression="zstd")
    assert len(body) < 50_000
    with pytest.raises(ts.InvalidMessageError, match=r"unpacks to more than|which messages don't have"):
        next(arrow_batches(body, _MOST))


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"compression": "zstd", "use_dictionary": False}])
def test_parquet_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(options: dict[str, Any]) -> None:
    body = _parquet(_large(100_000), **options)
    assert len(body) < _MOST
    before = pa.total_allocated_bytes()
    with pytest.raises(ts.InvalidMessageError, match="unpacks to more than"):
        next(parquet_batches(body, _MOST))
    assert pa.total_allocated_bytes() - before < 8 * _MOST


def test_what_the_headers_of_pages_say_counts_and_not_the_footer() -> None:
    body = _parquet(pa.table({"topic": ["t"], "payload": [bytes(500)]}), compression="none", use_dictionary=False)
    assert len(list(parquet_batches(body, 5_000))) == 1
    header = pq.read_metadata(pa.BufferReader(body)).row_group(0).column(1).data_page_offset
    assert body[header : header + 3] == b"\x15\x00\x15"  # a data page header, then the uncompressed size in two bytes
    lying = body[: header + 3] + b"\xfe\x7f" + body[header + 5 :]
    with pytest.raises(ts.InvalidMessageError, match="unpacks to more than"):
        list(parquet_batches(lying, 5_000))


@pytest.mark.parametrize("values", [[bytes(8_000)] * 1_000, [None] * 1_000])
def test_parquet_values_of_a_fixed_length_count_each(values: list[bytes | None]) -> None:
    """Each fixed-length Parquet value counts towards the limit, even if a page has only dictionary indices or nulls."""
    body = _parquet(pa.table({"topic": ["t"] * 1_000, "payload": pa.array(values, pa.binary(8_000))}))
    whole = pa.default_memory_pool()
    measured = pa.proxy_memory_pool(whole)
    pa.set_memory_pool(measured)
    try:
        with pytest.raises(ts.InvalidMessageError, match="unpacks to more than"):
            next(parquet_batches(body, _MOST))
    finally:
        pa.set_memory_pool(whole)
    assert (measured.max_memory() or 0) < _MOST


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("column", ["payload", "properties.content_type"])
def test_parquet_values_that_share_their_beginnings_are_refused_unread(version: str, column: str) -> None:
    texts = [f"{'x' * 10_000}{number:04}" for number in range(1_000)]
    table = pa.table(
        {"topic": ["t"] * 1_000, "payload": texts, "properties": [{"content_type": text} for text in texts]}
    )
    body = _parquet(
        table.select(["topic", "payload"] if column == "payload" else ["topic", "properties"]),
        use_dictionary=False,
        column_encoding={column: "DELTA_BYTE_ARRAY"},
        data_page_version=version,
    )
    assert len(body) < 50_000
    with pytest.raises(ts.InvalidMessageError, match="DELTA_BYTE_ARRAY"):
        next(parquet_batches(body, _MOST))


def _with_a_page_beyond_its_column(writer: bytes) -> bytes:
    """Return a file whose footer says that its second column has no bytes, so that its page lies after the column."""
    table = pa.table({"topic": ["t"], "payload": [b"xyz"]})
    body = _parquet(table, compression="none", use_dictionary=False, write_statistics=False, store_schema=False)
    metadata = pq.read_metadata(pa.BufferReader(body))
    size = bytes((metadata.row_group(0).column(1).total_compressed_size * 2,))
    sizes = b"\x16" + size + b"\x16" + size  # uncompressed size, then compressed size
    place = body.rindex(sizes)
    made = metadata.created_by.encode()
    return (body[: place + 3] + b"\x00" + body[place + 4 :]).replace(made, writer.ljust(len(made)))


def test_a_page_that_is_not_looked_at_is_not_read() -> None:
    """A Parquet file of an old writer with wrong column sizes is refused: Arrow would read beyond the column."""
    with pytest.raises(ts.InvalidMessageError, match="too old"):
        list(parquet_batches(_with_a_page_beyond_its_column(b"parquet-mr version 1.2.8"), _MOST))


def test_a_column_with_fewer_rows_than_others_is_damage_and_not_no_rows() -> None:
    with pytest.raises(ts.InvalidMessageError, match="damaged"):
        list(parquet_batches(_with_a_page_beyond_its_column(b"parquet-mr version 1.13.1"), _MOST))


_DAMAGING = """
import sys
import topicstore as ts
from topicstore.server.http.formats.request_bodies import read
body, kind = sys.stdin.buffer.read(), sys.argv[1]
for place in range(max(0, len(body) - 2_500), len(body)):
    for byte in {255, body[place] ^ 1} - {body[place]}:
        try:
            read(body[:place] + bytes([byte]) + body[place + 1 :], kind, 1 << 22)
        except ts.InvalidMessageError:
            pass
print("all were read or refused")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ARROW, PARQUET])
def test_a_damaged_byte_anywhere_ends_neither_the_process_nor_in_a_fault(kind: str) -> None:
    """A damaged byte anywhere in a body leads to a result or a refusal, and never kills the process.

    The test runs in a process of its own, because pyarrow aborts on some damaged footers.
    """
    properties = ts.Properties(content_type="t", user_properties=(("k", "v"),))
    batch = ts.MessageBatch.of([ts.Message(f"a/{n}", b"x", f"c{n}", properties=properties) for n in range(3)])
    table = pa.Table.from_batches([batch.to_arrow()])
    body = _arrow(table) if kind == ARROW else _parquet(table, store_schema=False)
    done = subprocess.run([sys.executable, "-c", _DAMAGING, kind], input=body, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"all were read or refused\n"), done.stderr.decode()[-2_000:]


@pytest.mark.parametrize("nothing", [b"[]", b"{}"])
def test_many_rows_of_nothing_are_refused_at_the_first(nothing: bytes) -> None:
    """A body of many empty messages is refused at the first one, before decoding takes many times the body's size."""
    body = b"[" + b",".join([nothing] * 200_000) + b"]"
    tracemalloc.start()
    try:
        with pytest.raises(ts.InvalidMessageError, match="message 0 "):
            read(body, "application/json", _MOST)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 * len(body)
