"""The subjects of suites: how to make one, what it declares, and ways around the API under test."""

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

    ``raw_get`` and ``raw_put`` go around the API, so that a backend can't agree with its own mistakes.
    Their first argument is the directory of the closed shard or, of a backend that is not
    ``persistent``, the open engine. Where they are missing the tests that need them are skipped.
    """

    make: Callable[[], Backend]
    """A function that returns a new backend object: one at the top of a module, or `functools.partial` of one with
    plain values, because child processes import it."""
    capabilities: frozenset[str] = attrs.field(converter=_frozenset)
    """The capabilities that the plugin declares."""
    raw_get: Callable[[Any, Keyspace[Any], Key], bytes | None] | None = None
    raw_put: Callable[[Any, Keyspace[Any], Key, bytes], None] | None = None


def _memory() -> Backend:
    return MemoryBackend(MemoryOptions())


@attrs.frozen(kw_only=True)
class LayoutSubject:
    """A layout under test, over an engine that is known to be right."""

    make: Callable[[], Layout]
    """A function that returns a new layout object, with small options, so that it learns from a few topics and its
    hashes collide, if it has any."""
    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    """The capabilities that the plugin declares."""
    backend: Callable[[], Backend] = _memory
    """A function that returns the engine's backend, through which values are read and damaged around the layout."""
    backend_capabilities: frozenset[str] = attrs.field(default=frozenset(("fast_seek",)), converter=_frozenset)
    """The capabilities that the engine's plugin declares."""
