"""The databases that the settings describe: opening them, and applying layouts, persistence rules and retention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import topicstore as ts
from topicstore.contract.errors import (
    ClusterNotReadyError,
    IncompatibleError,
    InvalidOptionError,
    ManifestMismatchError,
    ShardElsewhereError,
    ShardMovedError,
    UnknownPluginError,
)
from topicstore.contract.options import options_dict
from topicstore.plugins import check_pair, registry
from topicstore.pubsub.persistence_rules import PersistenceRule
from topicstore.runtime.closing import Closer
from topicstore.storage.directory.manifest import DEFAULT_BACKEND, DEFAULT_LAYOUT, Manifest, read_manifest
from topicstore.storage.generations import GenerationInfo

from .config.model import MESSAGES, ServerSettings, SettingsError, StorageSettings
from .config.units import Period

if TYPE_CHECKING:
    from topicstore.replication.settings import Cluster

__all__ = [
    "begin_generation",
    "change_database",
    "changed_limits",
    "check_database",
    "check_fixed",
    "check_new",
    "missing_rules",
    "next_layout",
    "opened",
    "places",
]

_DELIVERED = 600.0
"""The age in seconds from which messages go that only sessions needed, in databases whose retention was never set."""
_RETENTION_INTERVAL = 60.0
"""Seconds between two runs of retention while nothing is stored."""
_FIXED = {"backend": "backend", "n_shards": "shards", "durability": "durability"}
"""The settings that are fixed when a database is created, with their names in the manifest."""


@contextmanager
def opened(settings: ServerSettings, path: Path, cluster: Cluster | None = None) -> Iterator[Mapping[str, ts.Database]]:
    """Open the databases of all storages, the database of the messages in ``path``; the context closes them.

    cluster: the cluster that shares the messages, if the settings have one (`topicstore.server.cluster.cluster_of`).

    Raises `SettingsError` for unknown plugins and settings that are fixed, and the errors of `topicstore.open`.
    """
    with ExitStack() as open_ones:
        found: dict[str, ts.Database] = {}
        for name, one, directory in places(settings, path):
            how: dict[str, Any] = {}
            if name == MESSAGES and settings.cluster is not None and cluster is not None:
                if one.durability is not None:
                    raise SettingsError(
                        f"durable_storage.{name}.durability: it is not set in a cluster: what is stored is as durable "
                        "as the cluster's log store"
                    )
                how = {"cluster": cluster, "site": settings.cluster.site}
            found[name] = open_ones.enter_context(_opened(name, one, directory, how))
        yield found


def places(settings: ServerSettings, path: Path) -> list[tuple[str, StorageSettings, Path]]:
    """Return all storages with their directories; the storage of the messages, in ``path``, comes first.

    Raises `SettingsError` if two of them have the same directory.
    """
    found = [(MESSAGES, settings.messages, path)]
    for name, one in settings.durable_storage.items():
        if name != MESSAGES and one.data_dir is not None:
            for other, _, directory in found:
                if directory.resolve() == one.data_dir.resolve():
                    raise SettingsError(
                        f"durable_storage.{name}.data_dir: {one.data_dir} is the directory of {other!r}; "
                        "each storage needs its own"
                    )
            found.append((name, one, one.data_dir))
    return found


def _opened(name: str, settings: StorageSettings, path: Path, how: Mapping[str, Any]) -> ts.Database:
    """Open or create the database of a storage; begin a new generation if the settings name another layout.

    ``how`` has further arguments of `topicstore.open`.
    """
    manifest = read_manifest(path)
    wanted: dict[str, Any] = {"durability": settings.durability}
    options = dict(settings.options)
    if manifest is None:
        check_new(name, settings)
        wanted |= {"backend": settings.backend, "shards": settings.n_shards, "layout": settings.layout.get("type")}
        if settings.layout_options:
            options[settings.layout.get("type", DEFAULT_LAYOUT)] = settings.layout_options
    else:
        check_fixed(name, settings, manifest)
    arguments = {key: value for key, value in wanted.items() if value is not None}
    arguments |= {"plugins": settings.plugins, "options": options, **how}
    with Closer() as closer:
        try:
            db = ts.open(path, **arguments)
        except ManifestMismatchError:
            if not how or manifest is not None:
                raise
            # The cluster exists already, perhaps with another first layout; a later generation has this layout.
            arguments |= {"layout": None, "options": settings.options}
            db = ts.open(path, **arguments)
        closer.add(db.close)
        begin_generation(name, db, settings)
        return db


def check_new(name: str, settings: StorageSettings) -> None:
    """Raise `SettingsError` if a database can't be created as settings say."""
    backend = settings.backend if settings.backend is not None else DEFAULT_BACKEND
    with _placed(name, "backend"):
        registry().backend(backend)
    _full_options(name, backend, settings.layout.get("type", DEFAULT_LAYOUT), settings.layout_options)


def _full_options(name: str, backend: str, layout: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a layout. Raises `SettingsError` for an unknown layout, backend or option."""
    with _placed(name, "layout"):
        check_pair(registry().backend(backend), registry().layout(layout))
        return options_dict(registry().full_options(layout, options))


@contextmanager
def _placed(name: str, key: str) -> Iterator[None]:
    """Convert errors of plugins to `SettingsError` with the name of the storage's setting."""
    try:
        yield
    except (IncompatibleError, InvalidOptionError, UnknownPluginError) as bad:
        raise SettingsError(f"durable_storage.{name}.{key}: {bad}") from bad


def check_fixed(name: str, settings: StorageSettings, manifest: Manifest) -> None:
    """Raise `SettingsError` if settings contradict the fixed properties of a database."""
    for key, field in _FIXED.items():
        wanted, has = getattr(settings, key), getattr(manifest, field)
        if wanted is not None and wanted != has:
            raise SettingsError(
                f"durable_storage.{name}.{key}: the database was created with {has!r}, which can't be changed to "
                f"{wanted!r}; take its messages over into a new one that has it, with 'topicstore replay' and "
                "'topicstore import'"
            )


def next_layout(
    name: str, settings: StorageSettings, manifest: Manifest, current: GenerationInfo
) -> tuple[str, dict[str, Any] | None] | None:
    """Return the layout and options of the generation that the settings require; None if the current one has them.

    Options that the settings don't name keep their values. Raises `SettingsError`.
    """
    layout, given = settings.layout.get("type", current.layout), settings.layout_options
    full = _full_options(name, manifest.backend, layout, given)
    if layout != current.layout:
        return layout, given or None
    if all(full[key] == current.options.get(key) for key in given):
        return None
    return layout, {**current.options, **given}


def begin_generation(name: str, db: ts.Database, settings: StorageSettings) -> int | None:
    """Begin a generation with the settings' layout, and return its number; None if the current one has that layout."""
    following = next_layout(name, settings, db.manifest, db.generations()[-1])
    return None if following is None else db.add_generation(*following)


def check_database(db: ts.Database, settings: ServerSettings) -> None:
    """Raise `SettingsError` if settings can't be applied to a database."""
    check_fixed(MESSAGES, settings.messages, db.manifest)
    next_layout(MESSAGES, settings.messages, db.manifest, db.generations()[-1])


def change_database(db: ts.Database, settings: ServerSettings) -> str | None:
    """Apply settings to a database: its layout, its persistence rules, its retention limits.

    Settings that are not set don't change the database, except that a server removes messages that only sessions needed
    if retention was never set. Only differences are written. On a site of a cluster, the owner of shard 0 writes rules
    and limits. Return the reason if they can't be written here now; else None.
    """
    begin_generation(MESSAGES, db, settings.messages)
    db.retention.start(_RETENTION_INTERVAL)
    try:
        for rule in missing_rules(db, settings):
            db.persistence.add(rule.topic_filter, client_id=rule.client_id, least_qos=rule.least_qos)
        if limits := changed_limits(db, settings):
            db.retention.set(**limits)
    except (ClusterNotReadyError, ShardElsewhereError, ShardMovedError) as later:
        return str(later)
    return None


def missing_rules(db: ts.Database, settings: ServerSettings) -> list[PersistenceRule]:
    """Return the settings' persistence rules that a database doesn't have."""
    has = set(db.persistence)
    return [rule for one in settings.durable_sessions.persistence if (rule := one.rule()) not in has]


def _kept_by_filter(settings: ServerSettings) -> dict[str, float | None]:
    """Return the times of the persistence rules by topic filter; of rules with the same filter the longest."""
    found: dict[str, Period] = {}
    for rule in settings.durable_sessions.persistence:
        if rule.keep is not None:
            found[rule.topic_filter] = max(rule.keep, found.get(rule.topic_filter, rule.keep))
    return {topic_filter: period.limit for topic_filter, period in found.items()}


def changed_limits(db: ts.Database, settings: ServerSettings) -> dict[str, Any]:
    """Return the settings' retention limits that differ from a database's, as arguments of `Retention.set`."""
    period, storage = settings.durable_sessions.message_retention_period, settings.messages
    delivered = settings.durable_sessions.delivered_retention_period
    wanted: dict[str, Any] = {}
    if delivered is not None:
        wanted["delivered"] = delivered.limit
    elif not db.retention.was_set():
        wanted["delivered"] = _DELIVERED
    if period is not None:
        wanted["max_age"] = period.limit
    if storage.quota is not None:
        wanted["max_bytes"] = storage.quota.limit
    if storage.when_full is not None:
        wanted["when_full"] = storage.when_full
    has = db.retention.settings
    if kept := _kept_by_filter(settings):
        wanted["filters"] = {**has.filters, **kept}
    return {name: value for name, value in wanted.items() if getattr(has, name) != value}
