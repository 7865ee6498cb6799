"""Times on the command line: what people write is what is meant, and what is shown can be written again."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.positions import MAX_TIME, to_microseconds
from topicstore.times import format_time, parse_timestamp, parse_when, suspected_unit

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
        ("-30m", NOW - HOUR // 2),
        ("-1d12h", NOW - 36 * HOUR),
        ("1970-01-01", 0),
        ("19700102", 24 * HOUR),
        ("1970-01-01T01:00:00Z", HOUR),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1970-01-01 00:00:00.000001", 1),
        ("1969-12-31", -24 * HOUR),
        ("@1700000000", 1_700_000_000_000_000),
        ("@1700000000.25", 1_700_000_000_250_000),
        ("@0", 0),
        ("100000000000000", 10**14),
    ],
)
def test_examples(text: str, expected: int) -> None:
    assert parse_when(text, NOW) == expected


@given(st.text(max_size=12) | st.text("0123456789-+:.TZWsmhdw ", max_size=24))
def test_whatever_is_written_it_is_a_time_or_refused_by_one_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_when(text, NOW), int)


@pytest.mark.parametrize("text", ["1700000000", "1700000000000", "99999999999999", "123456789"])
def test_numbers_that_are_hardly_microseconds(text: str) -> None:
    """A person meant seconds or milliseconds; a file may have such times all the same."""
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
        (999_999_999, None),
        (5_000_000_000, None),
    ],
)
def test_other_units_are_suspected(timestamp: int, unit: str | None) -> None:
    assert suspected_unit(timestamp) == unit


@pytest.mark.parametrize(
    "text",
    ["@", "@-1", "@1.", "@1.0000001", "", "-", "-2", "2h", "-2y", "yesterday", "12345678", "--2h", "-1h ", "٣٣٣٣٣٣٣٣٣"],
)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_when(text, NOW)
