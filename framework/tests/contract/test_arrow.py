"""Conversion to Arrow has one published schema; conversion from Arrow accepts all columns that cast without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.arrow import SCHEMA, SCHEMA_WITH_IDS
from topicstore.contract.batch import FIELDS, MessageBatch
from topicstore.contract.columns import Constant
from topicstore.contract.errors import InvalidMessageError
from topicstore.contract.model import Message, Properties
from topicstore.contract.positions import MAX_TIME

from .conftest import exactly, lists

PROPERTIES = SCHEMA.field("properties").type
FULL = Properties(1, 60, "text/plain", "reply/to", b"\x00\xff", (("k", "1"), ("j", ""), ("k", "1")))

SOME = [
    Message("a/b", b"1", "c", 1, retain=True, timestamp=5, properties=FULL),
    Message("a/c", b"", "", 0, retain=False, timestamp=None, properties=None),
    Message("a/b", b"\xff", "d", 2, retain=True, timestamp=MAX_TIME, properties=Properties()),
]


def record_batch(rows: int = 2, **columns: Any) -> pa.RecordBatch:
    """Return a `RecordBatch` with a topic, a payload and the given columns."""
    return pa.RecordBatch.from_pydict({"topic": pa.array(["a"] * rows), "payload": pa.array([b"p"] * rows)} | columns)


def read(name: str, array: pa.Array) -> list[Any]:
    """Convert a column from Arrow, and return the messages' values."""
    messages = MessageBatch.from_arrow(record_batch(len(array), **{name: array})).to_messages()
    return [getattr(message, name) for message in messages]


def refused(batch: pa.RecordBatch, match: str) -> int | None:
    with pytest.raises(InvalidMessageError, match=match) as caught:
        MessageBatch.from_arrow(batch)
    return caught.value.index


def stored(rows: list[Message]) -> MessageBatch:
    batch = MessageBatch.from_messages(rows)
    times = np.array([row.timestamp or 0 for row in rows], dtype=np.int64)
    return batch.placed(np.arange(2**63, 2**63 + len(rows), dtype=np.uint64), times, 65_535)


# --- out ------------------------------------------------------------------------------


def test_the_schema_is_frozen() -> None:
    """The schema's names and types don't change, because other programs read them."""
    expected = [
        ("timestamp", "timestamp[us, tz=UTC]", True),
        ("topic", "string", False),
        ("client_id", "string", False),
        ("qos", "int8", False),
        ("retain", "bool", False),
        ("payload", "binary", False),
        ("properties", str(PROPERTIES), True),
        ("shard", "uint16", False),
        ("position", "uint64", False),
    ]
    assert expected == [(field.name, str(field.type), field.nullable) for field in SCHEMA_WITH_IDS]
    assert expected[:-2] == [(field.name, str(field.type), field.nullable) for field in SCHEMA]
    inner = [
        ("payload_format_indicator", "uint8"),
        ("message_expiry_interval", "uint32"),
        ("content_type", "string"),
        ("response_topic", "string"),
        ("correlation_data", "binary"),
        ("user_properties", "list<item: struct<name: string not null, value: string not null>>"),
    ]
    assert inner == [(field.name, str(field.type)) for field in PROPERTIES]
    assert Properties.__struct_fields__ == tuple(name for name, _ in inner)


@settings(max_examples=200)
@given(lists)
def test_messages_come_back_from_arrow(rows: list[Message]) -> None:
    """Messages converted to Arrow and back have the same values and types, and the published schema."""
    batch = MessageBatch.from_messages(rows).to_arrow()
    batch.validate(full=True)
    assert batch.schema.equals(SCHEMA, check_metadata=True)
    assert exactly(rows) == exactly(MessageBatch.from_arrow(batch).to_messages())


@given(lists)
def test_ids_come_with_the_messages(rows: list[Message]) -> None:
    """`ids=True` adds two columns, shard and position, with all 64 bits of positions."""
    batch = stored(rows)
    arrow = batch.to_arrow(ids=True)
    arrow.validate(full=True)
    assert arrow.schema.equals(SCHEMA_WITH_IDS, check_metadata=True)
    assert list(range(2**63, 2**63 + len(rows))) == arrow["position"].to_pylist()
    assert [65_535] * len(rows) == arrow["shard"].to_pylist()
    assert exactly(batch.to_messages()) == exactly(MessageBatch.from_arrow(arrow).to_messages())
    assert batch.to_arrow().equals(arrow.select(SCHEMA.names))


@given(lists, st.integers(0, 8), st.integers(0, 8))
def test_a_sliced_record_batch_is_the_slice_of_its_messages(rows: list[Message], start: int, length: int) -> None:
    """Converting a sliced record batch respects its offset, in properties, too."""
    arrow = MessageBatch.from_messages(rows).to_arrow()
    cut = arrow.slice(min(start, len(rows)), length)
    assert exactly(rows[start : start + length]) == exactly(MessageBatch.from_arrow(cut).to_messages())


@pytest.mark.parametrize("rows", [0, 3])
def test_any_form_of_column_goes_out(rows: int) -> None:
    """Columns of constants, lists, NumPy or Arrow arrays convert to equal record batches."""
    kinds: dict[str, tuple[Any, Any, pa.DataType]] = {
        "topics": ("a/b", object, pa.large_string()),
        "payloads": (b"\x00", object, pa.large_binary()),
        "client_ids": ("c", object, pa.dictionary(pa.int8(), pa.string())),
        "qos": (2, np.uint8, pa.uint8()),
        "retain": (True, np.uint8, pa.bool_()),
        "timestamps": (MAX_TIME, np.int64, pa.int64()),
        "properties": (FULL, object, None),
        "positions": (2**64 - 1, np.uint64, pa.uint64()),
        "shards": (65_535, np.int64, pa.uint16()),
    }

    def formed(form: str) -> pa.RecordBatch:
        columns = {}
        for name, (value, numpy_kind, arrow_kind) in kinds.items():
            values = [value] * rows
            match form:
                case "constant":
                    columns[name] = Constant(value, rows)
                case "numpy" if name != "properties":
                    columns[name] = np.array(values, dtype=numpy_kind)
                case "arrow" if name != "properties":
                    columns[name] = pa.array(values, arrow_kind)
                case _:
                    columns[name] = values
        return MessageBatch(**columns).to_arrow(ids=True)

    expected = formed("list")
    assert rows == expected.num_rows
    for form in ("constant", "numpy", "arrow"):
        actual = formed(form)
        actual.validate(full=True)
        assert actual.schema.equals(SCHEMA_WITH_IDS, check_metadata=True)
        assert expected.equals(actual)


def test_times_that_a_layout_keeps_in_an_object_array() -> None:
    """None in a NumPy array of times with dtype object becomes null."""
    batch = MessageBatch.from_messages(SOME)
    batch.timestamps = np.array([5, None, MAX_TIME], dtype=object)
    assert MessageBatch.from_messages(SOME).to_arrow().equals(batch.to_arrow())


def test_ids_need_a_stored_batch() -> None:
    """`ids=True` is refused for messages that aren't stored, because they have neither shard nor position."""
    batch = MessageBatch.from_messages(SOME)
    with pytest.raises(InvalidMessageError, match="once they are stored"):
        batch.to_arrow(ids=True)
    columns = {name: getattr(batch, name) for name in FIELDS}
    with pytest.raises(InvalidMessageError, match="once they are stored"):
        MessageBatch(**columns, positions=np.arange(3, dtype=np.uint64)).to_arrow(ids=True)


# --- in: which columns -------------------------------------------------------------------


def test_missing_columns_have_the_defaults_of_a_message() -> None:
    """A topic and a payload suffice, in either order; other columns get the defaults of `Message`."""
    arrow = pa.RecordBatch.from_pydict({"payload": [b"p", b"q"], "topic": ["a", "b"]})
    assert exactly([Message("a", b"p"), Message("b", b"q")]) == exactly(MessageBatch.from_arrow(arrow).to_messages())


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("name", ["topic", "payload"])
def test_a_topic_and_a_payload_are_needed(name: str, rows: int) -> None:
    """A record batch without topics or payloads is refused, even if it has no rows."""
    assert refused(record_batch(rows).drop_columns([name]), f"'{name}' is missing") is None


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("name", ["Topic", "topics", "time", "key", ""])
def test_unknown_columns_are_refused(name: str, rows: int) -> None:
    """Unknown columns are refused by name, even without rows, because their data would be lost."""
    assert (
        refused(record_batch(rows, **{name: pa.array([1] * rows)}), f"no column '{name}'; there are timestamp, ")
        is None
    )


def test_columns_that_come_twice_are_refused() -> None:
    """A repeated column is refused."""
    arrow = pa.RecordBatch.from_arrays(
        [pa.array(["a"]), pa.array([b"p"]), pa.array(["b"])], ["topic", "payload", "topic"]
    )
    refused(arrow, "one column 'topic', and not two")


def test_shard_and_position_are_passed_over() -> None:
    """Columns with ids are ignored, so that messages can be stored in another database."""
    arrow = record_batch(shard=pa.array([1, None]), position=pa.array(["x", "y"]))
    batch = MessageBatch.from_arrow(arrow)
    assert [Message("a", b"p")] * 2 == batch.to_messages()
    assert (batch.stored, batch.shards) == (False, None)


@pytest.mark.parametrize("name", ["topic", "client_id", "qos", "retain", "payload"])
def test_a_null_is_refused_by_its_row(name: str) -> None:
    """A null in a required column is refused with its row, also in slices and dictionaries."""
    field = SCHEMA.field(name)
    good = {"topic": "a", "client_id": "c", "qos": 1, "retain": True, "payload": b"p"}[name]
    array = pa.array([good, good, None, good, None], field.type)
    assert refused(record_batch(5, **{name: array}), f"{name} is null") == 2
    assert refused(record_batch(5, **{name: array}).slice(1), f"{name} is null") == 1
    assert refused(record_batch(5, **{name: array.dictionary_encode()}), f"{name} is null") == 2
    assert refused(record_batch(3, **{name: pa.nulls(3)}), f"{name} is null") == 0
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([good, None], field.type))
    assert refused(record_batch(2, **{name: hidden}), f"{name} is null") == 1


def test_times_and_properties_may_be_null() -> None:
    """Null times and null properties become None, also in a column of the null type."""
    for nulls in (pa.nulls(2), pa.nulls(2, pa.timestamp("ns"))):
        assert read("timestamp", nulls) == [None, None]
    for nulls in (pa.nulls(2), pa.nulls(2, PROPERTIES)):
        assert read("properties", nulls) == [None, None]


# --- in: which types ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("topic", pa.array(["a", "é"], pa.large_string()), ["a", "é"]),
        ("topic", pa.array(["a", "é"], pa.string_view()), ["a", "é"]),
        ("topic", pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        ("topic", pa.array(["a", "b"], pa.large_string()).dictionary_encode(), ["a", "b"]),
        ("topic", pa.array([b"a", "é".encode()]), ["a", "é"]),
        ("client_id", pa.array(["", "c"]).dictionary_encode(), ["", "c"]),
        ("payload", pa.array(["", "é"]), [b"", "é".encode()]),
        ("payload", pa.array(["", "é"], pa.large_string()), [b"", "é".encode()]),
        ("payload", pa.array([b"", b"\xff"], pa.large_binary()), [b"", b"\xff"]),
        ("payload", pa.array([b"", b"\xff"], pa.binary_view()), [b"", b"\xff"]),
        ("payload", pa.array([b"ab", b"\xff\0"], pa.binary(2)), [b"ab", b"\xff\0"]),
        ("payload", pa.array([b"a", b"b", b"a"]).dictionary_encode(), [b"a", b"b", b"a"]),
        ("qos", pa.array([0, 1, 2], pa.int64()), [0, 1, 2]),
        ("qos", pa.array([0, 1, 2], pa.uint8()), [0, 1, 2]),
        ("qos", pa.array([0.0, 1.0, 2.0]), [0, 1, 2]),
        ("qos", pa.array([2, 0, 2]).dictionary_encode(), [2, 0, 2]),
        ("retain", pa.array([0, 1], pa.int8()), [False, True]),
        ("retain", pa.array([True, False]), [True, False]),
        ("timestamp", pa.array([0, 5, None], pa.int64()), [0, 5, None]),
        ("timestamp", pa.array([0, 5_000, None], pa.timestamp("ns")), [0, 5, None]),
        ("timestamp", pa.array([0, 5_000], pa.timestamp("ns", "UTC")), [0, 5]),
        ("timestamp", pa.array([0, 5], pa.timestamp("us")), [0, 5]),
        ("timestamp", pa.array([0, 5], pa.timestamp("us", "Asia/Tokyo")), [0, 5]),
        ("timestamp", pa.array([0, 5], pa.timestamp("ms", "+02:00")), [0, 5_000]),
        ("timestamp", pa.array([0, 5], pa.timestamp("s")), [0, 5_000_000]),
        ("timestamp", pa.array([0, MAX_TIME], pa.timestamp("us", "UTC")), [0, MAX_TIME]),
        ("timestamp", pa.array(["1970-01-01T00:00:05Z"]), [5_000_000]),
    ],
    ids=lambda value: f"{value.type}" if isinstance(value, pa.Array) else None,
)
def test_what_casts_without_a_loss_is_taken(name: str, array: pa.Array, expected: list[Any]) -> None:
    """Columns that cast without loss are accepted; times without a zone are UTC, and integers are microseconds."""
    actual = read(name, array)
    assert expected == actual
    assert list(map(type, expected)) == list(map(type, actual))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("topic", pa.array([b"a", b"\xff"])),
        ("topic", pa.array([["a"], ["b"]])),
        ("client_id", pa.array([b"c", b"\xed\xa0\x80"])),
        ("payload", pa.array([1, 2])),
        ("payload", pa.array([[1], [2]])),
        ("qos", pa.array([1, 300])),
        ("qos", pa.array([1, 2**40])),
        ("qos", pa.array([1.0, 1.5])),
        ("qos", pa.array([1.0, float("nan")])),
        ("qos", pa.array(["1", "one"])),
        ("retain", pa.array(["yes", "maybe"])),
        ("retain", pa.array([b"\x01", b"\x00"])),
        ("timestamp", pa.array([1_000, 1_001], pa.timestamp("ns"))),
        ("timestamp", pa.array([1, 2**62], pa.timestamp("s"))),
        ("timestamp", pa.array([1.0, 2.0])),
        ("timestamp", pa.array([1, 2], pa.duration("us"))),
        ("timestamp", pa.array(["1970-01-01T00:00:05", "5"])),
        ("properties", pa.array([1, 2])),
        ("properties", pa.array(["{}", "{}"])),
        ("properties", pa.array([[("k", "v")], []], pa.map_(pa.string(), pa.string()))),
        ("properties", pa.array([{"payload_format_indicator": 300}, None])),
        ("properties", pa.array([{"content_type": b"\xff"}, None])),
        ("properties", pa.array([{"user_properties": [1]}, None])),
        ("properties", pa.array([{"user_properties": [{"name": "k", "value": None}]}, None])),
    ],
    ids=lambda value: f"{value.type}"[:60] if isinstance(value, pa.Array) else value,
)
def test_what_does_not_cast_is_refused(name: str, array: pa.Array) -> None:
    """Columns that can't be cast without loss are refused with their name and type."""
    assert refused(record_batch(len(array), **{name: array}), f"column '{name}' is ") is None


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [
        ("topic", pa.array(["a", "b", "a/#"]), "wildcard"),
        ("topic", pa.array(["a", "a", ""]), "at least one character"),
        ("topic", pa.array(["a", "a", "a\0"]), "NUL"),
        ("client_id", pa.array(["", "c", "c" * 65_536]), "65,536 bytes"),
        ("qos", pa.array([0, 1, 3]), "QoS"),
        ("qos", pa.array([0, 1, -1]), "QoS"),
        ("timestamp", pa.array([0, None, -1]), "timestamp"),
        ("timestamp", pa.array([0, None, MAX_TIME + 1]), "timestamp"),
        ("timestamp", pa.array([0, None, -1], pa.timestamp("s")), "timestamp"),
        ("properties", pa.array([None, None, {"payload_format_indicator": 2}]), "payload_format_indicator"),
        ("properties", pa.array([None, {}, {"response_topic": "a/#"}]), "response topic"),
    ],
)
def test_values_are_checked_as_those_of_messages(name: str, array: pa.Array, match: str) -> None:
    """Values from Arrow are validated like those of messages, and the error names the row."""
    assert refused(record_batch(3, **{name: array}), match) == 2


@pytest.mark.parametrize("name", ["topic", "client_id"])
def test_text_that_is_not_utf8_is_refused(name: str) -> None:
    """Columns of text that isn't valid UTF-8 are refused; Arrow doesn't check this."""
    array = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    refused(record_batch(**{name: array}), f"column '{name}' is not valid UTF-8")


# --- in: properties ------------------------------------------------------------------------

PLAIN = {name: getattr(FULL, name) for name in Properties.__struct_fields__}
PLAIN["user_properties"] = [{"name": name, "value": value} for name, value in FULL.user_properties]


def test_properties_as_other_programs_infer_them() -> None:
    """Properties with wider integers, nullable fields or larger offsets cast to the published struct."""
    assert read("properties", pa.array([PLAIN, None])) == [FULL, None]
    large = pa.struct([("content_type", pa.large_string()), ("correlation_data", pa.large_binary())])
    expected = Properties(content_type="t", correlation_data=b"d")
    assert [expected] == read("properties", pa.array([{"content_type": "t", "correlation_data": b"d"}], large))


def test_the_order_of_the_fields_of_properties_does_not_matter() -> None:
    """Fields of properties are found by name in any order, even in slices and in rows whose properties are null."""
    shuffled = pa.struct(sorted(PROPERTIES, key=lambda field: field.name))
    values = [PLAIN, None, {"content_type": "t"}, {}, None]
    expected = [FULL, None, Properties(content_type="t"), Properties(), None]
    array = pa.array(values, shuffled)
    assert expected == read("properties", array)
    assert expected[1:4] == read("properties", array.slice(1, 3))
    buffers = pa.StructArray.from_arrays(array.flatten(), fields=list(shuffled), mask=pa.array([True] * 5))
    assert read("properties", buffers) == [None] * 5


def test_absent_fields_of_properties_are_none() -> None:
    """Missing and null fields of properties become None, and null user properties become an empty tuple."""
    assert [Properties(content_type="t"), None] == read("properties", pa.array([{"content_type": "t"}, None]))
    nulls = dict.fromkeys(PLAIN)
    assert [Properties()] == read("properties", pa.array([nulls], PROPERTIES))


def test_unknown_fields_of_properties_are_refused() -> None:
    """Unknown fields of properties are refused, because a cast by Arrow would silently drop them."""
    for plain in (PLAIN | {"topic_alias": 1}, {"topic_alias": 1}, {"Content_Type": "t"}):
        refused(record_batch(properties=pa.array([plain, None])), "no field in properties '(topic_alias|Content_Type)'")


def test_fields_of_properties_that_come_twice_are_refused() -> None:
    """A repeated field of properties is refused."""
    twice = pa.StructArray.from_arrays([pa.array(["s"]), pa.array(["t"])], ["content_type", "content_type"])
    refused(record_batch(1, properties=twice), "and not two")


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ([None], "user property is null"),
        ([{"name": "k", "value": "v"}, None], "user property is null"),
        ([{"name": None, "value": "v"}], "user property is a str"),
        ([{"name": "k", "value": None}], "user property is a str"),
        ([{"name": "k\0", "value": "v"}], "NUL"),
    ],
)
def test_bad_user_properties_are_refused_by_their_row(pairs: list[Any], match: str) -> None:
    """Invalid user properties are refused with their row; Arrow checks neither nulls nor strings in nested fields."""
    array = pa.array([None, PLAIN, {"user_properties": pairs}], PROPERTIES)
    assert refused(record_batch(3, properties=array), match) == 2


# --- in: from files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"read_dictionary": ["topic", "client_id"]}, {"columns": ["payload", "topic"]}],
    ids=["plain", "dictionaries", "two columns"],
)
@pytest.mark.parametrize("with_schema", [True, False], ids=["arrow schema", "parquet schema"])
def test_messages_come_back_from_parquet(tmp_path: Path, options: dict[str, Any], with_schema: bool) -> None:
    """Messages can be read from Parquet with or without Arrow's schema, with dictionaries, or with fewer columns."""
    rows = SOME * 100
    path = tmp_path / "messages.parquet"
    pq.write_table(pa.Table.from_batches([MessageBatch.from_messages(rows).to_arrow()]), path, store_schema=with_schema)
    batches = pq.read_table(path, **options).to_batches(max_chunksize=64)
    expected = [Message(row.topic, row.payload) for row in rows] if "columns" in options else rows
    back = MessageBatch.concat([MessageBatch.from_arrow(batch) for batch in batches]).to_messages()
    assert exactly(expected) == exactly(back)


def test_stored_messages_come_back_from_parquet(tmp_path: Path) -> None:
    """Ids above 63 bits can be stored in Parquet, and are ignored when the messages are stored again."""
    path = tmp_path / "stored.parquet"
    arrow = stored(SOME).to_arrow(ids=True)
    pq.write_table(pa.Table.from_batches([arrow]), path)
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA_WITH_IDS)
    assert arrow["position"].to_pylist() == table["position"].to_pylist()
    (batch,) = table.to_batches()
    assert exactly(stored(SOME).to_messages()) == exactly(MessageBatch.from_arrow(batch).to_messages())


def test_messages_come_back_from_an_ipc_stream() -> None:
    """Messages can be read from an Arrow IPC stream, the format for transfer between processes."""
    sink = pa.BufferOutputStream()
    arrow = MessageBatch.from_messages(SOME).to_arrow()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(arrow)
        writer.write_batch(arrow.slice(1))
    batches = list(pa.ipc.open_stream(sink.getvalue()))
    back = [message for batch in batches for message in MessageBatch.from_arrow(batch).to_messages()]
    assert exactly(SOME + SOME[1:]) == exactly(back)
