"""Matching of topics with a filter: one verdict per topic, looked up for all rows of a block in one call.

For rows sorted by topic, `topic_range` returns the range of texts that holds all matching topics of a stream.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore.contract.columns import Coded, Column, Constant
from topicstore.contract.topics import TopicFilter

from topicstore_layouts.shared.name_table import NameTable

from .topic_index import Sought, text_code

__all__ = ["Mask", "Matcher", "Matchers", "Range", "topic_range"]

_KEPT_BYTES = 16 << 20
"""The most bytes of cached verdicts, one byte per topic and filter."""
_LEAST_BYTES = 1 << 10
"""The least bytes that a cached filter counts as."""
_WORTH_A_PATTERN = 32
"""The least number of texts for which a regular expression is cheaper than splitting each text."""
_WORTH_AN_IMPORT = 8_192
"""The number of texts of one filter for which loading Arrow's functions is cheaper than splitting each text."""
_LONGEST_PATTERN = 1_000
"""The most characters of a filter that becomes an expression: RE2 may refuse a longer one as too large."""
_MOST_SOUGHT, _LEAST_SHARE = 64, 8
"""The most topics that are looked up in the index of blocks, and the least factor by which all topics outnumber them:
most blocks have one of more topics."""
_UNKNOWN, _NO, _YES = 0, 1, 2

Mask = npt.NDArray[np.bool_]


class Matcher:
    """A filter over the topic numbers of one dictionary, with a cached verdict of one byte per topic.

    When a block has a topic without a verdict, all such topics of the dictionary are judged together. A filter without
    wildcards needs no verdicts: it matches one number. Thread-safe: a verdict never changes, so at worst two threads
    compute the same one.
    """

    def __init__(self, topic_filter: TopicFilter, topics: NameTable) -> None:
        self._filter = topic_filter
        self._topics = topics
        self._verdicts = 0, np.zeros(0, dtype=np.uint8)
        """The number of judged topics, and an array with their verdicts."""
        self._number: int | None = None
        self._sought: tuple[int, Sought | None] = -1, None
        """The result of `sought` for a filter with wildcards, with the number of topics for which it was determined."""
        self._pattern = _pattern(topic_filter) if len(topic_filter.text) <= _LONGEST_PATTERN else None
        self._ends = _ends(topic_filter)
        self._split = 0
        """The approximate number of texts that were judged, or are being judged, by splitting each."""

    def rows(self, topics: Column) -> Mask | bool:
        """Return True if all rows match, False if none do, else a mask of the matching rows.

        ``topics`` are numbers (`Constant` or array) or texts (`Constant` or `Coded`).
        """
        if isinstance(topics, Constant):
            return self._one(topics.value)
        if isinstance(topics, Coded):
            return _simplified(self.judge_texts(topics.texts.values.tolist())[topics.codes])
        return _simplified(self._judge(np.asarray(topics)))

    def sought(self) -> Sought | None:
        """Return the matching topics, to look them up in the index of blocks; None if they are many or unknown."""
        topics = self._topics
        if topics.damaged:  # a topic whose name can't be read may match
            return None
        if self._filter.literal:
            if self._number is None:
                self._number = topics.find(self._filter.text)
            codes = [text_code(self._filter.text)] + ([] if self._number is None else [self._number])
            return Sought(np.array(codes, np.uint32), texts=False)
        size = len(topics)
        known, sought = self._sought
        if known != size:
            sought = self._find_sought(size)
            self._sought = size, sought
        return sought

    def _find_sought(self, size: int) -> Sought | None:
        judged, verdicts = self._verdicts
        if judged < size:
            verdicts = self._judge_all(judged, verdicts)
        numbers = np.flatnonzero(verdicts == _YES)
        if len(numbers) > min(_MOST_SOUGHT, size // _LEAST_SHARE):
            return None
        return Sought(numbers.astype(np.uint32), texts=True)

    def _one(self, topic: int | str) -> bool:
        if isinstance(topic, str):
            return self._filter.matches(topic)
        judged, verdicts = self._verdicts
        verdict = verdicts[topic] if topic < judged else _UNKNOWN
        return bool(verdict == _YES if verdict else self._judge(np.array([topic]))[0])

    def judge_texts(self, texts: list[str]) -> Mask:
        """Return a mask of the texts that match."""
        if self._filter.literal:
            return np.array([text == self._filter.text for text in texts], dtype=bool)
        if self._pattern is None or len(texts) < _WORTH_A_PATTERN or not self._worth_an_import(len(texts)):
            matches, (first, last) = self._filter.matches, self._ends
            return np.array([t.startswith(first) and t.endswith(last) and matches(t) for t in texts], dtype=bool)
        import pyarrow.compute as pc  # imported here, because the import is slow

        array, (first, last) = pa.array(texts, pa.string()), self._ends
        verdicts = _as_mask(pc.and_(pc.starts_with(array, first), pc.ends_with(array, last)))
        likely = np.flatnonzero(verdicts)
        if len(likely):
            verdicts[likely] = _as_mask(pc.match_substring_regex(array.take(pa.array(likely)), self._pattern))
        return verdicts

    def _worth_an_import(self, texts: int) -> bool:
        """Return whether Arrow's functions are loaded, or to be loaded because the filter judges many texts."""
        self._split += texts
        return "pyarrow.compute" in sys.modules or self._split >= _WORTH_AN_IMPORT

    def _judge(self, topics: npt.NDArray[Any]) -> Mask:
        self._topics.check(topics)
        if self._filter.literal:
            if self._number is None:
                self._number = self._topics.find(self._filter.text)
            return np.asarray(topics == (-1 if self._number is None else self._number))
        # Read once: another thread may replace the array with a shorter one at any time.
        judged, verdicts = self._verdicts
        if int(topics.max()) >= judged:
            verdicts = self._judge_all(judged, verdicts)
        return np.asarray(verdicts[topics] == _YES)

    def _judge_all(self, judged: int, verdicts: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Judge all topics from number ``judged`` on; return the verdicts of all topics, in an array with spare room.

        A vectorized verdict of many topics costs a fraction of a call for each.
        """
        names = self._topics.all(judged)
        stop = judged + len(names)
        if stop > len(verdicts):
            grown = np.zeros(max(2 * len(verdicts), stop), dtype=np.uint8)
            grown[:judged] = verdicts[:judged]
            verdicts = grown
        verdicts[judged:stop] = np.where(self.judge_texts([name or "-" for name in names]), _YES, _NO)
        if None in names:  # a topic whose name can't be read gets no verdict
            verdicts[[number for number, name in enumerate(names, judged) if name is None]] = _UNKNOWN
        self._verdicts = stop, verdicts
        return verdicts


def _simplified(mask: Mask) -> Mask | bool:
    matching = int(np.count_nonzero(mask))
    if matching == len(mask):
        return True
    return mask if matching else False


def _as_mask(verdicts: pa.BooleanArray) -> Mask:
    mask: Mask = verdicts.to_numpy(zero_copy_only=False)
    return mask


def _ends(topic_filter: TopicFilter) -> tuple[str, str]:
    """Return the prefix and suffix of every matching topic: checking them is cheaper than the whole expression."""
    levels = topic_filter.levels
    wild = [depth for depth, level in enumerate(levels) if level in ("+", "#")]
    if not wild:
        return topic_filter.text, topic_filter.text
    # A topic that ends before a "#" has no slash after its last level.
    return "/".join(levels[: wild[0]]), "/".join(levels[wild[-1] + 1 :])


def _pattern(topic_filter: TopicFilter) -> str:
    """Return the filter as a regular expression for RE2, which matches many texts several times as fast."""
    levels = topic_filter.levels
    pattern = "".join(
        "(?:/.*)?" if level == "#" else ("/" if depth else "") + ("[^/]*" if level == "+" else _quoted(level))
        for depth, level in enumerate(levels)
    )
    if levels[0] in ("+", "#"):  # these wildcards match no topics that begin with $
        pattern = "(?:[^$].*)?" if levels[0] == "#" else "(?:[^$/][^/]*)?" + pattern[len("[^/]*") :]
    return rf"(?s)\A{pattern}\z"


def _quoted(level: str) -> str:
    return "".join(c if c.isalnum() else rf"\x{{{ord(c):x}}}" for c in level)


class Matchers:
    """A cache of a slab's matchers for the filters used last, bounded by the memory of their verdicts."""

    def __init__(self, topics: NameTable) -> None:
        self._topics = topics
        self._kept: dict[str, Matcher] = {}

    def of(self, topic_filter: TopicFilter) -> Matcher:
        """Return the matcher of a filter."""
        kept = self._kept
        matcher = kept.pop(topic_filter.text, None)
        if matcher is None:
            matcher = Matcher(topic_filter, self._topics)
            room = max(_KEPT_BYTES // max(len(self._topics), _LEAST_BYTES), 1)
            for text in list(kept)[: max(len(kept) - room + 1, 0)]:
                kept.pop(text, None)
        kept[topic_filter.text] = matcher  # moved to the end, so that it is dropped last
        return matcher


Range = tuple[str, str | None]
"""The lowest and the highest text that a matching topic can have. None means that there is no highest."""


def topic_range(levels: tuple[str, ...], topic_filter: TopicFilter) -> Range:
    """Return the range of the topics that have a stream's learned levels and match a filter.

    Up to the first level that is a wildcard in both the stream's pattern and the filter, the topic's text is known.
    """
    known: list[str] = []
    for depth, learned in enumerate(levels):
        token = topic_filter.level(depth) if learned == "+" else learned
        if token in ("+", "#"):
            if not known:
                return "", None
            prefix = "/".join(known)
            return prefix, prefix + "0"  # "0" follows "/", so all texts that begin with "prefix/" are lower
        known.append(token)
    topic = "/".join(known)
    return topic, topic
