"""What a run measures: its plan, as ``run.json`` has it, and the groups that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from topicstore.contract.errors import InvalidArgumentError

from topicstore_benchmarks.contenders.catalogue import ContenderSpec
from topicstore_benchmarks.contenders.contender import Durability

__all__ = ["Group", "Plan", "PlanMismatchError", "Run", "Settings", "WorkloadPlan"]


class PlanMismatchError(InvalidArgumentError):
    """The directory has another run than the one that was asked for. Nothing was measured."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How each cell measures; the same for all contenders."""

    batch: int = 1_000
    """Messages of a batch that is stored."""
    repeat: int = 5
    """Most timed runs of a replay within a cell; the median counts."""
    patience: float = 2.0
    """Seconds of timed runs of one phase after which no other begins."""
    mixed_seconds: float = 10.0
    mixed_rate: float = 100.0
    """Batches that are due in each second of ``mixed``; `phases` says how large they are."""
    phase_timeout: float = 900.0
    """Seconds after which a cell that doesn't answer is ended."""


class WorkloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A workload by its definition."""

    name: str
    source: str
    values: dict[str, Any]
    messages: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    workloads: tuple[WorkloadPlan, ...]
    durabilities: tuple[Durability, ...]
    contenders: tuple[ContenderSpec, ...]
    """Those that take part."""
    repetitions: int
    settings: Settings

    def groups(self) -> Iterator[Group]:
        """Yield all groups: each repetition has every workload, so that an early end leaves some of all."""
        for repetition in range(1, self.repetitions + 1):
            for workload in self.workloads:
                for durability in self.durabilities:
                    yield Group(workload=workload.name, durability=durability, repetition=repetition)

    def differences(self, other: Plan) -> list[str]:
        """Return the names of what differs."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All contenders with one workload and durability, once."""

    workload: str
    durability: Durability
    repetition: int

    @property
    def name(self) -> str:
        """Of its file, and in its rows."""
        return f"{self.workload}-{self.durability}-{self.repetition}"

    def order(self, contenders: tuple[ContenderSpec, ...], repetitions: int) -> list[ContenderSpec]:
        """Return the contenders that have the durability, beginning with another one in each repetition."""
        able = [spec for spec in contenders if self.durability in spec.durabilities]
        first = len(able) * (self.repetition - 1) // repetitions
        return [*able[first:], *able[:first]]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run: ``run.json``."""

    name: str
    created: str
    """ISO 8601, UTC."""
    command: list[str]
    """The arguments behind ``topicstore bench``, with which to repeat it."""
    machine: dict[str, Any]
    versions: dict[str, str]
    skipped_workloads: dict[str, str]
    """Workloads whose messages aren't here, with the reason."""
    skipped_contenders: dict[str, str]
    """Contenders that can't take part, with the reason."""
    left_out: tuple[ContenderSpec, ...]
    """The same ones, as their rows need them."""
    plan: Plan

    def save(self, directory: Path) -> None:
        """Write it, whole or not at all."""
        making = directory / ".run.json"
        making.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        making.rename(directory / "run.json")

    @classmethod
    def load(cls, directory: Path) -> Run | None:
        """Return the run of a directory, or None if there is none yet."""
        path = directory / "run.json"
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as bad:
            raise PlanMismatchError(f"{path} is not a run that this version can go on with: {bad}") from bad
