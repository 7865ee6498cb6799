"""`CountedLogStore`: a log store whose requests are counted and timed by kind, because stores charge for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from topicstore.contract.log_store import LogStore, StorageUnavailableError
from topicstore.shard.writer import Latencies

from . import log_stores

__all__ = ["CountedLogStore", "RequestKind"]

RequestKind = Literal["put", "get", "list", "delete"]


class _Counting:
    """A call of the store while it is timed."""

    request = True
    """Whether the call has sent a request, and so is counted."""


class CountedLogStore(LogStore):
    """A log store with the durations of its requests, and the numbers of those that failed."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        """Held while a request is counted."""
        kinds: tuple[RequestKind, ...] = get_args(RequestKind)
        self.latencies: Mapping[RequestKind, Latencies] = {kind: Latencies() for kind in kinds}
        """The durations of all requests, by kind; a request for a taken or missing name is one that was answered."""
        self.failed: dict[RequestKind, int] = dict.fromkeys(kinds, 0)
        """The requests without a conclusive answer (`StorageUnavailableError`), by kind."""

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> CountedLogStore:
        """Return the store at a URL. Raises the errors of `log_stores.open_log_store`, which probes it."""
        return cls(log_stores.open_log_store(url, options))

    @property
    def place(self) -> str:
        """The URL of the store without credentials."""
        return self._store.place

    def create(self, name: str, data: bytes) -> None:
        """Create an object."""
        with self._counted("put"):
            self._store.create(name, data)

    def get(self, name: str) -> bytes:
        """Return the contents of an object."""
        with self._counted("get"):
            return self._store.get(name)

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        """Yield the names that begin with ``prefix``. Each list counts as a request, and so does an empty answer."""
        lists, requests = self._store.names(prefix, after), 0
        while True:
            with self._counted("list") as counting:
                found = next(lists, None)
                counting.request = found is not None or not requests
            if found is None:
                return
            requests += 1
            yield found

    def delete(self, name: str) -> None:
        """Delete an object."""
        with self._counted("delete"):
            self._store.delete(name)

    def close(self) -> None:
        """Release the store's resources."""
        self._store.close()

    @contextmanager
    def _counted(self, kind: RequestKind) -> Iterator[_Counting]:
        began, counting, failed = time.perf_counter(), _Counting(), False
        try:
            yield counting
        except StorageUnavailableError:
            failed = True
            raise
        finally:
            if counting.request:
                with self._lock:
                    self.latencies[kind].observe(time.perf_counter() - began)
                    self.failed[kind] += failed
