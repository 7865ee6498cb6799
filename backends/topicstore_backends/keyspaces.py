"""What an engine has for each of its keyspaces."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from topicstore.contract.errors import InvalidArgumentError

__all__ = ["ByKeyspace"]

T = TypeVar("T")


class ByKeyspace(dict[str, T]):
    """A dict by keyspaces' names, which refuses keyspaces that the engine was opened without."""

    def __missing__(self, name: str) -> NoReturn:
        raise InvalidArgumentError(f"the engine was opened without keyspace {name!r}")
