"""Makes the plan of a run from the requested options, and lists the workloads and contenders that are skipped."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import attrs
import msgspec
from topicstore.contract.errors import InvalidArgumentError

from topicstore_benchmarks.contenders.catalogue import ContenderSpec, catalogue
from topicstore_benchmarks.contenders.contender import Durability
from topicstore_benchmarks.workloads.definition import Definition, built_in, from_parquet, read

from .hardware import machine, versions
from .plan import Plan, Run, Settings

__all__ = ["ChoiceError", "RunOptions", "new_run"]

_FULL_REPETITIONS, _QUICK_REPETITIONS = 3, 2
_FULL_MESSAGES, _QUICK_MESSAGES = 300_000, 40_000
_QUICK_WORKLOADS = ("fleet", "hot-topic")
_QUICK_CONTENDERS = (
    "sqlite",
    "raw *",
    "parquet",
    "rocksdb-block",
    "rocksdb-skipstream",
    "rocksdb-wildcard_optimized",
    "rocksdb-reference",
    "leveldb-block",
    "duckdb-table",
)
_QUICK_SETTINGS = Settings(repeat=3, patience=0.5, mixed_seconds=1.0, phase_timeout=120.0, budget=240.0)
"""The settings for a run of five minutes, of which one is for startup, shutdown and the report."""


class ChoiceError(InvalidArgumentError):
    """Raised, before anything is measured, if the requested options contradict each other or have unknown names."""


@attrs.frozen(kw_only=True)
class RunOptions:
    """The requested options of a run. Empty ones and None stand for the defaults of the preset."""

    preset: Literal["quick", "full"] = "full"
    workloads: tuple[str, ...] = ()
    data: Path | None = None
    requests: Sequence[tuple[str, str]] = ()
    """The requests to the messages of ``data``, as pairs of a name and a topic filter."""
    contenders: tuple[str, ...] = ()
    """Shell-style patterns of contenders' names."""
    durabilities: tuple[Durability, ...] = ()
    messages: int | None = None
    repetitions: int | None = None
    settings: Sequence[tuple[str, str]] = ()
    """Pairs of a field's name in `Settings` and its value as text."""

    @property
    def quick(self) -> bool:
        """Whether the small preset is requested."""
        return self.preset == "quick"


def new_run(name: str, command: list[str], asked: RunOptions) -> Run:
    """Return the requested run. Raises `ChoiceError` or `WorkloadError`."""
    chosen = _contenders(asked, catalogue())
    missing = {spec.name: reason for spec in chosen if (reason := spec.why_missing()) is not None}
    definitions = _definitions(asked)
    absent = {one.name: reason for one in definitions if (reason := one.make().why_missing()) is not None}
    present = [one for one in definitions if one.name not in absent]
    able = [spec for spec in chosen if spec.name not in missing]
    plan = _plan(asked, present, able)
    unable = {spec.name: why for spec in able if (why := _why_unable(spec, plan.durabilities)) is not None}
    if not present or len(unable) == len(able):
        reasons = "; ".join(f"{what}: {why}" for what, why in {**absent, **missing, **unable}.items())
        raise ChoiceError(f"there is nothing to measure{': ' * bool(reasons)}{reasons}")
    for one in present:
        _ = one.make().parts  # raises for an unreadable file before Spark starts
    return Run(
        name=name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        machine=machine(),
        versions=versions(),
        skipped_workloads=absent,
        skipped_contenders=missing,
        left_out=tuple(spec for spec in chosen if spec.name in missing),
        plan=plan,
    )


def _why_unable(spec: ContenderSpec, durabilities: Iterable[Durability]) -> str | None:
    """Return why a contender supports none of the durabilities, or None if it supports one."""
    wanted = tuple(durabilities)
    return None if set(wanted) & set(spec.durabilities) else f"it has no durability {', '.join(map(repr, wanted))}"


def _plan(asked: RunOptions, definitions: Iterable[Definition], contenders: Iterable[ContenderSpec]) -> Plan:
    quick = asked.quick
    messages = asked.messages or (_QUICK_MESSAGES if quick else _FULL_MESSAGES)
    return Plan(
        workloads=tuple(one.limited(messages) for one in definitions),
        durabilities=asked.durabilities or (("commit",) if quick else ("commit", "sync")),
        contenders=tuple(contenders),
        repetitions=asked.repetitions or (_QUICK_REPETITIONS if quick else _FULL_REPETITIONS),
        settings=_settings(asked),
    )


def _settings(asked: RunOptions) -> Settings:
    values = msgspec.to_builtins(_QUICK_SETTINGS if asked.quick else Settings())
    for name, _ in asked.settings:
        if name not in values:
            raise ChoiceError(f"there is no setting {name!r}; there are: {', '.join(sorted(values))}")
    try:
        return msgspec.convert({**values, **dict(asked.settings)}, Settings, strict=False)
    except msgspec.ValidationError as bad:
        raise ChoiceError(f"settings: {bad}") from bad


def _definitions(asked: RunOptions) -> list[Definition]:
    """Return the requested workloads."""
    if asked.data is None and asked.requests:
        raise ChoiceError("requests go with messages of your own")
    requests: dict[str, list[str]] = {}
    for name, text in asked.requests:
        requests.setdefault(name, []).append(text)
    own = [] if asked.data is None else [from_parquet(asked.data, requests)]
    names = asked.workloads or (() if own else _QUICK_WORKLOADS if asked.quick else built_in())
    found = [*own, *map(read, names)]
    if len({one.name for one in found}) < len(found):
        raise ChoiceError(f"two workloads have the same name: {', '.join(one.name for one in found)}")
    return found


def _contenders(asked: RunOptions, known: Mapping[str, ContenderSpec]) -> list[ContenderSpec]:
    """Return the requested contenders."""
    patterns = asked.contenders or (_QUICK_CONTENDERS if asked.quick else ("*",))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ChoiceError(f"there is no contender {pattern!r}; there are: {', '.join(sorted(known))}")
    return [spec for name, spec in known.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
