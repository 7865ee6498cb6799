"""Opening the log store of a URL, and refusing a store that ignores the condition that an object's name be free."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.log_store import LogStore, NotConditionalError, ObjectExistsError, StorageUnavailableError
from topicstore.plugins import load_target, registry

__all__ = ["open_for_reading", "open_log_store", "probe"]

_PROBES = "probes"
"""The prefix of probe objects. `probe` deletes its object; a process that is killed may leave one."""


def open_log_store(url: str, options: Mapping[str, Any] | None = None) -> LogStore:
    """Open the log store at a URL, and `probe` it.

    Raises `UnknownPluginError` and `BackendUnavailableError` if nothing installed serves the scheme, and the errors of
    `LogStore.open` and `probe`.
    """
    store = open_for_reading(url, options)
    try:
        probe(store)
    except BaseException:
        store.close()
        raise
    return store


def open_for_reading(url: str, options: Mapping[str, Any] | None = None) -> LogStore:
    """Open the log store at a URL without a probe, so that its user needs no permission to write.

    Raises the errors of `open_log_store`, except those of `probe`.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        raise InvalidArgumentError(f"a log store is named by a URL, such as s3://bucket/prefix, not {url!r}")
    target: type[LogStore] = load_target(registry().log_store(scheme))
    return target.open(url, options or {})


def probe(store: LogStore) -> None:
    """Check that the store refuses to create an object a second time, and keeps the first one.

    Raises `NotConditionalError` if the store overwrites or accepts the second object, `LogStoreRefusedError` if it
    refuses the site, and `StorageUnavailableError` if it gives no answer.
    """
    name = f"{_PROBES}/{secrets.token_hex(16)}"
    try:
        store.create(name, b"first")
    except ObjectExistsError as lost:  # the name is random: a retried request has found the object of the first try
        raise StorageUnavailableError(f"{store.place} says that a new name is taken; try again") from lost
    taken = _is_taken(store, name)
    store.delete(name)
    if not taken:
        raise NotConditionalError(
            f"{store.place} created an object whose name was taken. Sites that share it could overwrite each other's "
            "entries. Use a store that keeps to the condition If-None-Match: *, as S3, Google Cloud Storage, Azure, "
            "MinIO and Ceph do"
        )


def _is_taken(store: LogStore, name: str) -> bool:
    try:
        store.create(name, b"second")
    except ObjectExistsError:
        return store.get(name) == b"first"
    return False
