"""Application of the settings to a database: layout, persistence rules, and retention limits."""

from __future__ import annotations

from typing import Any

import topicstore as ts
from topicstore.pubsub.persistence_rules import PersistenceRule

from .settings import MESSAGES, ServerSettings
from .storages import begin_generation, check_fixed, next_layout

__all__ = ["change_database", "changed_limits", "check_database", "missing_rules"]


def check_database(db: ts.Database, settings: ServerSettings) -> None:
    """Raise `SettingsError` if settings can't be applied to a database."""
    check_fixed(MESSAGES, settings.messages, db.manifest)
    next_layout(MESSAGES, settings.messages, db.manifest, db.generations()[-1])


def change_database(db: ts.Database, settings: ServerSettings) -> None:
    """Apply settings to a database: its layout, its persistence rules, its retention limits.

    Settings that are not set don't change the database. Only differences are written.
    """
    begin_generation(MESSAGES, db, settings.messages)
    for rule in missing_rules(db, settings):
        db.persistence.add(rule.topic_filter, client_id=rule.client_id, least_qos=rule.least_qos)
    if limits := changed_limits(db, settings):
        db.retention.set(**limits)


def missing_rules(db: ts.Database, settings: ServerSettings) -> list[PersistenceRule]:
    """Return the settings' persistence rules that a database doesn't have."""
    has = set(db.persistence)
    return [rule for one in settings.durable_sessions.persistence if (rule := one.rule()) not in has]


def changed_limits(db: ts.Database, settings: ServerSettings) -> dict[str, Any]:
    """Return the settings' retention limits that differ from a database's, as arguments of `Retention.set`."""
    period, storage = settings.durable_sessions.message_retention_period, settings.messages
    wanted: dict[str, Any] = {}
    if period is not None:
        wanted["max_age"] = period.limit
    if storage.quota is not None:
        wanted["max_bytes"] = storage.quota.limit
    if storage.when_full is not None:
        wanted["when_full"] = storage.when_full
    has = db.retention.settings
    return {name: value for name, value in wanted.items() if getattr(has, name) != value}
