"""`HeadCounter`, which counts messages by topic and client id from their heads (`topicstore.contract.layout.Heads`).

Rows are counted with numbers in place of topics and client ids. If columns share a list of texts, each text is looked
up only once.
"""

from __future__ import annotations

from itertools import islice
from operator import eq
from typing import Any

import numpy as np
import numpy.typing as npt

from topicstore.contract.columns import Coded, Constant, Texts
from topicstore.contract.layout import Heads

from .tally_records import Tally, lengths

__all__ = ["HeadCounter", "count_heads", "worth_a_table"]

_HELD = 262_144
"""The number of rows that a counter buffers before it sums them."""
_DENSE = 4
"""The most sums for each row for which an array of all pairs of names is faster than sorting the rows by pair."""

_ROWS_A_PAIR = 4
"""The least messages for each pair of topic and client id, on average, that are worth a table."""

_Numbers = npt.NDArray[Any]
_Sums = tuple[_Numbers, _Numbers, _Numbers, _Numbers, _Numbers, _Numbers]
"""Numbers of topics and of client ids, first and last positions, messages, and bytes of payloads."""


class HeadCounter:
    """A running count of messages. Its memory grows with the number of distinct pairs of topic and client id."""

    def __init__(self, *, topics: bool = True, clients: bool = True) -> None:
        """Create an empty count by topic, by client id, or by both; the tally has an empty name for the other."""
        self._names = _Names() if topics else None, _Names() if clients else None
        self._rows: list[_Sums] = []
        self._held = 0
        self._sums: list[_Sums] = []
        """The sums of rows. They are added up when they are as many as those before."""
        self._texts = _TextBytes()

    def add(self, heads: Heads) -> None:
        """Add the messages of these heads to the count."""
        topic, client_id = (
            np.zeros(len(heads.positions), np.int64) if names is None else names.numbers(column)
            for names, column in zip(self._names, (heads.topics, heads.client_ids), strict=True)
        )
        positions, size = heads.positions, heads.sizes.astype(np.float64)
        if self._names[0] is None:
            size += self._texts.of(heads.topics)
        self._rows.append((topic, client_id, positions, positions, np.ones(len(topic)), size))
        self._held += len(topic)
        if self._held >= _HELD:
            self._sum()

    def _sum(self) -> None:
        if self._held:
            self._sums.append(_summed(self._rows))
        self._rows, self._held = [], 0
        before, after = sum(len(sums[0]) for sums in self._sums[:1]), sum(len(sums[0]) for sums in self._sums[1:])
        if after > max(_HELD, before):
            self._sums = [_summed(self._sums)]

    @property
    def pairs(self) -> int:
        """The approximate number of pairs of topic and client id; an upper bound."""
        return self._held + sum(len(sums[0]) for sums in self._sums)

    def total(self) -> Tally:
        """Return the tally of all messages counted so far."""
        self._sum()
        if not self._sums:
            return Tally.empty()
        self._sums = [_summed(self._sums)]
        texts = [None if names is None else list(names.known) for names in self._names]
        return _tally(texts[0], texts[1], self._sums[0])


class _Names:
    """Numbers for texts, in order of their first occurrence."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._texts: Texts | None = None
        """The list of texts of the last column."""
        self._places = np.empty(0, np.int64)
        """The number of each text of that list; -1 if it is not known yet."""

    def numbers(self, column: Coded | Constant[str]) -> _Numbers:
        """Return the number of the text of each row."""
        if isinstance(column, Constant):
            return np.full(len(column), self._number(column.value), np.int64)
        values = column.texts.values
        known = self._places if column.texts is self._texts else self._places[:0]
        if column.texts is not self._texts or len(values) > len(known):
            self._texts, self._places = column.texts, np.full(len(values), -1, np.int64)
            self._places[: len(known)] = known
        found: _Numbers = self._places[column.codes]
        missing = found < 0
        if missing.any():
            new = np.unique(column.codes[missing])
            self._places[new] = [self._number(text) for text in values[new].tolist()]
            found = self._places[column.codes]
        return found

    def _number(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))


class _TextBytes:
    """The bytes of topics in UTF-8, for a count that doesn't distinguish topics."""

    def __init__(self) -> None:
        self._names = _Names()
        self._sizes = np.empty(0, np.float64)

    def of(self, topics: Coded | Constant[str]) -> _Numbers:
        """Return the bytes of the topic of each row."""
        numbers = self._names.numbers(topics)
        known = self._names.known
        if len(known) > len(self._sizes):
            new = list(known)[len(self._sizes) :]
            self._sizes = np.concatenate([self._sizes, lengths(new)])
        sizes: _Numbers = self._sizes[numbers]
        return sizes


def count_heads(heads: Heads, rows: npt.NDArray[np.bool_] | None = None) -> Tally | None:
    """Return the tally of the messages for which ``rows`` is true; without ``rows``, of all messages.

    Returns None if there are few messages for each pair of topic and client id, so that a table isn't `worth_a_table`.
    """
    topics, topic = _codes(heads.topics)
    client_ids, client_id = _codes(heads.client_ids)
    columns = [topic, client_id, heads.positions, heads.positions, np.ones(len(topic)), heads.sizes.astype(np.float64)]
    if rows is not None:
        columns = [column[rows] for column in columns]
    if not len(columns[0]):
        return Tally.empty()
    topic, client_id, first, last, messages, size = columns
    sums = _summed([(topic, client_id, first, last, messages, size)])
    if not worth_a_table(len(topic), len(sums[0])):
        return None
    return _tally(topics.values.tolist(), client_ids.values.tolist(), sums)


def worth_a_table(messages: int, pairs: int) -> bool:
    """Return whether messages with this many pairs of topic and client id are worth a tally table.

    A table with a row for every few messages takes more time to make than it saves, and wastes disk space.
    """
    return messages >= _ROWS_A_PAIR * pairs


def _codes(column: Coded | Constant[str]) -> tuple[Texts, _Numbers]:
    if isinstance(column, Constant):
        return Texts.of([column.value]), np.zeros(len(column), np.int64)
    return column.texts, column.codes.astype(np.int64)


def _tally(topics: list[str] | None, client_ids: list[str] | None, sums: _Sums) -> Tally:
    """Return sums as a tally. None stands for names that weren't distinguished."""
    topic, client_id, first, last, messages, size = sums
    if topics is not None:
        topics, topic = _ranked(topics, topic)
        size = size + messages * lengths(topics)[topic]
    if client_ids is not None:
        client_ids, client_id = _ranked(client_ids, client_id)
    sums = _summed([(topic, client_id, first, last, messages, size)])
    return Tally(topics or [""], client_ids or [""], *(column.astype(np.uint64) for column in sums))


def _ranked(texts: list[str], numbers: _Numbers) -> tuple[list[str], _Numbers]:
    """Return the texts of numbers, each once and in order, and the index of each number's text."""
    used = np.flatnonzero(np.bincount(numbers)).tolist()
    used.sort(key=texts.__getitem__)
    ordered = [texts[number] for number in used]
    places = np.empty(len(texts), np.int64)
    if any(map(eq, ordered, islice(ordered, 1, None))):  # a text has several numbers
        distinct = list(dict.fromkeys(ordered))
        ranks = {text: rank for rank, text in enumerate(distinct)}
        places[used] = [ranks[text] for text in ordered]
        return distinct, places[numbers]
    places[used] = np.arange(len(used))
    return ordered, places[numbers]


def _summed(parts: list[_Sums]) -> _Sums:
    """Return sums with one row for each pair of topic and client id."""
    if len(parts) == 1 and not len(parts[0][0]):
        return parts[0]
    topic, client_id, first, last, messages, size = (np.concatenate(column) for column in zip(*parts, strict=True))
    width = int(client_id.max()) + 1
    keys, pairs = topic * width + client_id, (int(topic.max()) + 1) * width
    ordered = bool((keys[1:] >= keys[:-1]).all())  # as after a merge if each topic has one publisher
    if not ordered and pairs <= _DENSE * len(keys):
        counts = np.bincount(keys, messages, pairs)
        lowest, highest = np.full(pairs, np.iinfo(np.uint64).max, np.uint64), np.zeros(pairs, np.uint64)
        np.minimum.at(lowest, keys, first)
        np.maximum.at(highest, keys, last)
        used = np.flatnonzero(counts)
        sizes = np.bincount(keys, size, pairs)
        return used // width, used % width, lowest[used], highest[used], counts[used], sizes[used]
    if not ordered:
        order = np.argsort(keys, kind="stable")
        keys, topic, client_id = keys[order], topic[order], client_id[order]
        first, last, messages, size = first[order], last[order], messages[order], size[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return (
        topic[starts],
        client_id[starts],
        np.minimum.reduceat(first, starts),
        np.maximum.reduceat(last, starts),
        np.add.reduceat(messages, starts),
        np.add.reduceat(size, starts),
    )
