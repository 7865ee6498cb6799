"""One empty dictionary and one empty list, which are shared by all objects without items.

Most sessions and feeds are idle, and an empty dictionary takes 64 bytes. An object replaces the shared one before it
adds anything: ``self.waiting = self.waiting or {}``. Additions to the shared dictionary or list raise `TypeError`, so
that no object can see another's items. Removals find nothing, as in any empty collection.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

__all__ = ["EMPTY_DICT", "EMPTY_LIST"]


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError("an empty container that many objects share can't take items")


class _EmptyDict(dict[Any, Any]):
    __slots__ = ()
    __setitem__ = setdefault = update = __ior__ = _refuse


class _EmptyList(list[Any]):
    __slots__ = ()
    append = extend = insert = __iadd__ = __setitem__ = _refuse


EMPTY_DICT: Final[dict[Any, Any]] = _EmptyDict()
EMPTY_LIST: Final[list[Any]] = _EmptyList()
