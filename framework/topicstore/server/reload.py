"""New settings for a running server: changes that apply at once, that need a restart, or that are refused.

If any new setting can't be used, nothing changes: access rules, plugins, certificates and addresses are tried before
the first change, and the files that settings name must exist and be readable. Connected clients keep the negotiated
limits until they connect again; all other settings apply to them at once, including access rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import msgspec

from .access.access import Access
from .config.model import MESSAGES, ServerSettings
from .listeners import read_tls

__all__ = [
    "Reloaded",
    "check_files",
    "in_force",
    "new_access",
    "summary",
    "with_access_of",
]


def check_files(settings: ServerSettings) -> None:
    """Load the access plugins, and read the password and TLS files that settings name, as a start does.

    Raises `SettingsError`, `PasswordFileError` and `ListenError`.
    """
    Access(settings.authentication, settings.authorization).close()
    for name, one in settings.listeners.items():
        read_tls(name, one)
    if settings.http is not None and settings.http.tls is not None:
        from .listeners.tls import Certificate

        Certificate(settings.http.tls)
    if settings.cluster is not None:
        from .cluster import SiteTls

        SiteTls(settings.cluster)


_UNTIL_RESTART = ("data_dir", "n_sites", "options", "plugins", "replication_factor")
"""The settings of a storage whose changes need a restart."""
_RESTART = (
    ("cluster",),
    *(("durable_storage", "*", key) for key in _UNTIL_RESTART),
    ("http",),
    ("log", "file"),
    ("log", "format"),
)
"""The settings whose changes need a restart; ``*`` stands for any name."""
_STORAGE = ("durable_storage", MESSAGES)
_FIXED = tuple((*_STORAGE, key) for key in ("backend", "n_shards", "durability"))
"""The settings that are fixed in an existing database: another value is refused."""
_IN_THE_DATABASE = (
    *((*_STORAGE, key) for key in ("layout", "quota", "when_full")),
    ("durable_sessions", "message_retention_period"),
    ("durable_sessions", "delivered_retention_period"),
)
"""The settings that the database stores, so that they stay in force when the settings omit them."""
_RULES = ("durable_sessions", "persistence")


@attrs.frozen
class Reloaded:
    """The changes that new settings caused, as dotted names such as ``limits.connections``."""

    changed: tuple[str, ...]
    """Names of the settings that have changed."""
    kept: tuple[str, ...]
    """Names of settings that were removed, but stay in force because the database stores them."""
    needs_restart: tuple[str, ...]
    """Names of the settings that apply after a restart."""


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
    """Return whether a change needs a restart: one of `_RESTART`, or any change of a further storage."""
    if place[0] == "durable_storage" and place[1] != MESSAGES:
        return True
    return any(_lies_in(place, pattern) for pattern in _RESTART)


def _lies_in(place: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    return len(pattern) <= len(place) and all(part in ("*", key) for part, key in zip(pattern, place, strict=False))


def _is_kept(place: tuple[str, ...], before: ServerSettings, after: ServerSettings) -> bool:
    """Return whether a difference changes nothing, because the database keeps or already has the value."""
    if place == _RULES:
        return set(after.durable_sessions.persistence) <= set(before.durable_sessions.persistence)
    if place in _FIXED:
        return True
    return any(_lies_in(place, pattern) for pattern in _IN_THE_DATABASE) and _at(after, place) is None


def _at(settings: Any, place: tuple[str, ...]) -> Any:
    """Return the value of a setting; None if it is not set."""
    for key in place:
        settings = (_table(settings) or {}).get(key)
    return settings


def in_force(before: ServerSettings, after: ServerSettings) -> ServerSettings:
    """Return the settings in force after a reload: the new ones, except those that need a restart."""
    messages = msgspec.structs.replace(
        after.messages,
        **{key: getattr(before.messages, key) for key in _UNTIL_RESTART},
    )
    return msgspec.structs.replace(
        after,
        durable_storage={**before.durable_storage, MESSAGES: messages},
        cluster=before.cluster,
        http=before.http,
        log=msgspec.structs.replace(after.log, file=before.log.file, format=before.log.format),
    )


def with_access_of(before: ServerSettings, after: ServerSettings) -> ServerSettings:
    """Return new settings with the old access settings, for a server whose program has passed its own `Access`."""
    return msgspec.structs.replace(after, authentication=before.authentication, authorization=before.authorization)


def new_access(before: ServerSettings, after: ServerSettings) -> Access | None:
    """Return the access rules of new settings; None if they are unchanged. Raises the errors of `Access`."""
    if (before.authentication, before.authorization) == (after.authentication, after.authorization):
        return None
    return Access(after.authentication, after.authorization)


def summary(before: ServerSettings, after: ServerSettings) -> Reloaded:
    """Compare settings: return which changes apply at once, which the database keeps, and which need a restart."""
    one, other = _complete(before), _complete(after)
    changed, kept, restart = list[str](), list[str](), list[str]()
    for place in _differences(one, other, ()):
        told = restart if _restarts(place) else kept if _is_kept(place, one, other) else changed
        told.append(".".join(place))
    return Reloaded(tuple(changed), tuple(kept), tuple(restart))


def _complete(settings: ServerSettings) -> ServerSettings:
    """Return settings in which the storage of messages is present, with its defaults if need be."""
    return msgspec.structs.replace(settings, durable_storage={**settings.durable_storage, MESSAGES: settings.messages})
