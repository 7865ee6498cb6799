"""Releasing resources: all are released even if some releases fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from topicstore.runtime.closing import Closer, close_all


def releases(done: list[int], failures: dict[int, BaseException]) -> list[Callable[[], None]]:
    """Return three release functions, some of which raise after they have released."""

    def release(number: int) -> None:
        done.append(number)
        if number in failures:
            raise failures[number]

    return [lambda number=number: release(number) for number in range(3)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ({}, None),
        ({0: ValueError()}, ValueError),
        ({0: ValueError(), 2: KeyError()}, ExceptionGroup),
        ({0: ValueError(), 1: KeyboardInterrupt()}, KeyboardInterrupt),
    ],
)
def test_all_resources_are_released(failures: dict[int, BaseException], told: type[BaseException] | None) -> None:
    """All resources are released; a single failure is raised as it is, several as a group, and Ctrl-C before others."""
    done: list[int] = []
    if told is None:
        close_all(releases(done, failures))
    else:
        with pytest.raises(told) as raised:
            close_all(releases(done, failures))
        assert set(getattr(raised.value, "exceptions", [raised.value])) <= set(failures.values())
    assert [0, 1, 2] == done


def test_nested_failures_are_one_group() -> None:
    """Nested failures are raised as one flat group."""

    def inner() -> None:
        close_all(releases([], {0: ValueError("a"), 1: ValueError("b")}))

    with pytest.raises(ExceptionGroup) as raised:
        close_all((inner, *releases([], {2: ValueError("c")})))
    assert ["a", "b", "c"] == [str(failure) for failure in raised.value.exceptions]


def test_a_failed_opening_raises_its_own_error() -> None:
    """If an opening fails and so does releasing, the opening's error is raised, with a note about the other error."""
    done: list[int] = []

    def opening() -> None:
        with Closer() as closer:
            for release in releases(done, {1: KeyError("gone")}):
                closer.add(release)
            raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="the disk is full") as raised:
        opening()
    assert [2, 1, 0] == done
    assert "KeyError: 'gone'" in raised.value.__notes__[0]


def test_acquired_resources_stay_until_release() -> None:
    """Resources stay acquired until `release` is called, which may be repeated."""
    done: list[int] = []
    with Closer() as closer:
        closer.add(releases(done, {})[0])
    assert [] == done
    closer.release()
    closer.release()
    assert [0, 0] == done
