"""Pagination of long lists."""

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
"""Most bytes of payloads in a page of messages, unless its first message has more."""
Limit = Annotated[int, QueryParameter(ge=1, le=MOST, description="The most items of the page.")]
"""The type of the parameter ``limit``; its default is 100."""
After = Annotated[str | None, QueryParameter(description="The `next` of the page before; left out for the first.")]
"""The type of the parameter ``after``; its default is None."""


def fitting(payloads: Iterable[bytes], room: int = PAGE_BYTES, *, least: int = 1) -> int:
    """Return the number of first payloads that have at most ``room`` bytes in total, but at least ``least``."""
    return max(sum(end <= room for end in accumulate(map(len, payloads))), least)


class Page(msgspec.Struct, Generic[T], kw_only=True):
    """One page of a list."""

    items: list[T]
    next: str | None = None
    """The parameter ``after`` of the next page; None on the last page."""
