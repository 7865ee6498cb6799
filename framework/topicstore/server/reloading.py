"""New settings for a server that runs: what can change at once, what needs a restart, and what can't change at all.

Nothing is changed if anything of the new settings can't be used: access rules, plugins, certificates and addresses are
tried before the first change is made. Clients that are connected keep what was settled with them until they connect
again; all else holds at once, also what they may do and be sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import msgspec

from .access.access import Access
from .settings import MESSAGES, ServerSettings

__all__ = ["Reloaded", "in_force", "new_access", "summary", "with_access_of"]

_RESTART = (
    ("durable_storage", "*", "data_dir"),
    ("durable_storage", "*", "plugins"),
    ("durable_storage", "*", "options"),
    ("http",),
    ("log", "file"),
)
"""The places whose changes need a restart; ``*`` stands for any name."""
_STORAGE = ("durable_storage", MESSAGES)
_FIXED = tuple((*_STORAGE, key) for key in ("backend", "n_shards", "durability"))
"""The places that say what the database is already: another value is refused."""
_IN_THE_DATABASE = (
    *((*_STORAGE, key) for key in ("layout", "quota", "when_full")),
    ("durable_sessions", "message_retention_period"),
)
"""The places of what is kept in the database, also when the settings say nothing of it any more."""
_RULES = ("durable_sessions", "persistence")


@attrs.frozen
class Reloaded:
    """What new settings have changed."""

    changed: tuple[str, ...]
    """The places of the settings that hold from now on, such as ``limits.connections``."""
    kept: tuple[str, ...]
    """The places of those that were taken out of the settings, but are kept in the database: it stays as it is."""
    needs_restart: tuple[str, ...]
    """The places of those that hold after a restart."""


def _differences(before: Any, after: Any, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if before == after:
        return
    one, other = _table(before), _table(after)
    if one is None or other is None:
        yield place
        return
    for key in dict.fromkeys([*one, *other]):
        if key not in one or key not in other:
            yield (*place, key)
        else:
            yield from _differences(one[key], other[key], (*place, key))


def _table(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return value if isinstance(value, dict) else None


def _restarts(place: tuple[str, ...]) -> bool:
    """Return whether a change at a place needs a restart: one that it names, or another storage as a whole."""
    if place[0] == "durable_storage" and place[1] != MESSAGES:
        return True
    return any(_lies_in(place, pattern) for pattern in _RESTART)


def _lies_in(place: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    return len(pattern) <= len(place) and all(part in ("*", key) for part, key in zip(pattern, place, strict=False))


def _is_kept(place: tuple[str, ...], before: ServerSettings, after: ServerSettings) -> bool:
    """Return whether a difference changes nothing, because the database has what was named before, or is named now."""
    if place == _RULES:
        return set(after.durable_sessions.persistence) <= set(before.durable_sessions.persistence)
    if place in _FIXED:
        return True
    return any(_lies_in(place, pattern) for pattern in _IN_THE_DATABASE) and _at(after, place) is None


def _at(settings: Any, place: tuple[str, ...]) -> Any:
    """Return what settings have at a place; None if they have nothing."""
    for key in place:
        settings = (_table(settings) or {}).get(key)
    return settings


def in_force(before: ServerSettings, after: ServerSettings) -> ServerSettings:
    """Return the settings that hold after a reload: the new ones, but the old ones of what needs a restart."""
    messages = msgspec.structs.replace(
        after.messages,
        **{key: getattr(before.messages, key) for key in ("data_dir", "plugins", "options")},
    )
    return msgspec.structs.replace(
        after,
        durable_storage={**before.durable_storage, MESSAGES: messages},
        http=before.http,
        log=msgspec.structs.replace(after.log, file=before.log.file),
    )


def with_access_of(before: ServerSettings, after: ServerSettings) -> ServerSettings:
    """Return new settings with the old ones of who may do what, for a server whose program says that."""
    return msgspec.structs.replace(after, authentication=before.authentication, authorization=before.authorization)


def new_access(before: ServerSettings, after: ServerSettings) -> Access | None:
    """Return who may do what by new settings; None if they say the same as before. Raises what `Access` raises."""
    if (before.authentication, before.authorization) == (after.authentication, after.authorization):
        return None
    return Access(after.authentication, after.authorization)


def summary(before: ServerSettings, after: ServerSettings) -> Reloaded:
    """Return what differs: what can change at once, what the database keeps, and what needs a restart."""
    one, other = _complete(before), _complete(after)
    changed, kept, restart = list[str](), list[str](), list[str]()
    for place in _differences(one, other, ()):
        told = restart if _restarts(place) else kept if _is_kept(place, one, other) else changed
        told.append(".".join(place))
    return Reloaded(tuple(changed), tuple(kept), tuple(restart))


def _complete(settings: ServerSettings) -> ServerSettings:
    """Return settings that name the storage of the messages, though by its defaults."""
    return msgspec.structs.replace(settings, durable_storage={**settings.durable_storage, MESSAGES: settings.messages})
