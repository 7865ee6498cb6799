"""Text as times: implausible times are refused, and printed times can be parsed."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.positions import MAX_TIME, to_microseconds
from topicstore.contract.times import format_time, instant, parse_timestamp, parse_when, suspected_unit

NOW = 1_750_000_000_123_456
HOUR = 3_600_000_000

times = st.integers(0, MAX_TIME)
moments = st.integers(31_536_000_000_000, 7_258_118_400_000_000).map(
    lambda time: datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time)
)
zones = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(times)
def test_what_is_shown_can_be_written_again(time: int) -> None:
    assert parse_timestamp(format_time(time)) == time


@given(moments, zones)
def test_a_zone_counts(moment: datetime, zone: timezone) -> None:
    assert parse_timestamp(moment.astimezone(zone).isoformat()) == to_microseconds(moment)


@given(moments)
def test_without_a_zone_it_is_utc(moment: datetime) -> None:
    assert parse_timestamp(moment.replace(tzinfo=None).isoformat()) == to_microseconds(moment)


@given(st.integers(100_000_000, MAX_TIME))
def test_a_long_number_is_microseconds(time: int) -> None:
    assert parse_timestamp(str(time)) == time


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from("smhdw")), min_size=1, max_size=4))
def test_relative_times_add_up(parts: list[tuple[int, str]]) -> None:
    unit = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
    text = "-" + "".join(f"{count}{name}" for count, name in parts)
    assert parse_when(text, NOW) == NOW - sum(count * unit[name] for count, name in parts) * 1_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW),
        ("-2h", NOW - 2 * HOUR),
        ("1970-01-01", 0),
        ("19700102", 24 * HOUR),
        ("1970-01-01T01:00:00Z", HOUR),
        ("1970-01-01 00:00:00.000001", 1),
        ("1969-12-31", -24 * HOUR),
        ("@1700000000", 1_700_000_000_000_000),
        ("@1700000000.25", 1_700_000_000_250_000),
        ("@0", 0),
    ],
)
def test_examples(text: str, expected: int) -> None:
    assert parse_when(text, NOW) == expected


def test_an_error_names_no_form_that_is_refused_too() -> None:
    """An error lists only forms that its function accepts: relative times and ``@`` are not for files."""
    for text in ("now", "-2h", "@1700000000", "someday"):
        with pytest.raises(ValueError, match="is not a time") as refused:
            parse_timestamp(text)
        assert "2025-06-01T12:00" in str(refused.value)
        for form in ("-2h,", "now,", "or @"):
            assert form not in str(refused.value)
    assert parse_timestamp("2025-06-01T12:00") == parse_when("2025-06-01T12:00", NOW)
    with pytest.raises(ValueError, match="-2h, now, or @ with seconds"):
        parse_when("someday", NOW)
    with pytest.raises(ValueError, match="is finer than microseconds"):
        parse_when("2025-06-01T12:00:00.1234567", NOW)


@given(st.text(max_size=12) | st.text("0123456789-+:.TZWsmhdw ", max_size=24))
def test_whatever_is_written_it_is_a_time_or_refused_by_one_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_when(text, NOW), int)


@pytest.mark.parametrize("text", ["1700000000", "1700000000000", "99999999999999", "123456789"])
def test_numbers_that_are_hardly_microseconds(text: str) -> None:
    """A number that is probably seconds or milliseconds is refused from a command line, and accepted from a file."""
    with pytest.raises(ValueError, match=r"is not a time: as microseconds it lies in 197[0-3]; seconds have an @"):
        parse_when(text, NOW)
    assert parse_timestamp(text) == int(text)


@pytest.mark.parametrize(
    ("timestamp", "unit"),
    [
        (0, None),
        (1_700_000_000, "seconds"),
        (1_700_000_000_000, "milliseconds"),
        (1_700_000_000_000_000, None),
        (20_231_114_221_320, "a date written as a number"),
        (202_311_142_213, "a date written as a number"),
        (20_231_114, "a date written as a number"),
        (20_231_314_221_320, None),
        (99_231_114_221_320, None),
        (999_999_999, None),
        (5_000_000_000, None),
    ],
)
def test_other_units_are_suspected(timestamp: int, unit: str | None) -> None:
    assert suspected_unit(timestamp) == unit


@pytest.mark.parametrize(
    "text",
    [
        "2023-11-14T22:13:20.123456789Z",
        "@",
        "@-1",
        "@1.",
        "@1.0000001",
        "",
        "-",
        "-2",
        "2h",
        "-2y",
        "yesterday",
        "12345678",
        "--2h",
        "-1h ",
        "٣٣٣٣٣٣٣٣٣",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time|is finer than microseconds"):
        parse_when(text, NOW)


LATELY = 1_700_000_000_000_000


def moment(when: object, **arguments: bool) -> int:
    return instant(when, lambda: LATELY, **arguments)  # type: ignore[arg-type]


def test_a_time_to_read_from_is_written_in_many_ways() -> None:
    """A time can be given as microseconds, a datetime, a negative timedelta, or text."""
    hour = 3_600_000_000
    assert [LATELY, 0, 5] == [moment(when) for when in (LATELY, 0, 5)]
    assert LATELY == moment(datetime.fromtimestamp(LATELY / 1e6, UTC)) == moment("now") == moment("@1700000000")
    assert [LATELY - hour, LATELY - 2 * hour, LATELY] == [
        moment(timedelta(hours=-1)),
        moment("-2h"),
        moment(timedelta(0)),
    ]
    assert 1_609_459_200_000_000 == moment("2021-01-01")


@pytest.mark.parametrize(
    ("when", "told"),
    [
        (1_700_000_000, "it seems to be seconds.*allow_ancient"),
        (1_700_000_000_000, "it seems to be milliseconds"),
        (1_700_000_000_000_000_000, "it seems to be nanoseconds"),
        (-3_600, "timedelta, or text as '-2h'"),
        (timedelta(hours=1), "timedelta.hours=-2."),
        ("yesterday", "yesterday"),
        ("1700000000", "seconds have an @"),
        (datetime(2021, 1, 1), "no time zone"),  # noqa: DTZ001 - that is the point
        (1.5, "not 1.5"),
        (True, "not True"),
        (None, "not None"),
    ],
)
def test_what_is_hardly_meant_is_refused(when: object, told: str) -> None:
    """An implausible time is refused; the error names the likely unit, or an accepted form."""
    with pytest.raises(InvalidArgumentError, match=told):
        moment(when)


def test_ancient_times_may_be_meant() -> None:
    """`allow_ancient` accepts times in the first two months of 1970."""
    assert 1_700_000_000 == moment(1_700_000_000, allow_ancient=True)
    assert 1_700_000_000_000 == moment(1_700_000_000_000, allow_ancient=True)


@pytest.mark.parametrize("allow_ancient", [False, True])
@pytest.mark.parametrize("form", ["messages", "some", "one time", "arrow"])
def test_messages_whose_times_are_in_seconds_are_refused(tmp_path: Path, form: str, allow_ancient: bool) -> None:
    """Messages with times in seconds are refused with their index by all methods, unless `allow_ancient` is set."""
    times: list[int | None] = [LATELY, None, 1_700_000_000] if form == "some" else [LATELY, LATELY, 1_700_000_000]
    if form == "one time":
        times = [1_700_000_000] * 3
    messages = [ts.Message("a", b"", timestamp=time) for time in times]
    rows = MessageBatch.of(messages).to_arrow() if form == "arrow" else messages
    with ts.open(tmp_path / "db", backend="memory", layout="reference", allow_ancient=allow_ancient) as db:
        for take in (db.store, db.publish, lambda some: db.queues.open("q").append(some)):
            if allow_ancient:
                take(rows)
                continue
            with pytest.raises(ts.InvalidMessageError, match=r"its time 1700000000 .*seconds") as refused:
                take(rows)
            assert times.index(1_700_000_000) == refused.value.index
        for read in (db.replay, db.subscribe, db.streams, db.delete):
            if not allow_ancient:
                with pytest.raises(ts.InvalidArgumentError, match="seconds"):
                    read("#", 1_700_000_000)
        assert (3 if allow_ancient else 0) == len(list(db.replay("#", timedelta(hours=-1))))
