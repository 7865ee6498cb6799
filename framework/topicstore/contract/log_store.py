"""Log stores: where sites that share a database keep its log and what belongs to it, as named objects.

A log store can do four things. One of them, creating an object only if its name is free, is all on which sites agree:
the process that creates the next entry of a log has written it. What must hold:

* `LogStore.create` of one name succeeds for one caller, whatever the number of threads, processes and machines that
  try. The object is then whole and on disk, and stays until it is deleted. Objects are never changed.
* `LogStore.get` and `LogStore.names` see each object that was created before they were called, and none that was
  deleted before. A cache, or a replica of the store that is behind, breaks the log.
* An error other than `ObjectExistsError` and `ObjectNotFoundError` says nothing about whether the call took effect.

A class that implements this is named by a `topicstore.contract.plugin_specs.LogStoreSpec`, which a plugin returns from
the hook ``topicstore_logs``. `topicstore_conformance.log_store.LogStoreSuite` tests it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from .errors import InvalidArgumentError, RecoverableError, TopicstoreError, UnrecoverableError
from .options import NoOptions

__all__ = [
    "MAX_NAME",
    "LogStore",
    "NotConditionalError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "StorageUnavailableError",
    "check_name",
]

MAX_NAME = 512
"""The number of characters that a name of an object may have."""
_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(?:/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")


class ObjectExistsError(TopicstoreError):
    """The name is taken, so nothing was created. Read the object to see whose it is; it may be one's own."""

    def __init__(self, name: str, store: str) -> None:
        super().__init__(f"{store}: there is an object {name} already")
        self.name = name


class ObjectNotFoundError(TopicstoreError):
    """There is no object of that name: it was not created yet, or was deleted."""

    def __init__(self, name: str, store: str) -> None:
        super().__init__(f"{store}: there is no object {name}")
        self.name = name


class StorageUnavailableError(RecoverableError):
    """The store gave no answer that says what happened; the call may have taken effect, or may still do so.

    The message says what to look at: the network, the address, the credentials, the disk. Try the same call again.
    """


class NotConditionalError(UnrecoverableError):
    """The store creates an object though its name is taken, so sites could overwrite each other's entries.

    Nothing was written but the probe. Use a store that keeps to the condition ``If-None-Match: *``.
    """


class LogStore(ABC):
    """A place with named objects. It may be used by many threads at once."""

    Options: ClassVar[type[Any]] = NoOptions
    """The class of its options, a frozen attrs class."""

    @classmethod
    @abstractmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> LogStore:
        """Return the store at a URL; ``options`` are values of `Options`, by name.

        Raises `InvalidArgumentError` for a URL that names none, `InvalidOptionError`, and `StorageUnavailableError`.
        """

    @property
    @abstractmethod
    def place(self) -> str:
        """The URL, without credentials, for messages."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Create an object. It is whole and on disk when the call returns.

        Raises `ObjectExistsError` if the name is taken, and `StorageUnavailableError`, after which it is unknown
        whether the object was created.
        """

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return an object. Raises `ObjectNotFoundError` and `StorageUnavailableError`."""

    @abstractmethod
    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        """Yield, in chunks that are not empty, the names that begin with ``prefix`` and a slash, ascending.

        With ``after`` only those above it, which is itself a whole name. What is created or deleted meanwhile may or
        may not be among them. Raises `StorageUnavailableError`, also between chunks.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object, if there is one. Raises `StorageUnavailableError`."""

    def close(self) -> None:
        """Release the resources of the store. Objects stay."""
        return


def check_name(name: str) -> str:
    """Return a name, or raise `InvalidArgumentError` for one that not all stores could keep."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"the name of an object is made of letters, digits and ._=-, with slashes between parts that don't begin "
            f"with a dot, and of at most {MAX_NAME} characters, not {name!r}"
        )
    return name
