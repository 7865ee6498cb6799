"""The plan of a run, as stored in ``run.json``, and the trials that it consists of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from topicstore.contract.errors import InvalidArgumentError

from topicstore_benchmarks.contenders.catalogue import ContenderSpec
from topicstore_benchmarks.contenders.contender import Durability
from topicstore_benchmarks.workloads.definition import Definition

__all__ = ["Plan", "PlanMismatchError", "Run", "Settings", "Trial"]


class PlanMismatchError(InvalidArgumentError):
    """The directory has a different run from the requested one. Nothing was measured."""


_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]  # and finite: JSON has no infinity


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the measurement, the same for all contenders."""

    batch: _Count = 1_000
    """The number of messages in a stored batch."""
    repeat: _Count = 5
    """The most timed runs of a replay within a worker, whose median counts."""
    patience: _Positive = 2.0
    """Seconds of timed runs of one phase after which no further run begins."""
    mixed_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 10.0
    """How long ``mixed`` takes; 0 leaves it out."""
    mixed_rate: _Positive = 100.0
    """Batches that are due in each second of ``mixed``; `phases` says how large they are."""
    phase_timeout: _Positive = 900.0
    """Seconds after which a worker that doesn't answer is ended."""
    budget: _Positive | None = None
    """Seconds that all trials may take together; what doesn't fit is left out. None: as long as it takes."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    workloads: tuple[Definition, ...]
    durabilities: tuple[Durability, ...]
    contenders: tuple[ContenderSpec, ...]
    """The contenders that take part."""
    repetitions: int
    settings: Settings

    def trials(self) -> Iterator[Trial]:
        """Yield all trials: each repetition has every workload, so that an early end leaves some of all."""
        for repetition in range(1, self.repetitions + 1):
            for workload in self.workloads:
                for durability in self.durabilities:
                    yield Trial(workload=workload.name, durability=durability, repetition=repetition)

    def differences(self, other: Plan) -> list[str]:
        """Return the names of the fields that differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """All contenders with one workload and durability, once."""

    workload: str
    durability: Durability
    repetition: int

    @property
    def name(self) -> str:
        """The name of the trial in its file name and rows."""
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
    """The time of creation, in ISO 8601, UTC."""
    command: list[str]
    """The arguments of ``topicstore bench`` that repeat the run."""
    machine: dict[str, Any]
    versions: dict[str, str]
    skipped_workloads: dict[str, str]
    """Workloads whose messages are not available, with the reason."""
    skipped_contenders: dict[str, str]
    """Contenders that can't take part, with the reason."""
    left_out: tuple[ContenderSpec, ...]
    """The specifications of the skipped contenders, for their rows."""
    plan: Plan

    def save(self, directory: Path) -> None:
        """Write the run, completely or not at all."""
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
            raise PlanMismatchError(f"{path} is not a run that this version can continue: {bad}") from bad
