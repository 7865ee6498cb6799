"""The plugins under test: their factories, the capabilities they declare, and direct access to stored values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs
from topicstore.contract.engine import Backend, Key, Keyspace
from topicstore.contract.layout import Layout
from topicstore_backends.memory import MemoryBackend, MemoryOptions

__all__ = ["BackendSubject", "LayoutSubject"]


def _frozenset(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class BackendSubject:
    """A backend under test.

    ``raw_get`` and ``raw_put`` access the underlying store without the API, so that errors of reads and writes can't
    cancel out. Their first argument is the directory of the closed shard or, if the backend is not ``persistent``, the
    open engine. Tests that need a missing function are skipped.
    """

    make: Callable[[], Backend]
    """A function that returns a new backend object.

    Child processes import it, so it must be a top-level function, or a `functools.partial` of one with JSON values.
    """
    capabilities: frozenset[str] = attrs.field(converter=_frozenset)
    """The capabilities that the plugin declares."""
    raw_get: Callable[[Any, Keyspace[Any], Key], bytes | None] | None = None
    raw_put: Callable[[Any, Keyspace[Any], Key, bytes], None] | None = None


def _memory() -> Backend:
    return MemoryBackend(MemoryOptions())


@attrs.frozen(kw_only=True)
class LayoutSubject:
    """A layout under test, on an engine that is known to be correct."""

    make: Callable[[], Layout]
    """A function that returns a new layout object.

    Its options should make it learn from a few topics, and make its hashes collide, if it has any.
    """
    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    """The capabilities that the plugin declares."""
    backend: Callable[[], Backend] = _memory
    """A function that returns the engine's backend, with which tests read and damage values directly."""
    backend_capabilities: frozenset[str] = attrs.field(default=frozenset(("fast_seek",)), converter=_frozenset)
    """The capabilities that the engine's plugin declares."""
