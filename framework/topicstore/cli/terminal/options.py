"""The arguments, options and confirmation questions that several commands share."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import msgspec

from topicstore.contract.quantities import parse_duration
from topicstore.contract.replay_plan import By
from topicstore.contract.times import format_time, parse_when
from topicstore.plugins import registry

from .completion import backend_names, layout_names, topics

__all__ = [
    "PATH",
    "TIME",
    "TIME_HELP",
    "Duration",
    "arguments_of",
    "by_option",
    "creation_options",
    "filter_argument",
    "json_option",
    "or_end",
    "read_options",
    "replay_options",
    "time_options",
    "warn_unless_kept",
    "yes_option",
]

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)

TIME_HELP = (
    "ISO 8601 (UTC unless it has a zone), now, -30m, -2h, -7d, @SECONDS since the epoch, or microseconds, "
    "a number of 15 digits or more"
)


class _Time(click.ParamType[int]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return max(parse_when(value, time.time_ns() // 1_000), 0)  # messages have no times before 1970
        except ValueError as bad:
            self.fail(f"{bad}; write {TIME_HELP}", param, ctx)


TIME = _Time()


class Duration(click.ParamType[float | str]):
    """A parameter type for a duration, converted to seconds, or one of the given words, which are kept."""

    name = "duration"

    def __init__(self, *words: str) -> None:
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Return the duration in seconds, or one of the accepted words unchanged."""
        if not isinstance(value, str) or value in self._words:
            return value  # type: ignore[no-any-return]
        try:
            return parse_duration(value)
        except ValueError as bad:
            self.fail(f"{bad}{''.join(f', or {word}' for word in self._words[:1])}", param, ctx)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
filter_argument = click.argument("topic_filter", metavar="[FILTER]", default="#", shell_complete=topics)

_CREATION = (
    click.option("--backend", shell_complete=backend_names, help="Storage engine.  [default: rocksdb]"),
    click.option("--layout", shell_complete=layout_names, help="How messages lie in it.  [default: block]"),
    click.option("--shards", type=click.IntRange(1, 4096), help="Parts that are written independently.  [default: 1]"),
    click.option(
        "--durability",
        type=click.Choice(["commit", "sync"]),
        help="What stored messages survive: the process's death, or power loss.  [default: commit]",
    ),
    click.option(
        "--timestamps",
        type=click.Choice(["commit", "message"]),
        help="Whether time ranges go by the time of storing or by the messages' own.  "
        "[default: commit; for import: message]",
    ),
    click.option(
        "--late",
        type=click.Choice(["raise", "lift"]),
        help="With --timestamps message: refuse a message older than its shard's last, or put it after that.  "
        "[default: raise]",
    ),
    click.option(
        "--max-skew",
        type=Duration(),
        help="How far ahead of the clock a message's own time may lie: 30s, 5m, 1h.  [default: 60s]",
    ),
    click.option("--plugin", "plugins", multiple=True, metavar="NAME", help="Plugin that wraps the data path."),
    click.option(
        "--option",
        "options",
        multiple=True,
        metavar="PLUGIN.NAME=VALUE",
        help="Option of the backend or the layout, such as block.level=3.",
    ),
)


def creation_options(command: F) -> F:
    """Add the options for creating a database."""
    for option in reversed(_CREATION):
        command = option(command)
    return command


def time_options(command: F) -> F:
    """Add the options ``--start`` and ``--until``. A command is refused if no time lies between them."""

    @functools.wraps(command)
    def run(*arguments: Any, start: int, until: int | None, **given: Any) -> Any:
        if until is not None and start >= max(until, 1):  # `--until 0` is valid with the default start of 0
            raise click.UsageError(
                f"--start {format_time(start)} is not before --until {format_time(until)}: no time lies between"
            )
        return command(*arguments, start=start, until=until, **given)

    until = click.option("--until", type=TIME, metavar="TIME", help="Up to, but without.  [default: everything]")
    start = click.option(
        "--start", type=TIME, default=0, show_default=False, metavar="TIME", help=f"From, inclusive: {TIME_HELP}."
    )
    return start(until(run))  # type: ignore[return-value]


def by_option(command: F) -> F:
    """Add the option ``--by``."""
    return click.option(
        "--by",
        type=click.Choice(get_args(By)),
        default="position",
        show_default=True,
        help="Compare --start and --until with positions, or with the messages' own times.",
    )(command)


def replay_options(orders: Sequence[str], help_of_orders: str) -> Callable[[F], F]:
    """Add the options of a replay: ``--start``, ``--until``, ``--by`` and ``--order``."""

    def decorate(command: F) -> F:
        order = click.option(
            "--order", type=click.Choice(orders), default="time", show_default=True, help=help_of_orders
        )
        return time_options(by_option(order(command)))

    return decorate


def yes_option(doing: str) -> Callable[[F], F]:
    """Add the option ``--yes``. Without it, a command is refused at once if standard input isn't a terminal."""

    def check(_: click.Context, __: click.Parameter, yes: bool) -> bool:
        if not yes and not sys.stdin.isatty():
            raise click.UsageError(f"{doing} needs --yes where nobody can be asked")
        return yes

    return click.option("--yes", is_flag=True, callback=check, help="Don't ask.")


def or_end(question: str, otherwise: str) -> None:
    """Ask a question; if the answer is no, print ``otherwise`` and end the command."""
    if not click.confirm(question, err=True):
        click.echo(otherwise, err=True)
        click.get_current_context().exit()


def arguments_of(*, plugins: Sequence[str], options: Sequence[str], **given: Any) -> dict[str, Any]:
    """Return the arguments of `topicstore.open` that were given on the command line."""
    arguments = {name: value for name, value in given.items() if value is not None}
    if plugins:
        arguments["plugins"] = tuple(plugins)
    by_plugin: dict[str, dict[str, Any]] = {}
    for text in options:
        plugin, dot, rest = text.partition(".")
        if not dot or "=" not in rest:
            raise click.BadParameter(f"{text!r} is not PLUGIN.NAME=VALUE", param_hint="'--option'")
        by_plugin.setdefault(plugin, {}).update(read_options([rest]))
    if by_plugin:
        arguments["options"] = by_plugin
    return arguments


def warn_unless_kept(backend: str | None) -> None:
    """Print a warning if the backend isn't persistent, because the database then ends with the command."""
    if backend is not None and "persistent" not in registry().backend(backend).capabilities:
        text = f"backend {backend!r} keeps nothing: this database is gone when the command ends"
        click.echo(f"warning: {text}", err=True)


def read_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts to a dictionary; a value that is valid JSON is decoded, others are kept as text."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="'--option'")
        try:
            values[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            values[name] = value
    return values
