"""The notation of durations and sizes: accepted texts, refused texts, and formatted values, which are parsed back."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.arguments import byte_count, check_length, seconds
from topicstore.contract.quantities import (
    DURATIONS,
    SIZES,
    format_duration,
    format_size,
    parse_duration,
    parse_microseconds,
    parse_size,
)

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(sorted(UNITS))), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    """A duration of several numbers, each with a unit, is their sum in seconds."""
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert re.search(DURATIONS, text)
    assert parse_duration(text) == pytest.approx(sum(number * UNITS[unit] for number, unit in parts))


@given(st.integers(0, 10**15))
def test_a_formatted_duration_is_read_as_the_same(microseconds: int) -> None:
    """A duration that was formatted is parsed as the same number of microseconds."""
    assert parse_microseconds(format_duration(microseconds / 1e6)) == microseconds


@given(st.integers(0, 1 << 63))
def test_a_formatted_size_is_read_as_the_same(size: int) -> None:
    """A size that was formatted is parsed as the same number of bytes."""
    text = format_size(size)
    assert re.search(SIZES, text)
    assert parse_size(text) == parse_size(text.lower()) == size


@pytest.mark.parametrize("text", ["", "30", "1.5", "h", "soon", "-1h", "1h30", "1 d 2", "1x", "1e3s", "infinity", 30])
def test_what_is_no_duration_is_refused(text: object) -> None:
    """A duration string without a unit for each number is refused, and the error lists the units."""
    with pytest.raises(ValueError, match=r"(has no unit|is not a duration): write 30m, .* units are us, ms, s, m"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "1000", "MB", "1XB", "-1kB", "1MB2kB", "infinity", 8])
def test_what_is_no_size_is_refused(text: object) -> None:
    """A size string that is not one number with one unit is refused, and the error lists the units."""
    with pytest.raises(ValueError, match=r"(has no unit|is not a size): write .* units are B, kB, MB"):
        parse_size(text)


def test_python_takes_durations_as_text() -> None:
    """In Python a duration is a number of seconds, a timedelta or a string; a size is a number of bytes or a string."""
    assert [5_400, 5_400, 5_400] == [seconds(one) for one in (5_400, timedelta(hours=1.5), "1h30m")]
    assert (None, None, 8_000_000) == (seconds("infinity"), byte_count("infinity"), byte_count("8MB"))
    for text in ("30", "infinity"):
        with pytest.raises(ts.InvalidArgumentError):
            check_length("timeout", text)


def test_retention_takes_the_notation() -> None:
    """Retention limits may be strings; ``"infinity"`` removes a limit, and a string without a unit is refused."""
    with ts.open("memory", backend="memory") as db:
        changed = db.retention.set(max_age="1d12h", max_bytes="10GB", filters={"a/#": "90m", "b/#": "infinity"})
        assert (129_600, 10**10, {"a/#": 5_400, "b/#": None}) == (changed.max_age, changed.max_bytes, changed.filters)
        assert db.retention.set(max_age="infinity", max_bytes="infinity") == ts.RetentionSettings(
            filters=changed.filters
        )
        with pytest.raises(ts.InvalidArgumentError, match="'30' has no unit"):
            db.retention.set(max_age="30")
