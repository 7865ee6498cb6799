"""The plan of a run, as stored in ``run.json``, and the trials of which the run consists."""

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
    """Raised, before anything is measured, if the directory holds a run with a different plan."""


_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]  # finite, because JSON has no infinity


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the measurement, the same for all contenders."""

    batch: _Count = 1_000
    """The number of messages in a stored batch."""
    repeat: _Count = 5
    """The maximum number of timed runs of a replay within a worker; the result is their median."""
    patience: _Positive = 2.0
    """The total seconds of a phase's timed runs after which no further run begins."""
    mixed_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 10.0
    """The planned seconds of the phase ``mixed``; 0 leaves it out."""
    mixed_rate: _Positive = 100.0
    """The number of batches that are due in each second of ``mixed``; `phases` defines their size."""
    phase_timeout: _Positive = 900.0
    """The seconds after which a worker that doesn't reply is killed."""
    budget: _Positive | None = None
    """The total seconds for all trials, after which the rest is skipped; None for no limit."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The workloads, durabilities, contenders and repetitions to measure."""

    workloads: tuple[Definition, ...]
    durabilities: tuple[Durability, ...]
    contenders: tuple[ContenderSpec, ...]
    """The contenders to measure."""
    repetitions: int
    settings: Settings

    def trials(self) -> Iterator[Trial]:
        """Yield all trials by repetition, so that a run that ends early has results of every workload."""
        for repetition in range(1, self.repetitions + 1):
            for workload in self.workloads:
                for durability in self.durabilities:
                    yield Trial(workload=workload.name, durability=durability, repetition=repetition)

    def differences(self, other: Plan) -> list[str]:
        """Return the names of the fields in which two plans differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of all contenders with one workload and durability."""

    workload: str
    durability: Durability
    repetition: int

    @property
    def name(self) -> str:
        """Return the name of the trial, which is used in its file name and rows."""
        return f"{self.workload}-{self.durability}-{self.repetition}"

    def order(self, contenders: tuple[ContenderSpec, ...], repetitions: int) -> list[ContenderSpec]:
        """Return the contenders that support the durability, beginning with another one in each repetition."""
        able = [spec for spec in contenders if self.durability in spec.durabilities]
        first = len(able) * (self.repetition - 1) // repetitions
        return [*able[first:], *able[:first]]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as stored in ``run.json``."""

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
        """Write the run to its directory by rename, so that the file is complete or absent."""
        making = directory / ".run.json"
        making.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        making.rename(directory / "run.json")

    @classmethod
    def load(cls, directory: Path) -> Run | None:
        """Return the run in a directory, or None if there is none. Raises `PlanMismatchError` if it is invalid."""
        path = directory / "run.json"
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as bad:
            raise PlanMismatchError(f"{path} is not a run that this version can continue: {bad}") from bad
