"""The part of a database that a condition of a statement selects.

DuckDB hands the conditions of a scan over as an expression of PyArrow, which can be evaluated, but not inspected. Its
serialized form can: a record batch whose schema has the parts of the expression as metadata, and whose columns are the
literals (https://github.com/apache/arrow/blob/main/cpp/src/arrow/compute/expression.cc, ``Serialize``). A condition
that is not understood selects everything, because all rows that are read are compared with the whole expression
afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import attrs
import pyarrow as pa
import pyarrow.compute as pc

from topicstore.contract.errors import InvalidTopicError
from topicstore.contract.positions import time_of
from topicstore.contract.replay_plan import TimeRange
from topicstore.contract.topics import MAX_TOPIC_BYTES, TopicFilter, check_topic

__all__ = ["Selection", "fields_of", "selection_of"]

_MOST_TOPICS = 64
"""The maximum number of topics that are read separately. More are read by the text with which all of them begin."""
_PART = re.compile(r"^(\w+): '(\w*)'$", re.MULTILINE)
"""A part of a serialized expression. The parts have names of functions and columns, and no values of the caller."""

_ANY_TIME = TimeRange()


@attrs.frozen(kw_only=True)
class Selection:
    """The messages that may meet a condition: those that meet all restrictions that the attributes state."""

    topics: frozenset[str] | None = None
    """The topics; None for all."""
    least: str = ""
    """The least topic."""
    beyond: str | None = None
    """A topic that is greater than all that are selected; None if there is none."""
    clients: frozenset[str] | None = None
    """The client ids; None for all."""
    shards: frozenset[int] | None = None
    """The shards; None for all."""
    time: TimeRange = _ANY_TIME
    """The range of the times of positions."""
    timestamp: TimeRange = _ANY_TIME
    """The range of the messages' own times."""

    def both(self, other: Selection) -> Selection:
        """Return the selection of the messages that may meet both conditions."""
        return Selection(
            topics=_common(self.topics, other.topics),
            least=max(self.least, other.least),
            beyond=_lower(self.beyond, other.beyond),
            clients=_common(self.clients, other.clients),
            shards=_common(self.shards, other.shards),
            time=_overlap(self.time, other.time),
            timestamp=_overlap(self.timestamp, other.timestamp),
        )

    def either(self, other: Selection) -> Selection:
        """Return a selection of all messages that may meet at least one of the conditions, and perhaps of others."""
        return Selection(
            topics=_together(self.topics, other.topics),
            least=min(self.least, other.least),
            beyond=None if self.beyond is None or other.beyond is None else max(self.beyond, other.beyond),
            clients=_together(self.clients, other.clients),
            shards=_together(self.shards, other.shards),
            time=_hull(self.time, other.time),
            timestamp=_hull(self.timestamp, other.timestamp),
        )

    def filters(self) -> list[TopicFilter]:
        """Return disjoint filters that together match all selected topics that ``#`` matches, and perhaps others."""
        least, beyond = self.least, self.beyond
        if self.topics is not None:
            topics = [topic for topic in sorted(self.topics) if _is_selectable(topic) and self._spans(topic)]
            if len(topics) <= _MOST_TOPICS:
                return list(map(TopicFilter, topics))
            least, beyond = topics[0], f"{topics[-1]}\0"
        if beyond is not None and least >= beyond:
            return []
        levels = _beginning(least, beyond).split("/")[:-1]
        text = "/".join([*levels, "#"])
        known = levels and not text.startswith("$") and len(text.encode()) <= MAX_TOPIC_BYTES
        return [TopicFilter(text if known and _is_selectable("/".join(levels) or "/") else "#")]

    def _spans(self, topic: str) -> bool:
        return topic >= self.least and (self.beyond is None or topic < self.beyond)


def _is_selectable(topic: str) -> bool:
    """Return whether a text is a topic that ``#`` matches."""
    try:
        return not check_topic(topic).startswith("$")
    except InvalidTopicError:
        return False


def _beginning(least: str, beyond: str | None) -> str:
    """Return a text with which all texts from ``least`` to before ``beyond`` begin."""
    if beyond is None:
        return ""
    differing = (place for place, (one, other) in enumerate(zip(least, beyond, strict=False)) if one != other)
    size = next(differing, min(len(least), len(beyond)))
    next_after = len(beyond) == size + 1 and len(least) > size and ord(beyond[size]) == ord(least[size]) + 1
    return least[: size + 1] if next_after else least[:size]


def _common(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _together(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    return None if one is None or other is None else one | other


def _lower(one: Any, other: Any) -> Any:
    """Return the lower of two ends, of which None is the highest."""
    return min((end for end in (one, other) if end is not None), default=None)


def _overlap(one: TimeRange, other: TimeRange) -> TimeRange:
    return TimeRange(max(one.start, other.start), _lower(one.until, other.until))


def _hull(one: TimeRange, other: TimeRange) -> TimeRange:
    until = None if one.until is None or other.until is None else max(one.until, other.until)
    return TimeRange(min(one.start, other.start), until)


# --- expressions --------------------------------------------------------------------------

_ALL = Selection()


class _Field(NamedTuple):
    """A column."""

    name: str


class _Literal(NamedTuple):
    """A value, or the options of a function."""

    value: pa.Scalar


class _Call(NamedTuple):
    """A function with its arguments, the last of which may be its options."""

    function: str
    arguments: list[_Part]


_Part = _Field | _Literal | _Call


def fields_of(expression: pc.Expression) -> frozenset[str] | None:
    """Return the columns that an expression uses; None if it isn't understood."""
    parts = _parsed(expression)
    return None if parts is None else frozenset(_fields(parts))


def _fields(part: _Part) -> Iterator[str]:
    if isinstance(part, _Field):
        yield part.name
    elif isinstance(part, _Call):
        for argument in part.arguments:
            yield from _fields(argument)


def selection_of(expression: pc.Expression) -> Selection:
    """Return a selection of all messages that meet an expression, and perhaps of others."""
    parts = _parsed(expression)
    return _ALL if parts is None else _selected(parts)


def _parsed(expression: pc.Expression) -> _Part | None:
    _, (serialized,) = expression.__reduce__()
    batch = pa.ipc.open_file(serialized).get_batch(0)
    schema = batch.schema.to_string(show_schema_metadata=True, truncate_metadata=False)
    parts: Iterator[tuple[str, str]] = iter(_PART.findall(schema.rpartition("-- schema metadata --")[2]))
    try:
        return _part(*next(parts), parts, batch)
    except (KeyError, StopIteration, ValueError, IndexError):
        return None


def _part(kind: str, value: str, rest: Iterator[tuple[str, str]], literals: pa.RecordBatch) -> _Part:
    match kind:
        case "field_ref":
            return _Field(value)
        case "literal" | "options":
            return _Literal(literals.column(int(value))[0])
        case "nested_field_ref":
            path = [_part(*next(rest), rest, literals) for _ in range(int(value))]
            return path[0]
        case "call":
            arguments = []
            while (part := next(rest)) != ("end", value):
                arguments.append(_part(*part, rest, literals))
            return _Call(value, arguments)
    raise KeyError(kind)


_TURNED = {"greater": "less", "greater_equal": "less_equal", "less": "greater", "less_equal": "greater_equal"}


def _selected(part: _Part) -> Selection:
    match part:
        case _Call("and_kleene" | "and", [one, other]):
            return _selected(one).both(_selected(other))
        case _Call("or_kleene" | "or", [one, other]):
            return _selected(one).either(_selected(other))
        case _Call("if_else", [_Call("is_valid", _), condition, _Literal(nothing)]) if not nothing.is_valid:
            return _selected(condition)
        case _Call("is_in", [_Field(name), _Literal(options)]):
            return _among(name, list(options["value_set"].values))
        case _Call("equal", [_Field(name), _Literal(value)]) | _Call("equal", [_Literal(value), _Field(name)]):
            return _among(name, [value])
        case _Call(function, [_Field(name), _Literal(value)]):
            return _compared(name, function, value)
        case _Call(function, [_Literal(value), _Field(name)]):
            return _compared(name, _TURNED.get(function, ""), value)
    return _ALL


def _among(name: str, scalars: list[pa.Scalar]) -> Selection:
    """Return the selection of a column with one of some values."""
    values = [_value(name, scalar) for scalar in scalars if scalar.is_valid]
    if not values or None in values:
        return _ALL
    match name:
        case "topic":
            return Selection(topics=frozenset(values))
        case "client_id":
            return Selection(clients=frozenset(values))
        case "shard":
            return Selection(shards=frozenset(values))
    return _ranged(name, min(values), max(values) + 1)


def _compared(name: str, function: str, scalar: pa.Scalar) -> Selection:
    """Return the selection of a column that is less or greater than a value."""
    value = _value(name, scalar) if scalar.is_valid else None
    if value is None or name in ("client_id", "shard"):
        return _ALL
    following: Callable[[Any], Any] = (lambda text: f"{text}\0") if name == "topic" else (lambda number: number + 1)
    match function:
        case "greater":
            return _ranged(name, following(value), None)
        case "greater_equal":
            return _ranged(name, value, None)
        case "less":
            return _ranged(name, None, value)
        case "less_equal":
            return _ranged(name, None, following(value))
    return _ALL


def _ranged(name: str, start: Any, until: Any) -> Selection:
    """Return the selection of a column from ``start``, inclusive, to ``until``, exclusive; None means no end."""
    if name == "topic":
        return Selection(least=start or "", beyond=until)
    if name == "position":
        start, until = time_of(start or 0), None if until is None else time_of(max(until - 1, 0)) + 1
    times = TimeRange(max(start or 0, 0), None if until is None else max(until, 0))
    return Selection(timestamp=times) if name == "timestamp" else Selection(time=times)


def _value(name: str, scalar: pa.Scalar) -> Any:
    """Return a value in the form in which `Selection` has it; None if the column has values of another type."""
    match name:
        case "topic" | "client_id":
            return scalar.as_py() if pa.types.is_string(scalar.type) else None
        case "shard" | "position":
            return scalar.as_py() if pa.types.is_integer(scalar.type) else None
        case "time" | "timestamp":
            return scalar.value if scalar.type == pa.timestamp("us", tz="UTC") else None
    return None
