"""The click group: its commands, also those from other packages, and how errors end them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import click

from topicstore import __version__
from topicstore.contract.descriptors import take_closed_streams

from .terminal.exits import DONE, EPILOG, USAGE, Failure, failure
from .terminal.interrupts import interrupt_on_sigterm

__all__ = ["FOREIGN", "ForeignCommand", "cli", "foreign_commands", "main"]

FOREIGN = "topicstore.commands"
"""The entry-point group of other packages' commands."""

_COMMANDS = {
    "create": "commands.create:create",
    "import": "commands.import_:import_",
    "export": "commands.export:export",
    "replay": "commands.replay:replay",
    "explain": "commands.explain:explain",
    "sql": "commands.sql:sql",
    "latest": "commands.latest:latest",
    "topics": "commands.topics:topics",
    "clients": "commands.clients:clients",
    "streams": "commands.streams:streams",
    "learned-topics": "commands.learned_topics:learned_topics",
    "retained": "commands.retained:retained",
    "sessions": "commands.sessions:sessions",
    "queue": "commands.queue:queue",
    "info": "commands.info:info",
    "ds": "commands.ds:ds",
    "verify": "commands.verify:verify",
    "generations": "commands.generations:generations",
    "retention": "commands.retention:retention",
    "compact": "commands.compact:compact",
    "delete": "commands.delete:delete",
    "checkpoint": "commands.checkpoint:checkpoint",
    "plugins": "commands.plugins:plugins",
    "demo": "demo.demo:demo",
}
"""The commands in the order of the help; each module is loaded when its command is asked for."""


@attrs.frozen(kw_only=True)
class ForeignCommand:
    """A command from another package: ``command``, or the ``reason`` why it can't be loaded."""

    name: str
    distribution: str
    command: click.Command | None
    reason: str = ""


def foreign_commands(name: str | None = None) -> list[ForeignCommand]:
    """Load the commands of other packages, or only those called ``name``; one that fails doesn't affect the others."""
    entries = importlib.metadata.entry_points(group=FOREIGN)
    return [_load(entry) for entry in entries if name in (None, entry.name)]


def _load(entry: importlib.metadata.EntryPoint) -> ForeignCommand:
    distribution = entry.dist.name if entry.dist is not None else "an unknown distribution"
    command, reason = None, ""
    if entry.name in _COMMANDS:
        reason = "topicstore has a command of that name"
    else:
        try:
            command = entry.load()
        except Exception as error:  # noqa: BLE001 - another package's command must not stop ours; it is shown
            reason = f"{type(error).__name__}: {error}"
        if not reason and not isinstance(command, click.Command):
            command, reason = None, f"{entry.value} is not a click command"
    return ForeignCommand(name=entry.name, distribution=distribution, command=command, reason=reason)


_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""The characters that make an argument invalid as text; bytes that aren't UTF-8 come as lone surrogates."""


class _Program(click.Group):
    """The group that loads commands when they are needed, and ends every one of them in the same way."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of our commands, then of those from other packages that work."""
        return [*_COMMANDS, *sorted(c.name for c in foreign_commands() if c.command is not None)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; print an error if it is another package's and can't be loaded."""
        if cmd_name in _COMMANDS:
            module, _, name = _COMMANDS[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(f"{__package__}.{module}"), name)
            return command
        found = foreign_commands(cmd_name)
        for foreign in found:
            if foreign.command is not None:
                return foreign.command
        if found:
            reason = f"the command {cmd_name!r} of {found[0].distribution} can't be used: {found[0].reason}"
            raise Failure(reason, USAGE)
        return None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse arguments that can't be stored, printed or opened: those that are no text, or have a zero byte."""
        for argument in args:
            if _NO_TEXT.search(argument):
                raise Failure(f"the argument {argument[:80]!a} is not UTF-8 text without NUL", USAGE)
        with _ended(ctx):  # which --help and --version end
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn an exception into one line and an exit code."""
        with warnings.catch_warnings(), _ended(ctx):
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            return super().invoke(ctx)


@contextlib.contextmanager
def _ended(ctx: click.Context) -> Iterator[None]:
    """Turn an exception, also one of writing the last output, into the end of the program."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        ctx.exit(DONE)
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        raise
    except (Exception, KeyboardInterrupt) as error:
        end = failure(error)
        if end is None:
            raise
        raise end from error


def _show_warning(message: Warning | str, *_: object) -> None:
    click.echo(f"warning: {' '.join(str(message).split())}", err=True)  # some messages have several lines


def _forget_stdout() -> None:
    """Discard the interpreter's last flush: nothing more can be written to standard output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _prepare_streams() -> None:
    """Make the standard streams take all text; in place of closed ones, nothing is read, and written to nowhere."""
    take_closed_streams()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@click.group(cls=_Program, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="topicstore")
def cli() -> None:
    """Keep MQTT messages, and replay them by topic filter and time.

    A database that `topicstore serve` has open is asked of that server, by the same commands.

    Try `topicstore demo`; `topicstore COMMAND --help` explains each command.
    """


def main() -> None:
    """Run the program with the process's arguments and exit."""
    interrupt_on_sigterm()
    _prepare_streams()
    cli(prog_name="topicstore")
