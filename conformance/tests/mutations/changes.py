"""Changes of methods, from which the tables make their mutations.

A change is a function that is called instead of the method, with three arguments. ``call`` calls the method with its
arguments, of which named ones can be replaced. ``me`` is the method's object, in whose attributes the change may store
state. ``given`` has the arguments by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Change = Callable[[Callable[..., Any], Any, dict[str, Any]], Any]


def argument(**changed: Any) -> Change:
    """Call with other arguments, each of which is a value or a function of the given one."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        return call(**{name: new(given[name]) if callable(new) else new for name, new in changed.items()})

    return change


def result(changed: Callable[[Any], Any]) -> Change:
    """Replace the method's result with a function of it."""
    return lambda call, me, given: changed(call())


def lie(value: Any = None) -> Change:
    """Return the given value without calling the method."""
    return lambda call, me, given: value


def each(changed: Callable[[Any], Any], *, keep: Callable[[Any], object] = lambda _: True) -> Change:
    """Replace each yielded item with a function of it, and leave out results for which ``keep`` is false."""
    return lambda call, me, given: (new for item in call() if keep(new := changed(item)))


def at_once(whole: Callable[[list[Any]], Any]) -> Change:
    """Yield a single item, computed from the list of all yielded items, unless there are none."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Iterator[Any]:
        if items := list(call()):
            yield whole(items)

    return change


def nth(number: int, change: Change, *, once: bool = False) -> Change:
    """Apply a change only to each ``number``-th call of an object's method, or with ``once`` to the first such call."""

    def changed(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        counts = vars(me).setdefault("_counts", {})
        count = counts[changed] = counts.get(changed, 0) + 1
        return change(call, me, given) if (count == number if once else count % number == 0) else call()

    return changed


def when(holds: Callable[[Any, dict[str, Any]], object], change: Change) -> Change:
    """Apply a change only if a condition on the object and the arguments holds."""
    return lambda call, me, given: change(call, me, given) if holds(me, given) else call()


def swallow(*errors: type[Exception], value: Any = None) -> Change:
    """Suppress errors: return a value instead, or end the iteration if the method yields items."""

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
    """Raise the given error without calling the method."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        raise error

    return change


def disguise(error: type[Exception], other: type[Exception]) -> Change:
    """Replace an error that the method raises with another error."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        try:
            return call()
        except error as raised:
            raise other(str(raised)) from raised

    return change


def also(more: Callable[[Any, dict[str, Any]], object], *, before: bool = False) -> Change:
    """Also call another function, before or after the method."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        if before:
            more(me, given)
        found = call()
        if not before:
            more(me, given)
        return found

    return change


def twice(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
    """Call the method twice, and return the second result."""
    call()
    return call()


def late(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> None:
    """Delay each call of the method until the next one."""
    waiting = vars(me).setdefault("_waiting", [])
    waiting.append(call)
    if len(waiting) > 1:
        waiting.pop(0)()


def stale(by: Callable[[dict[str, Any]], Any]) -> Change:
    """Return the result of the first call with the same key; ``by`` computes the key from the arguments."""

    def change(call: Callable[..., Any], me: Any, given: dict[str, Any]) -> Any:
        known = vars(me).setdefault("_known", {})
        return known[by(given)] if by(given) in known else known.setdefault(by(given), call())

    return change
