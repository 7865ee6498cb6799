"""Positions equal those of a model that assigns them one by one."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone, tzinfo

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.positions import (
    COUNTER_BITS,
    MAX_TIME,
    commit_position,
    consecutive_positions,
    first_position,
    late_rows,
    message_positions,
    time_of,
    to_microseconds,
)

PER_MICROSECOND = 1 << COUNTER_BITS
LARGEST = (1 << 64) - 1

around = st.integers(0, 5) | st.integers(MAX_TIME - 5, MAX_TIME) | st.integers(0, MAX_TIME)
times = st.lists(around, max_size=30) | st.lists(st.integers(1_000, 1_003), max_size=200)
lasts = st.just(-1) | around.map(first_position) | st.integers(0, (MAX_TIME + 1) << COUNTER_BITS)


def one_by_one(last: int, times: list[int]) -> list[int]:
    positions = []
    for time in times:
        last = max(last + 1, time << COUNTER_BITS)
        positions.append(last)
    return positions


def as_times(times: list[int]) -> np.ndarray:
    return np.array(times, dtype=np.int64)


@settings(max_examples=300)
@given(lasts, around, st.integers(0, 5_000))
@example(-1, 0, 0)
@example(-1, 0, 1)
@example(0, 0, 1)
@example(-1, MAX_TIME, 5_000)
def test_commit_positions_equal_the_model(last: int, now: int, rows: int) -> None:
    """A batch gets the next positions at or after the time of its commit."""
    actual = consecutive_positions(commit_position(last, now), rows)
    assert np.uint64 == actual.dtype
    assert one_by_one(last, [now] * rows) == actual.tolist()


@settings(max_examples=500)
@given(lasts, times)
@example(-1, [])
@example(-1, [0])
@example(-1, [0, 0, MAX_TIME, 0, MAX_TIME])
@example((MAX_TIME + 1) << COUNTER_BITS, [0, MAX_TIME])
def test_message_positions_equal_the_model(last: int, times: list[int]) -> None:
    """Each message gets the position max(previous + 1, its time), even if times aren't in order."""
    actual = message_positions(last, as_times(times))
    assert np.uint64 == actual.dtype
    assert one_by_one(last, times) == actual.tolist()


@pytest.mark.parametrize("time", [0, 1, 1_700_000_000_000_000, MAX_TIME])
@pytest.mark.parametrize("rows", [PER_MICROSECOND - 1, PER_MICROSECOND, PER_MICROSECOND + 1, 3 * PER_MICROSECOND + 7])
def test_more_messages_than_a_microsecond_has_positions(time: int, rows: int) -> None:
    """If a microsecond has more messages than positions, the rest get ascending positions in the next microsecond."""
    following = [min(time + 1, MAX_TIME)] * 3
    expected = one_by_one(-1, [time] * rows + following)
    assert expected == message_positions(-1, as_times([time] * rows + following)).tolist()
    assert expected[:rows] == consecutive_positions(commit_position(-1, time), rows).tolist()
    assert time + (rows - 1) // PER_MICROSECOND == time_of(expected[rows - 1])


def test_the_largest_time_leaves_room() -> None:
    """Ten million messages at the largest time have positions below 2**64."""
    assert first_position(MAX_TIME) + 10_000_000 < LARGEST


@settings(max_examples=300)
@given(st.just(-1) | around, times)
@example(-1, [])
@example(5, [])
@example(5, [5, 4, 5, 6, 5])
def test_late_rows_equal_a_loop(last_time: int, times: list[int]) -> None:
    """A row is late if an earlier row has a larger time; an equal time is not late."""
    expected = []
    newest = last_time
    for time in times:
        expected.append(time < newest)
        newest = max(newest, time)
    actual = late_rows(last_time, as_times(times))
    assert np.bool_ == actual.dtype
    assert expected == actual.tolist()


@given(around, st.integers(0, PER_MICROSECOND - 1))
def test_a_position_holds_its_time(time: int, counter: int) -> None:
    """`time_of` returns the time that was passed to `first_position`."""
    assert time == time_of(first_position(time) + counter)


@pytest.mark.parametrize(
    ("time", "clamped"), [(-1, 0), (-(1 << 70), 0), (MAX_TIME + 2, MAX_TIME + 1), (1 << 70, MAX_TIME + 1)]
)
def test_first_position_clamps(time: int, clamped: int) -> None:
    """`first_position` clamps times to the range from 0 to one microsecond after the last."""
    assert first_position(clamped) == first_position(time)


@pytest.mark.parametrize(
    ("time", "microseconds"),
    [
        (0, 0),
        (-5, -5),
        (1 << 70, 1 << 70),
        (datetime(1, 1, 1, tzinfo=UTC), -62_135_596_800_000_000),
        (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), 253_402_300_799_999_999),
    ],
    ids=str,
)
def test_to_microseconds(time: int | datetime, microseconds: int) -> None:
    """Integers are returned as they are, and the first and last datetime are converted exactly."""
    actual = to_microseconds(time)
    assert microseconds == actual
    assert int is type(actual)


class Berlin(tzinfo):
    """Time in Berlin in the night when summer time ended in 2024, in which the hour from two o'clock occurs twice."""

    def utcoffset(self, time: datetime | None) -> timedelta:
        assert time is not None
        summer = (time.hour, time.fold) < (2, 1)
        return timedelta(hours=2 if summer else 1)


@pytest.mark.parametrize(("fold", "microseconds"), [(0, 1_729_989_000_000_000), (1, 1_729_992_600_000_000)])
def test_the_hour_that_comes_twice(fold: int, microseconds: int) -> None:
    """`fold` distinguishes the two occurrences of a repeated hour."""
    assert microseconds == to_microseconds(datetime(2024, 10, 27, 2, 30, tzinfo=Berlin(), fold=fold))


@given(st.datetimes(timezones=st.integers(-1_439, 1_439).map(lambda offset: timezone(timedelta(minutes=offset)))))
def test_to_microseconds_of_any_zone_is_that_of_utc(time: datetime) -> None:
    """Equal datetimes of different time zones are converted to the same time, exact to the microsecond."""
    try:
        in_utc = time.astimezone(UTC)
    except OverflowError:
        return
    microseconds = to_microseconds(time)
    assert to_microseconds(in_utc) == microseconds
    assert in_utc == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


class Nowhere(tzinfo):
    """A time zone without an offset, in which Python considers a datetime naive."""

    def utcoffset(self, _: datetime | None) -> timedelta | None:
        return None


@pytest.mark.parametrize("zone", [None, Nowhere()], ids=["none", "without offset"])
def test_a_naive_datetime_is_refused(zone: tzinfo | None) -> None:
    """A datetime without a time zone is refused."""
    with pytest.raises(InvalidArgumentError, match="no time zone"):
        to_microseconds(datetime(2024, 1, 1, tzinfo=zone))


@pytest.mark.parametrize("time", [None, 1.0, True, "0", "2024-01-01", b"0", timedelta(1), date(2024, 1, 1)])
def test_what_is_no_time_is_refused(time: object) -> None:
    """Floats, bools, strings, dates and timedeltas are refused as times."""
    with pytest.raises(InvalidArgumentError, match="a time is"):
        to_microseconds(time)  # type: ignore[arg-type]
