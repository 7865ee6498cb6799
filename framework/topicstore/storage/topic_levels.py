"""`Levels`: the children of a level of topics, each with the counts of all topics below it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.shard.tallies import Numbers, Tally

__all__ = ["Levels"]

_BEHIND_SLASH = chr(ord("/") + 1)
"""What follows a slash in the order of texts: topics below a level lie between it with the one and the other."""


@attrs.frozen(eq=False)
class Levels:
    """Columns with a row for each child of a level."""

    names: list[str]
    topics: npt.NDArray[np.intp]
    """How many topics end at each or below."""
    messages: Numbers
    size: Numbers
    last: Numbers
    ends: npt.NDArray[np.bool_]
    """Whether a topic ends there."""

    @classmethod
    def of(cls, tally: Tally, parents: Sequence[str]) -> Self:
        """Return the children of the level at ``parents``, of counts by topic. Looks at the topics below it alone."""
        begin = "".join(f"{level}/" for level in parents)
        end = bisect_left(tally.topics, begin[:-1] + _BEHIND_SLASH) if parents else len(tally.topics)
        edges = bisect_left(tally.topics, begin), end
        rows = slice(*np.searchsorted(tally.topic, np.array(edges, np.uint64)).tolist())
        texts = [tally.topics[at][len(begin) :] for at in tally.topic[rows].tolist()]
        children: dict[str, int] = {}
        child = np.fromiter(
            (children.setdefault(text.partition("/")[0], len(children)) for text in texts), np.intp, len(texts)
        )
        ends = np.zeros(len(children), np.bool_)
        ends[[children[text] for text in texts if "/" not in text]] = True
        last = np.zeros(len(children), np.uint64)
        np.maximum.at(last, child, tally.last[rows])

        def summed(column: npt.NDArray[Any]) -> Numbers:
            total = np.zeros(len(children), np.uint64)
            np.add.at(total, child, column[rows])
            return total

        count = np.bincount(child, minlength=len(children))
        return cls(list(children), count, summed(tally.messages), summed(tally.size), last, ends)

    def __len__(self) -> int:
        return len(self.names)
