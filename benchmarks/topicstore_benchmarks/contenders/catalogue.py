"""The catalogue of all contenders by name, with the reason if one can't be measured on this machine."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Literal

import msgspec
from topicstore.plugins import registry

from .contender import Contender, Durability

__all__ = ["ContenderSpec", "Kind", "catalogue"]

Kind = Literal["topicstore", "peer", "limit"]


class ContenderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a contender, passed between processes as JSON. It doesn't import the contender's modules."""

    name: str
    kind: Kind
    target: str
    """``"module:Class"`` of a `Contender`."""
    arguments: dict[str, Any] = {}
    """The arguments of the class, in addition to name, path and durability."""
    durabilities: tuple[Durability, ...] = ("commit", "sync")
    """The durabilities that the contender supports."""
    needs: tuple[str, ...] = ()
    """Modules that the contender requires."""
    install: str = ""
    """The requirement that installs these modules."""
    backend: str | None = None
    layout: str | None = None
    missing: str | None = None
    """Why the contender can't be measured, as its plugin reports, or None."""

    def why_missing(self) -> str | None:
        """Return why the contender can't be measured on this machine, or None if it can."""
        if self.missing is not None:
            return self.missing
        absent_modules = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f'needs {", ".join(absent_modules)}: pip install "{self.install}"' if absent_modules else None

    def make(self, path: Path, durability: Durability) -> Contender:
        """Create the contender, without opening its store."""
        module, _, name = self.target.partition(":")
        target: type[Contender] = getattr(importlib.import_module(module), name)
        return target(self.name, path, durability=durability, **self.arguments)


_HERE = __package__
_PEERS = (ContenderSpec(name="sqlite", kind="peer", target=f"{_HERE}.sqlite:SqliteContender"),)
_LIMITS = (
    *(
        ContenderSpec(
            name=f"raw {backend}",
            kind="limit",
            target=f"{_HERE}.limits:{backend.capitalize()}Limit",
            needs=(module,),
            install=f"topicstore[{backend}]",
            backend=backend,
        )
        for backend, module in (("rocksdb", "rocksdict"), ("leveldb", "plyvel"), ("duckdb", "duckdb"))
    ),
    ContenderSpec(
        name="parquet",
        kind="limit",
        target=f"{_HERE}.limits:ParquetLimit",
        durabilities=("commit",),  # batches can't be synced: the file is readable only after it is closed
    ),
)


def catalogue() -> dict[str, ContenderSpec]:
    """Return all contenders: every compatible pair of a persistent backend and a layout, the peers, and the limits.

    The field ``missing`` of a pair names its missing dependencies.
    """
    pairs = (
        ContenderSpec(
            name=f"{pair.backend.name}-{pair.layout.name}",
            kind="topicstore",
            target=f"{_HERE}.database:DatabaseContender",
            arguments={"layout": pair.layout.name, "backend": pair.backend.name},
            backend=pair.backend.name,
            layout=pair.layout.name,
            missing=pair.why_absent(),
        )
        for pair in registry().pairs()
        if "persistent" in pair.backend.capabilities and pair.why_refused() is None
    )
    return {spec.name: spec for spec in (*pairs, *_PEERS, *_LIMITS)}
