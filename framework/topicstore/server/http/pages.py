"""Pages: how a list that may be long is answered, a part at a time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated, Generic, TypeVar

import msgspec
from litestar.params import QueryParameter

__all__ = ["MOST", "PAGE_BYTES", "After", "Limit", "Page", "fitting"]

T = TypeVar("T")

MOST = 10_000
"""The most items of a page."""
PAGE_BYTES = 16 << 20
"""The bytes of payloads of a page of messages, unless its first message has more."""
Limit = Annotated[int, QueryParameter(ge=1, le=MOST, description="The most items of the page.")]
"""The type of the parameter ``limit``; its default is 100."""
After = Annotated[str | None, QueryParameter(description="The `next` of the page before; left out for the first.")]
"""The type of the parameter ``after``; its default is None."""


def fitting(payloads: Iterable[bytes], room: int = PAGE_BYTES, *, least: int = 1) -> int:
    """Return how many payloads, from the first on, have together at most ``room`` bytes; at ``least`` so many."""
    return max(sum(end <= room for end in accumulate(map(len, payloads))), least)


class Page(msgspec.Struct, Generic[T], kw_only=True):
    """Some items of a list, in its order."""

    items: list[T]
    next: str | None = None
    """What the parameter ``after`` is for the next page; None after the last one."""
