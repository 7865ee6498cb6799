"""`Objects`: a log store in a dict, for tests and checkers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from topicstore.contract.log_store import LogStore, ObjectExistsError, ObjectNotFoundError

__all__ = ["Objects"]


class Objects(LogStore):
    """A log store in a dict, which all sites share."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self._lock = threading.Lock()

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> LogStore:  # noqa: ARG003 - it keeps everything in itself
        """Return an empty store, whatever the URL is."""
        return cls()

    @property
    def place(self) -> str:
        """The URL that errors name."""
        return "memory:///"

    def create(self, name: str, data: bytes) -> None:
        """Create an object, unless its name is taken."""
        with self._lock:
            if name in self.objects:
                raise ObjectExistsError(name, self.place)
            self.objects[name] = data

    def get(self, name: str) -> bytes:
        """Return the contents of an object."""
        with self._lock:
            if name not in self.objects:
                raise ObjectNotFoundError(name, self.place)
            return self.objects[name]

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        """Yield all names in order, in one page."""
        with self._lock:
            found = sorted(name for name in self.objects if name.startswith(prefix + "/") and name > after)
        if found:
            yield found

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        with self._lock:
            self.objects.pop(name, None)
