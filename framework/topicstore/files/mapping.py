r"""The mapping from the columns of a file to the columns of messages.

The source of a message's column is a column of the file, or a *template* that combines several::

    payload=data                            the column data
    topic=plant/{site}/{id}                 text with columns in it; {{ and }} are braces
    client_id={topic[2]}                    a level of the message's topic, counted from 0; [-1] is the last

In the template of the topic itself, ``{topic[N]}`` is a level of the file's own column ``topic``. A message's column
without a mapping is taken from the file's column of the same name; the timestamp from ``timestamp``, ``ts``, ``time``
or ``tst``. A column of the file that is neither used nor explicitly ignored is an error.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, tzinfo
from functools import cached_property
from string import Formatter
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import attrs

from topicstore import Message
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.topics import check_topic

from .column_values import binary_of, flag_of, payload_of, properties_of, qos_of, text_of, time_of
from .time_units import AUTO

__all__ = ["COLUMNS", "SET_COLUMNS", "TIME_NAMES", "ColumnMap", "Row", "Template", "check_once"]

COLUMNS = ("timestamp", "topic", "client_id", "qos", "retain", "payload", "payload_base64", "properties")
"""The columns of messages in files."""
TIME_NAMES = ("timestamp", "ts", "time", "tst")
"""The columns that may hold a message's time if it isn't mapped. `mosquitto_sub -F %j` writes the last one."""
_MOSQUITTO = frozenset(("payloadlen", "mid"))
"""Columns of `mosquitto_sub -F %j` that are not imported: the size of the payload, and a packet identifier."""
_Z_BEFORE_OFFSET = re.compile(r"Z(?=[+-][0-9]{2}:?[0-9]{2}$)")
"""A superfluous ``Z`` before the offset, which some versions of mosquitto_sub write in local times."""
SET_COLUMNS = ("topic", "client_id", "qos", "retain")
"""The columns that can be set to a constant text for all messages."""

_TEXTS = frozenset(("timestamp", "topic", "client_id", "payload"))
"""The columns that a template may produce."""
_LEVEL = re.compile(r"topic\[(-?[0-9]{1,5})\]")

_CHECKS: dict[str, Callable[[str], object]] = {
    "topic": check_topic,
    "client_id": str,
    "qos": qos_of,
    "retain": flag_of,
}
"""The checks of constant texts, by column. They raise `ValueError`."""

Row = Mapping[str, Any]
"""The values of a row, by column name: Python objects or `msgspec.Raw` JSON. None means absent."""


@attrs.frozen
class _Part:
    """A piece of a template: literal text, followed by a column or a level of the topic."""

    text: str
    name: str | None = None
    level: int | None = None


@attrs.frozen
class Template:
    """The source of a message's column: a column of the file, or text with columns in it."""

    parts: tuple[_Part, ...]
    column: str | None = None
    """The column whose value is used unchanged, with any type; None if the template makes text."""

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template; a text without braces is the name of a column. Raises `ValueError`."""
        if "{" not in text and "}" not in text:
            return cls((_Part("", text),), text)
        parts = []
        for literal, name, form, conversion in Formatter().parse(text):
            if name == "" or form or conversion:
                raise ValueError(f"{text!r}: in braces stands the name of a column, or topic[N]")
            level = None if name is None else _LEVEL.fullmatch(name)
            parts.append(_Part(literal, name, None if level is None else int(level[1])))
        return cls(tuple(parts))

    @classmethod
    def constant(cls, text: str) -> Template:
        """Return the template of a constant text."""
        return cls((_Part(text),))

    @property
    def names(self) -> set[str]:
        """The columns that the template uses, without levels of the topic."""
        return {part.name for part in self.parts if part.name is not None and part.level is None}

    @property
    def levels(self) -> bool:
        """Whether the template uses levels of the topic."""
        return any(part.level is not None for part in self.parts)

    def text(self, row: Row, topic: str | None) -> str:
        """Return the text of the template for a row. Raises `ValueError` if a column or a topic level is missing."""
        return "".join([part.text + _filling(part, row, topic) for part in self.parts])


def _filling(part: _Part, row: Row, topic: str | None) -> str:
    if part.level is not None:
        levels = [] if topic is None else topic.split("/")
        try:
            return levels[part.level]
        except IndexError:
            raise ValueError(f"its topic {topic!r:.80} has no level {part.level}") from None
    if part.name is None:
        return ""
    text = text_of(_there(row, part.name))
    if text is None:
        raise ValueError(f"{part.name} is empty")
    return text


def check_once(names: Sequence[str]) -> None:
    """Raise `ValueError` if a column name occurs twice, because it would be ambiguous."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"columns twice: {', '.join(twice)}")


def _there(row: Row, name: str) -> Any:
    try:
        return row[name]
    except KeyError:
        raise ValueError(f"it has no {name}") from None


@attrs.frozen(slots=False)
class ColumnMap:
    """The rules that convert the rows of a file to messages."""

    sources: Mapping[str, Template] = attrs.field(factory=dict)
    """The sources of the mapped columns, by message column; the others come from the column of the same name."""
    ignored: frozenset[str] = frozenset()
    """The columns of the file that are ignored."""
    time_unit: str | None = None
    """The unit of numeric times. None: microseconds in ``timestamp``; inferred from the size in other columns."""
    zone: tzinfo = UTC
    """The time zone of times without one."""
    rounds: bool = False
    """Whether times finer than microseconds are rounded down. If not, they are errors unless a unit is given."""
    rounded: list[object] = attrs.field(factory=list, init=False, eq=False)
    """The first time that was rounded down without a given unit; at most one element."""
    told: str = ""
    """The options that the map was made from and that affect the messages, as text of a command line."""

    @classmethod
    def given(
        cls,
        maps: Iterable[str],
        fixed: Iterable[str] = (),
        ignored: Iterable[str] = (),
        time_unit: str | None = None,
        zone: str | None = None,
    ) -> ColumnMap:
        """Return the map for the texts of command-line options. Raises `InvalidArgumentError`.

        maps:      texts COLUMN=SOURCE.
        fixed:     texts COLUMN=TEXT, constants for all messages.
        ignored:   columns of the file to ignore.
        time_unit: the unit of numeric times; None to infer it.
        zone:      the IANA name of the time zone of times that name no zone; None for UTC.
        """
        sources: dict[str, Template] = {}
        told: list[str] = []
        for option, texts in (("--map", sorted(maps)), ("--set", sorted(fixed))):
            for text in texts:
                column, equals, source = text.partition("=")
                if not equals or not source or column not in (COLUMNS if option == "--map" else SET_COLUMNS):
                    known = ", ".join(COLUMNS if option == "--map" else SET_COLUMNS)
                    raise InvalidArgumentError(f"{option} {text}: write COLUMN=…, with COLUMN one of {known}")
                if column in sources:
                    raise InvalidArgumentError(f"{option} {text}: {column} is given twice")
                try:
                    sources[column] = Template.parse(source) if option == "--map" else Template.constant(source)
                    if option == "--set":
                        _CHECKS[column](source)
                except ValueError as bad:
                    raise InvalidArgumentError(f"{option} {text}: {bad}") from None
                if option == "--map" and column not in _TEXTS and sources[column].column is None:
                    raise InvalidArgumentError(f"{option} {text}: {column} is one column, and no template")
                told += [option, text]
        if time_unit is not None:
            told += ["--time-unit", time_unit]
        if zone is not None:
            told += ["--zone", zone]
        return cls(sources, frozenset(ignored), time_unit, _zone(zone), rounds=True, told=shlex.join(told))

    @property
    def plain(self) -> bool:
        """Whether nothing is mapped: each column is the file's column of the same name, in default unit and zone."""
        return not self.sources and not self.ignored and self.time_unit is None and self.zone is UTC

    @cached_property
    def taken(self) -> frozenset[str]:
        """The columns of a file that are used for messages, if they exist."""
        own = {column for column in COLUMNS if column not in self.sources}
        if "timestamp" in own:
            own.update(TIME_NAMES)
        if "payload" in own:
            own.add("payloadlen")
        topic = self.sources.get("topic")
        if topic is not None and topic.levels:
            own.add("topic")
        return frozenset(own.union(*(source.names for source in self.sources.values()))) - self.ignored

    @cached_property
    def _known(self) -> frozenset[str]:
        return self.taken | self.ignored

    def column_of(self, column: str) -> str:
        """Return the file's column that is used unchanged for a message's column; "" if a template is used."""
        source = self.sources.get(column)
        return column if source is None else source.column or ""

    def check(self, names: Collection[str]) -> None:
        """Raise `ValueError` for a column that is neither used nor explicitly ignored."""
        if not self._known.issuperset(names):
            unknown, missing = set(names) - self._known, self._missing(names)
            if "tst" in names:
                unknown -= _MOSQUITTO
            if not unknown:
                return
            misspelt = f"; --map names {', '.join(missing)}, which is not there" if missing else ""
            told = ", ".join(sorted(unknown))
            raise ValueError(f"messages have no column {told}; --map takes it, --ignore passes over it{misspelt}")

    def check_header(self, names: Sequence[str]) -> None:
        """Raise `ValueError` if rows with these columns can't be converted to messages."""
        self.check(names)
        missing = self._missing(names)
        if missing:
            raise ValueError(f"there is no column {', '.join(missing)}")
        there = {*names, *self.sources}
        if "topic" not in there or not {"payload", "payload_base64"} & there:
            raise ValueError("the columns have to have topic and payload or payload_base64; --map says what they are")

    def _missing(self, names: Iterable[str]) -> list[str]:
        """Return the columns, sorted, that the mapping names and that are not among ``names``."""
        return sorted(set().union(*(source.names for source in self.sources.values())).difference(names))

    # --- rows ---

    def message(self, row: Row) -> Message:
        """Convert a row whose columns have passed `check` to a message. Raises `ValueError`."""
        topic = self.topic(row)
        return Message(
            topic,
            self.payload(row, topic),
            self.client_id(row, topic),
            qos_of(self._value("qos", row, topic)),
            flag_of(self._value("retain", row, topic)),
            self.timestamp(row, topic),
            properties_of(self._value("properties", row, topic)),
        )

    def topic(self, row: Row) -> str:
        """Return the topic of a row's message. Raises `ValueError`."""
        own = row.get("topic")
        source = self.sources.get("topic")
        if source is not None:
            return source.text(row, text_of(own) if source.levels else None)
        if own is None:
            raise ValueError("it has no topic")
        return _text("topic", own)

    def client_id(self, row: Row, topic: str) -> str:
        """Return the client id of a row's message with this topic. Raises `ValueError`."""
        source = self.sources.get("client_id")
        if source is not None and source.column is None:
            return source.text(row, topic)
        value = self._value("client_id", row, topic)
        if value is None:
            return ""
        return (text_of(value) or "") if source is not None else _text("client_id", value)

    def payload(self, row: Row, topic: str) -> bytes:
        """Return the payload of a row's message with this topic. Raises `ValueError`."""
        text = payload_of(self._value("payload", row, topic))
        binary = binary_of(self._value("payload_base64", row, topic))
        if text is not None and binary is not None:
            raise ValueError("it has both payload and payload_base64")
        found = binary if text is None else text
        if found is None and int(text_of(row.get("payloadlen")) or 1) == 0:
            found = b""  # mosquitto_sub writes an empty payload as null
        if found is None:
            raise ValueError("it has neither payload nor payload_base64")
        return found

    def timestamp(self, row: Row, topic: str) -> int | None:
        """Return the time of a row's message in microseconds since the epoch; None if it has none.

        ``topic`` is the message's topic. Raises `ValueError`.
        """
        if "timestamp" in self.sources:
            return time_of(self._value("timestamp", row, topic), self.time_unit or AUTO, self._finer, self.zone)
        there = [name for name in TIME_NAMES if row.get(name) is not None]
        if len(there) > 1:
            raise ValueError(f"it has both {' and '.join(there)}; --map timestamp=… says which counts")
        if not there:
            return None
        unit = self.time_unit or (None if there[0] == "timestamp" else AUTO)
        value = row[there[0]]
        if there[0] == "tst" and (text := text_of(value)) is not None:
            value = _Z_BEFORE_OFFSET.sub("", text)
        return time_of(value, unit, self._finer, self.zone)

    def _finer(self, time: object) -> None:
        if self.time_unit is None:
            if not self.rounds:
                raise ValueError(f"{time} is finer than microseconds")
            if not self.rounded:
                self.rounded.append(time)

    def _value(self, column: str, row: Row, topic: str) -> Any:
        source = self.sources.get(column)
        if source is None:
            return row.get(column)
        return source.text(row, topic) if source.column is None else _there(row, source.column)


def _zone(name: str | None) -> tzinfo:
    if name is None:
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, ZoneInfoNotFoundError):
        raise InvalidArgumentError(f"--zone {name}: there is no such time zone; one is Europe/Berlin") from None


def _text(column: str, value: Any) -> str:
    text = text_of(value, only=True)
    if text is None:
        raise ValueError(f"{column} is null")
    return text
