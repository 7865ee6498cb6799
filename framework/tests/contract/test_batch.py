"""Batches return the messages that they were made of, and refuse invalid ones."""

from __future__ import annotations

import enum
import itertools
import re
import tracemalloc
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract import validation
from topicstore.contract.batch import FIELDS, MessageBatch
from topicstore.contract.columns import Coded, Column, Constant, to_list
from topicstore.contract.errors import InvalidMessageError, MessageTooLargeError
from topicstore.contract.model import MAX_PAYLOAD, Message, MessageId, Properties
from topicstore.contract.positions import MAX_TIME
from topicstore_conformance.faults.threads import together

from .conftest import exactly, lists

GOOD = Message("a/b", b"1", "c", 1, retain=True, timestamp=5, properties=Properties(content_type="t"))


def changed(field: str, value: Any) -> Message:
    return msgspec.structs.replace(GOOD, **{field: value})


def stored(rows: list[Message]) -> MessageBatch:
    """Return a batch in the form in which a shard returns batches."""
    return formed(rows, "stored")


# --- there and back -------------------------------------------------------------------


@settings(max_examples=300)
@given(lists)
def test_messages_come_back_from_a_batch(rows: list[Message]) -> None:
    """Messages converted to a batch and back have the same values and types."""
    batch = MessageBatch.from_messages(rows)
    assert len(rows) == len(batch)
    assert exactly(rows) == exactly(batch.to_messages())
    assert sum(len(row.payload) for row in rows) == batch.payload_bytes()


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda rows: (row for row in rows)])
def test_any_iterable_of_messages_will_do(kind: Any) -> None:
    """A batch can be made from any iterable, which is read once."""
    rows = [GOOD, changed("qos", 2)]
    assert rows == MessageBatch.from_messages(kind(rows)).to_messages()
    assert MessageBatch.from_messages(kind([])).to_messages() == []


def test_an_error_inside_a_generator_stays_what_it_is() -> None:
    """An AttributeError that the caller's generator raises is not mistaken for a bad message."""

    def rows() -> Any:
        yield GOOD
        raise AttributeError("of the caller's own")

    with pytest.raises(AttributeError, match="of the caller's own"):
        MessageBatch.from_messages(rows())


def test_a_batch_does_not_change_with_the_list_it_was_made_from() -> None:
    """A batch is unaffected by later changes of the list that it was made from."""
    rows = [GOOD, changed("topic", "b")]
    batch = MessageBatch.from_messages(rows)
    rows.clear()
    assert [message.topic for message in batch.to_messages()] == ["a/b", "b"]


@pytest.mark.parametrize(
    ("field", "name"),
    [(field, name) for field, name in zip(Message.__struct_fields__, FIELDS, strict=True) if field[0] != "p"],
)
def test_equal_values_become_a_constant(field: str, name: str) -> None:
    """A column of equal values becomes a `Constant` with a value of the same type."""
    column = getattr(MessageBatch.from_messages([GOOD] * 3), name)
    assert isinstance(column, Constant)
    assert (type(getattr(GOOD, field)), getattr(GOOD, field)) == (type(column.value), column.value)


class Level(enum.StrEnum):
    """An application's enumeration of topics."""

    SPEED = "fleet/speed"


def test_topics_from_an_enumeration() -> None:
    """A subclass of str is accepted, and stored as its text."""
    for rows in (
        [Message(Level.SPEED, b"")],
        [Message("x", b""), Message(Level.SPEED, b""), Message("fleet/speed", b"")],
    ):
        assert rows == MessageBatch.from_messages(rows).to_messages()


# --- what is refused --------------------------------------------------------------------

BAD: list[tuple[str, Any, str]] = [
    *(("topic", value, "wildcard") for value in ("#", "+", "a/#", "a/+/b", "c++")),
    ("topic", "", "at least one character"),
    ("topic", "a\0", "NUL"),
    ("topic", "\ud800", "not valid Unicode"),
    ("topic", "a" * 65_536, "65,536 bytes"),
    ("topic", "é" * 32_768, "65,536 bytes"),
    *(("topic", value, "is a str") for value in (None, b"a", 1, True, ("a",), ["a"], {"a": 1}, bytearray(b"a"))),
    *(("payload", value, "is bytes") for value in ("text", None, 1, [1], bytearray(b"a"), memoryview(b"a"))),
    ("client_id", "c\0", "NUL"),
    ("client_id", "\udfff", "not valid Unicode"),
    ("client_id", "c" * 65_536, "65,536 bytes"),
    *(("client_id", value, "is a str") for value in (None, b"c", 1, ["c"], {"c"})),
    *(("qos", value, "QoS is") for value in (3, -1, True, False, 1.0, "1", None, [1], {}, 10**5000, np.int64(1))),
    *(("retain", value, "retain is") for value in (0, 1, None, "true", 1.0, [True], np.True_)),
    *(("timestamp", value, "a timestamp is") for value in (-1, MAX_TIME + 1, 2**64, 10**5000, -(10**5000))),
    *(("timestamp", value, "a timestamp is") for value in (1.0, 5.0, float("nan"), True, False, "5", [5], np.int64(5))),
    ("timestamp", datetime(2024, 1, 1, tzinfo=UTC), "a timestamp is"),
    *(("properties", value, "None or Properties") for value in ({}, (), "x", 0, False, {"content_type": "t"})),
]
BAD_PROPERTIES: list[tuple[str, Any, str]] = [
    *(("payload_format_indicator", value, "0 to 1") for value in (2, -1, True, 1.0, "1", 10**5000)),
    *(("message_expiry_interval", value, "0 to 4294967295") for value in (2**32, -1, False, 1.5, "60", 10**5000)),
    ("content_type", "t\0", "NUL"),
    ("content_type", "\ud800", "not valid Unicode"),
    ("content_type", "t" * 65_536, "65,536 bytes"),
    *(("content_type", value, "is a str") for value in (b"t", 1, ["t"])),
    *(
        ("response_topic", value, "response topic")
        for value in ("", "a/#", "+", "a\0", "\udc00", "a" * 65_536, b"a", 1)
    ),
    *(("correlation_data", value, "correlation data") for value in ("text", 1, bytearray(b"a"), bytes(65_536), [1])),
    *(("user_properties", value, "tuple of pairs") for value in (None, [], [("k", "v")], {"k": "v"}, "kv", 1)),
    *(("user_properties", (value,), "is a pair") for value in (("k",), ("k", "v", "w"), ["k", "v"], "kv", None, ())),
    *(("user_properties", (("k", "v"), value), "user property") for value in (("k", 1), (None, "v"), (b"k", "v"))),
    *(("user_properties", (value,), "user property") for value in (("\0", "v"), ("k", "\ud800"), ("k" * 65_536, "v"))),
]


def named(case: tuple[str, Any, str]) -> str:
    field, value, _ = case
    shown = (
        f"int-{value.bit_length()}-bits"
        if isinstance(value, int) and abs(value) > 2**64
        else repr(value).partition(" at 0x")[0][:24]
    )
    return f"{field}={shown}"


def refused(rows: list[Any], match: str) -> InvalidMessageError:
    with pytest.raises(InvalidMessageError, match=match) as caught:
        MessageBatch.from_messages(rows)
    assert len(str(caught.value)) < 1_000
    return caught.value


@pytest.mark.parametrize("case", BAD, ids=named)
def test_bad_values_are_refused_by_name(case: tuple[str, Any, str]) -> None:
    """A bad value anywhere in a batch is refused, and the error has the index of the first bad message."""
    field, value, match = case
    bad = changed(field, value)
    for index, rows in ((0, [bad]), (0, [bad, GOOD]), (2, [GOOD, GOOD, bad, GOOD, bad]), (0, [bad] * 3)):
        error = refused(rows, match)
        assert index == error.index
        assert f"message {index} of the batch: {error.reason}" == str(error)


@pytest.mark.parametrize("case", BAD_PROPERTIES, ids=named)
def test_bad_properties_are_refused_by_name(case: tuple[str, Any, str]) -> None:
    """Properties that MQTT 5 can't encode are refused."""
    field, value, match = case
    bad = changed("properties", msgspec.structs.replace(Properties(content_type="t"), **{field: value}))
    for index, rows in ((0, [bad]), (2, [GOOD, changed("properties", None), bad]), (1, [GOOD, bad, bad])):
        assert index == refused(rows, match).index


def test_the_refusal_of_a_datetime_says_how_to_write_it() -> None:
    """The error for a `datetime` contains an expression for its timestamp, exact to the microsecond."""
    when = datetime(2099, 12, 31, 23, 59, 59, 999_999, UTC)
    reason = refused([changed("timestamp", when)], "microseconds since the epoch").reason
    (expression,) = re.findall("write (.*) for a datetime", reason)
    (stored,) = MessageBatch.from_messages([changed("timestamp", eval(expression, {"when": when}))]).to_messages()
    assert (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) == stored.timestamp


def test_equal_values_of_another_type_are_refused() -> None:
    """Values that equal a valid value but have another type, such as True for 1, are refused even after that value."""
    for field, goods in (("qos", (0, 1)), ("retain", (False, True)), ("timestamp", (0, 1))):
        for good, bad in itertools.product(goods, (0, 1, False, True, 0.0, -0.0, 1.0)):
            if good == bad and type(good) is not type(bad):
                for index, values in (
                    (1, [good, bad]),
                    (0, [bad, good]),
                    (2, [good, good, bad, good]),
                    (0, [bad, bad]),
                ):
                    assert index == refused([changed(field, value) for value in values], "not").index


def test_a_payload_may_be_as_large_as_a_packet_and_no_larger() -> None:
    """A payload of `MAX_PAYLOAD` bytes is accepted; a longer one raises `MessageTooLargeError`."""
    largest = Message("a", bytes(MAX_PAYLOAD))
    assert MessageBatch.from_messages([largest]).payload_bytes() == MAX_PAYLOAD
    with pytest.raises(MessageTooLargeError, match="268,435,456 bytes") as caught:
        MessageBatch.from_messages([GOOD, largest, Message("a", bytes(MAX_PAYLOAD + 1))])
    assert caught.value.index == 2


@pytest.mark.parametrize(
    "properties",
    [
        Properties(0, 0, "", "/", b"", ()),
        Properties(1, 2**32 - 1, "t" * 65_535, "a" * 65_535, bytes(65_535), (("", ""), ("k" * 65_535, "v" * 65_535))),
    ],
    ids=["least", "most"],
)
def test_properties_at_their_limits(properties: Properties) -> None:
    """Properties with the smallest and largest allowed values are accepted."""
    rows = [changed("properties", properties)]
    assert exactly(rows) == exactly(MessageBatch.from_messages(rows).to_messages())


@pytest.mark.parametrize(
    "row",
    [None, "a", b"a", 1, {"topic": "a", "payload": b""}, ("a", b""), Message, object()],
    ids=lambda row: type(row).__name__,
)
def test_what_is_no_message_is_refused_by_name(row: Any) -> None:
    """A row that isn't a `Message` is refused with its index."""
    for index, rows in ((0, [row]), (2, [GOOD, GOOD, row, GOOD, row]), (1, (item for item in [GOOD, row]))):
        assert index == refused(rows, "not a Message|is a str").index


@pytest.mark.parametrize("rows", [None, 1, GOOD, object()], ids=lambda rows: type(rows).__name__)
def test_what_is_no_iterable_is_a_type_error(rows: Any) -> None:
    """An argument that isn't iterable, such as a single message, raises a `TypeError`."""
    with pytest.raises(TypeError, match="not iterable"):
        MessageBatch.from_messages(rows)


def test_the_first_bad_field_is_named_before_the_first_bad_row() -> None:
    """Fields are validated one after another, so an error in an earlier field precedes one in an earlier row."""
    rows = [changed("qos", 3), changed("topic", "#")]
    assert refused(rows, "wildcard").index == 1


# --- the memory of what was good ------------------------------------------------------


def test_a_bad_topic_is_refused_however_many_good_ones_came_before() -> None:
    """A bad topic is refused even after many good ones were cached as valid.

    Topics and client ids are cached separately, and a refused batch is not cached.
    """
    good = Message("known/topic", b"", "known client")
    for _ in range(3):
        MessageBatch.from_messages([good, Message("known/other", b"", "known client")])
        for bad in ("known/#", "known/topic\0", "known/+", "#", ""):
            assert refused([good, Message(bad, b"", "known client")], "topic").index == 1
            assert refused([Message(bad, b"")] * 2, "topic").index == 0
        for bad in ("known client\0", "\ud800"):
            assert refused([good, Message("known/topic", b"", bad)], "client id").index == 1
    rows = [Message(f"refused/{number}", b"") for number in range(5)] + [Message("refused/#", b"")]
    for _ in range(3):
        assert refused(rows, "wildcard").index == 5
    MessageBatch.from_messages([Message("a", b"", "wild/+/#")] * 2)
    assert refused([Message("wild/+/#", b"")], "wildcard").index == 0


@given(
    topic=st.sampled_from(("a/b", "", "a/#", 1)),
    payload=st.sampled_from((b"x", b"", "x", None)),
    client_id=st.sampled_from(("c", "", "c\0", None)),
    qos=st.sampled_from((0, 1, 2, 3, -1, True, 1.0)),
    retain=st.sampled_from((False, True, 0, None)),
    timestamp=st.sampled_from((None, None, 0, MAX_TIME, -1, True)),
    properties=st.sampled_from((None, None, Properties(), Properties(content_type="\0"), {})),
)
def test_a_message_alone_is_checked_as_among_others(**fields: Any) -> None:
    """A batch of one message has the values of a larger batch of the same message, or raises the same error."""
    MessageBatch.from_messages([Message("a/b", b"", client) for client in ("c", "")])  # caches the names
    message, outcomes = Message(**fields), []
    for rows in ([message], [message, message]):
        try:
            batch = MessageBatch.from_messages(rows)
            outcomes.append([type(getattr(batch, name)[0]) for name in FIELDS] + batch.to_messages()[:1])
        except InvalidMessageError as error:
            outcomes.append([type(error), str(error)])
    assert outcomes[0] == outcomes[1]


def known_topics() -> validation._Known:
    return validation._Known(validation._check_topic, "\0+#")


def test_topics_of_many_rows_are_coded() -> None:
    """A column of many topics is `Coded`, with one list for all batches; one of equal topics is `Constant`."""
    topics = [f"coded/{number % 40}" for number in range(100)]
    first, again = (MessageBatch.from_messages([Message(topic, b"") for topic in topics]) for _ in range(2))
    assert isinstance(first.topics, Coded)
    assert isinstance(again.topics, Coded)
    assert first.topics.texts is again.topics.texts
    assert topics == to_list(first.topics) == to_list(again.topics)
    assert isinstance(MessageBatch.from_messages([Message("coded/1", b"")] * 100).topics, Constant)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), max_size=30), st.sampled_from([500, 4_000, 1 << 20])
)
def test_columns_have_the_texts_that_were_given(batches: list[tuple[int, int]], most: int) -> None:
    """Strings are returned unchanged, in batches of any size, however often strings are evicted from the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "_KNOWN_BYTES", most)
        known, columns = known_topics(), []
        for start, rows in batches:
            topics = [f"t/{number}" for number in range(start, start + rows)]
            columns.append((topics, known.check(topics)))
            assert known.memory <= most
        for topics, column in columns:
            assert topics == to_list(column)


class OtherText(str):
    """A subclass of str, whose objects equal topics."""


def test_texts_of_a_subclass_are_not_remembered() -> None:
    """Topics of a subclass of str are accepted as they are; later batches with equal plain strings contain only str."""
    topics = [f"typed/{number}" for number in range(50)]
    for _ in range(2):
        assert topics == to_list(
            MessageBatch.from_messages([Message(OtherText(topic), b"") for topic in topics]).topics
        )
        column = MessageBatch.from_messages([Message(topic, b"") for topic in topics]).topics
        assert {str} == set(map(type, to_list(column)))


def test_the_memory_of_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of checked topics stays within its limit of bytes, and bad topics are refused afterwards."""
    monkeypatch.setattr(validation, "_KNOWN_BYTES", 8 << 20)
    known = known_topics()
    tracemalloc.start()
    for start in [*range(0, 200_000, 7_000)] * 2:
        known.check([f"t/{number}" for number in range(start, start + 7_000)])
        assert known.memory <= 8 << 20
    known.check([f"u/{number}" for number in range(70_000)])
    for number in range(600):
        known.check([f"{number}/".ljust(65_000, "x"), "t"])
        assert known.memory <= 8 << 20
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 10 << 20
    with pytest.raises(InvalidMessageError) as caught:
        known.check(["t/1", "t/2", "t/#"])
    assert caught.value.index == 2


def test_the_counted_bytes_are_those_that_texts_take() -> None:
    """The bytes that the cache of checked topics counts are those that the topics take."""
    known = known_topics()
    tracemalloc.start()
    for start in range(0, 90_000, 1_000):
        known.check([f"counted/topic-{number}/x" for number in range(start, start + 1_000)])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.7 * known.memory < taken < 1.1 * known.memory


def test_topics_in_use_stay_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics that recur stay in the cache of checked topics, however many other topics occur only once."""
    monkeypatch.setattr(validation, "_KNOWN_BYTES", 1 << 20)
    known = known_topics()
    often = [f"often/{number}" for number in range(1_000)]
    lacking = 0
    for turn in range(60):
        lacking += sum(text not in known._checked.codes for text in often)
        known.check(often)
        known.check([f"once/{turn}/{number}" for number in range(500)])
    assert len(often) == lacking


def test_topics_that_come_once_are_soon_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a flood of topics that occur only once, few are cached; once topics recur, they are cached again."""
    monkeypatch.setattr(validation, "_KNOWN_BYTES", 1 << 20)
    known, held = known_topics(), []
    for turn in range(300):
        known.check([f"once/{turn}/{number}" for number in range(500)])
        held.append(known.memory)
    assert held.count(0) > 150
    often = [f"often/{number}" for number in range(1_000)]
    for _ in range(60):
        known.check(often)
    assert isinstance(known.check(often), Coded)


def test_threads_share_the_memory_of_texts() -> None:
    """Threads can validate batches at the same time: good ones are accepted, and bad ones are refused."""
    wrong: list[str] = []

    def write(writer: int) -> None:
        for turn in range(60):
            rows = [Message(f"thread/{turn}/{number}", b"", f"{writer}") for number in range(200)]
            MessageBatch.from_messages(rows)
            try:
                MessageBatch.from_messages([*rows, Message(f"thread/{turn}/#", b"")])
                wrong.append(f"{writer} {turn}")
            except InvalidMessageError as error:
                wrong.extend([] if error.index == 200 else [str(error)])

    together(*(partial(write, writer) for writer in range(4)))
    assert wrong == []


def test_texts_that_another_thread_has_checked_meanwhile() -> None:
    """Texts that another thread adds between the lookup and the check are accepted, and have one number."""

    class Beaten(validation._Checked):
        def coded(self, values: list[str]) -> Column:
            self.add([text for text in values if text not in self.codes], 0)
            raise KeyError(values[0])

    known, topics = known_topics(), [f"t/{number}" for number in range(40)]
    known._checked = Beaten([])
    assert topics == to_list(known.check(topics))
    assert list(range(40)) == [int.from_bytes(code, "little") for code in known._checked.codes.values()]


# --- slicing, taking, joining -----------------------------------------------------------


def formed(rows: list[Message], form: str, first: int = 2**63, shard: int = 3) -> MessageBatch:
    """Return a batch whose columns, except for properties, are of one form that layouts return.

    New messages have no positions; the times of stored ones are an array.
    """
    positions, times = np.arange(first, first + len(rows), dtype=np.uint64), [row.timestamp or 0 for row in rows]
    if form in ("new", "stored"):
        batch = MessageBatch.from_messages(rows)
        return batch if form == "new" else batch.placed(positions, np.array(times, dtype=np.int64), shard)
    kinds = {
        "topic": (object, pa.string()),
        "payload": (object, pa.binary()),
        "client_id": (object, pa.string()),
        "qos": (np.uint8, pa.int8()),
        "retain": (np.bool_, pa.bool_()),
        "timestamp": (object, pa.int64()),
    }
    columns = []
    for field, (numpy_kind, arrow_kind) in kinds.items():
        values = [getattr(row, field) for row in rows]
        columns.append(np.array(values, numpy_kind) if form == "numpy" else pa.array(values, arrow_kind))
    shards = Constant(shard, len(rows))
    return MessageBatch(*columns, [row.properties for row in rows], positions=positions, shards=shards)


@given(st.lists(lists, min_size=1, max_size=4), st.booleans(), st.data())
def test_parts_and_joins_are_those_of_the_messages(parts: list[list[Message]], new: bool, data: st.DataObject) -> None:
    """Slicing, taking rows and concatenating work on batches as on lists of messages, in all forms of columns."""
    forms = ["new"] if new else data.draw(st.lists(st.sampled_from(["stored", "numpy", "arrow"]), min_size=1))
    batches = [
        formed(rows, forms[number % len(forms)], 2**63 + 1_000 * number, number % 2)
        for number, rows in enumerate(parts)
    ]
    batch = MessageBatch.concat(batches)
    every = [row for each in batches for row in each.to_messages()]
    ids = None if new else [id_ for each in batches for id_ in each.ids()]
    cut = slice(data.draw(st.integers(-9, 9)), data.draw(st.integers(-9, 9) | st.none()))
    indices = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=12)) if every else []
    for made, of in (
        (batch, range(len(every))),
        (batch[cut], range(len(every))[cut]),
        (batches[0][cut], range(len(parts[0]))[cut]),
        (batch.take(np.array(indices, dtype=np.intp)), indices),
    ):
        assert len(of) == len(made)
        assert exactly([every[index] for index in of]) == exactly(made.to_messages())
        assert ids is None or [ids[index] for index in of] == made.ids()
    if "stored" not in forms:
        assert exactly([row for rows in parts for row in rows]) == exactly(every)


def test_a_batch_is_sliced_in_steps_of_one_and_never_indexed() -> None:
    """Indexing a batch, slicing it with a step, or iterating over it raises an error that names the alternative."""
    batch = MessageBatch.from_messages([GOOD] * 3)
    with pytest.raises(InvalidMessageError, match="steps of one"):
        batch[::2]
    with pytest.raises(TypeError, match="to_messages"):
        batch[0]  # type: ignore[index]
    with pytest.raises(TypeError, match="to_messages"):
        list(batch)  # type: ignore[call-overload]


def test_a_whole_slice_is_the_batch_itself() -> None:
    """A slice of the whole batch returns the same object, without a copy."""
    batch = MessageBatch.from_messages([GOOD] * 3)
    assert batch is batch[:]
    assert batch is batch[0:3]


def test_nothing_joins_to_nothing() -> None:
    """Empty batches concatenate to an empty batch, and add nothing to other batches."""
    batch = stored([GOOD])
    assert len(MessageBatch.concat([])) == 0
    assert len(MessageBatch.concat([MessageBatch.empty(), MessageBatch.empty()])) == 0
    assert batch is MessageBatch.concat([MessageBatch.empty(), batch, MessageBatch.empty()])


# --- replacing, placing, ids ----------------------------------------------------------------


def test_replaced_columns_are_checked() -> None:
    """Columns passed to `replace` are validated like those of a new batch."""
    batch = stored([GOOD] * 3)
    for name, column in (
        ("topics", ["a", "#", "a"]),
        ("payloads", [b"", "text", b""]),
        ("client_ids", ["", "\0", ""]),
        ("qos", [0, 3, 0]),
        ("qos", np.array([0, 3, 0], dtype=np.uint8)),
        ("qos", pa.array([0, None, 0], pa.int8())),
        ("retain", [True, 1, True]),
        ("timestamps", [0, -1, 0]),
        ("properties", [None, {}, None]),
    ):
        with pytest.raises(InvalidMessageError) as caught:
            batch.replace(**{name: column})
        assert caught.value.index == 1
    with pytest.raises(InvalidMessageError) as caught:
        batch.replace(topics=Constant("#", 3))
    assert caught.value.index == 0


@pytest.mark.parametrize("form", [list, lambda v: np.array(v, dtype=np.uint8), lambda v: pa.array(v, pa.int8())])
def test_replaced_columns_take_the_place_of_the_old(form: Any) -> None:
    """`replace` returns a new batch with the same positions and other columns; the original is unchanged."""
    batch = stored([GOOD] * 3)
    new = batch.replace(qos=form([0, 1, 2]))
    assert exactly([changed("qos", qos) for qos in (0, 1, 2)]) == exactly(new.to_messages())
    assert batch.ids() == new.ids()
    assert exactly([GOOD] * 3) == exactly(batch.to_messages())


def test_replacing_needs_known_names_and_equal_lengths() -> None:
    """`replace` refuses unknown columns and columns of another length."""
    batch = MessageBatch.from_messages([GOOD] * 3)
    for name in ("topic", "positions", "shards", "nothing"):
        with pytest.raises(InvalidMessageError, match=f"no column '{name}'"):
            batch.replace(**{name: [1, 2, 3]})
    for column in ([], [b""], [b""] * 4, Constant(b"", 0), pa.array([], pa.binary())):
        with pytest.raises(InvalidMessageError, match="different lengths"):
            batch.replace(payloads=column)


def test_a_stored_batch_names_its_messages() -> None:
    """`ids` returns shards and positions as Python integers."""
    expected = [MessageId(3, 2**63), MessageId(3, 2**63 + 1)]
    ids = stored([GOOD, GOOD]).ids()
    assert expected == ids
    assert {int} == {type(value) for one in ids for value in msgspec.structs.astuple(one)}


def test_messages_without_a_position_have_no_id() -> None:
    """`ids` of messages that aren't stored is refused."""
    with pytest.raises(InvalidMessageError, match="once they are stored"):
        MessageBatch.from_messages([GOOD]).ids()


def test_messages_have_positions_once_they_are_stored() -> None:
    """`stored` says whether a batch has positions; without them, access to `positions` is refused."""
    batch = MessageBatch.from_messages([GOOD, GOOD])
    assert (batch.stored, stored([GOOD]).stored) == (False, True)
    with pytest.raises(InvalidMessageError, match="once they are stored"):
        _ = batch.positions
    placed = batch.placed(np.array([4, 5], dtype=np.uint64), [7, 7], 2)
    for part in (placed, placed[:1], placed.take(np.array([0])), placed.replace(qos=[1, 1])):
        assert part.stored
        assert part.positions.tolist() == [4, 5][: len(part)]


def test_the_position_of_one_message_may_be_a_number() -> None:
    """A message whose position is given as an integer equals one whose position is given as an array."""
    batch, time = MessageBatch.from_messages([GOOD]), [7]
    number, array = (batch.placed(position, time, 2) for position in (4 << 60, np.array([4 << 60], dtype=np.uint64)))
    assert number.stored
    assert (4 << 60, 4 << 60) == number.span == array.span
    assert array.positions.dtype == number.positions.dtype
    for one in (batch.placed(4 << 60, time, 2), number):  # before and after the array was made
        assert array.ids() == one.ids()
        assert array.to_arrow(ids=True) == one.to_arrow(ids=True)
        assert array.positions.tolist() == one[:1].positions.tolist() == one.replace(qos=[1]).positions.tolist()
        assert [4 << 60, 4 << 60] == MessageBatch.concat([one, array]).positions.tolist()
    with pytest.raises(InvalidMessageError, match="once they are stored"):
        _ = batch.span


def test_stored_and_other_messages_dont_join() -> None:
    """Stored and new messages can't be concatenated, because some rows would have no position."""
    batches = [stored([GOOD]), MessageBatch.from_messages([GOOD])]
    for joined in (batches, batches[::-1]):
        with pytest.raises(InvalidMessageError, match="some of the messages are stored"):
            MessageBatch.concat(joined)


def test_an_empty_batch_is_empty() -> None:
    """An empty batch has no rows, messages or bytes, nor has any slice of it."""
    batch = MessageBatch.empty()
    assert (len(batch), batch.to_messages(), batch.payload_bytes()) == (0, [], 0)
    assert (batch.ids(), batch.positions.tolist()) == ([], [])
    assert batch[0:5].to_messages() == []
    assert batch.take(np.array([], dtype=np.intp)).to_messages() == []
    assert "<MessageBatch of 0>" in repr(batch)
