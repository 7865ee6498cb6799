"""What a mutation makes of a method: the vocabulary of the tables.

A change is called instead of the method, with ``call``, which calls the method with its arguments or with those that it
is given by name; ``me``, the method's object, on which it may keep what it remembers; and ``given``, the arguments by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Change = Callable[[Callable[..., Any], Any, dict[str, Any]], Any]


def argument(**changed: Any) -> Change:
    """Call with other arguments: with a function of what was given, or with a value."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        return call(**{name: new(given[name]) if callable(new) else new for name, new in changed.items()})

    return change


def result(changed: Callable[[Any], Any]) -> Change:
    """Return something else: a function of the result."""
    return lambda call, me, given: changed(call())


def lie(value: Any = None) -> Change:
    """Do nothing, and return a value."""
    return lambda call, me, given: value


def each(changed: Callable[[Any], Any], *, keep: Callable[[Any], object] = lambda _: True) -> Change:
    """Yield a function of each item that is yielded, unless it is not to be kept."""
    return lambda call, me, given: (new for item in call() if keep(new := changed(item)))


def at_once(whole: Callable[[list[Any]], Any]) -> Change:
    """Yield what a function makes of all that is yielded, if that isn't empty."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Iterator[Any]:
        if items := list(call()):
            yield whole(items)

    return change


def nth(number: int, change: Change, *, once: bool = False) -> Change:
    """Make a change at each ``number``-th call of an object's method only, or once."""

    def changed(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        counts = vars(me).setdefault("_counts", {})
        count = counts[changed] = counts.get(changed, 0) + 1
        return change(call, me, given) if (count == number if once else count % number == 0) else call()

    return changed


def when(holds: Callable[[Any, dict[str, Any]], object], change: Change) -> Change:
    """Make a change only when something holds of the object and the arguments."""
    return lambda call, me, given: change(call, me, given) if holds(me, given) else call()


def swallow(*errors: type[Exception], value: Any = None) -> Change:
    """Return a value instead of raising an error; end instead, where items are yielded."""

    def rest(items: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from items
        except errors:
            return

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        try:
            found = call()
        except errors:
            return value
        return rest(found) if isinstance(found, Iterator) else found

    return change


def fail(error: Exception) -> Change:
    """Raise an error instead of doing anything."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        raise error

    return change


def disguise(error: type[Exception], other: type[Exception]) -> Change:
    """Raise another error than the method does."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        try:
            return call()
        except error as raised:
            raise other(str(raised)) from raised

    return change


def also(more: Callable[[Any, dict[str, Any]], object], *, before: bool = False) -> Change:
    """Do something more, after the call or before it."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        if before:
            more(me, given)
        found = call()
        if not before:
            more(me, given)
        return found

    return change


def twice(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
    """Do it a second time."""
    call()
    return call()


def late(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> None:
    """Do at each call what the last one was to do."""
    waiting = vars(me).setdefault("_waiting", [])
    waiting.append(call)
    if len(waiting) > 1:
        waiting.pop(0)()


def stale(by: Callable[[dict[str, Any]], Any]) -> Change:
    """Return what the first call with the same arguments returned."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        known = vars(me).setdefault("_known", {})
        return known[by(given)] if by(given) in known else known.setdefault(by(given), call())

    return change
