"""Tests of the empty containers that idle sessions and feeds share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from topicstore.runtime.empty import EMPTY_DICT, EMPTY_LIST


def _add_all(items: list[int]) -> None:
    items += [1]


def _merge(items: dict[int, int]) -> None:
    items |= {1: 1}


@pytest.mark.parametrize(
    "add",
    [
        lambda: EMPTY_DICT.update({1: 1}),
        lambda: EMPTY_DICT.setdefault(1, 1),
        lambda: EMPTY_DICT.__setitem__(1, 1),
        lambda: _merge(EMPTY_DICT),
        lambda: EMPTY_LIST.append(1),
        lambda: EMPTY_LIST.extend([1]),
        lambda: EMPTY_LIST.insert(0, 1),
        lambda: EMPTY_LIST.__setitem__(slice(0), [1]),
        lambda: _add_all(EMPTY_LIST),
    ],
)
def test_shared_empty_containers_take_no_items(add: Callable[[], object]) -> None:
    """Each way of adding an item to a container that many objects share raises an error, and adds nothing."""
    with pytest.raises(TypeError, match="share"):
        add()
    assert ({}, []) == (EMPTY_DICT, EMPTY_LIST)
