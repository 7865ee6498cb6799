"""The click group: which commands there are, how errors end, and commands from other packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
import warnings
from typing import Any

import attrs
import click

from topicstore import __version__

from .terminal.exits import DONE, EPILOG, USAGE, Failure, failure

__all__ = ["FOREIGN", "ForeignCommand", "cli", "foreign_commands", "main"]

FOREIGN = "topicstore.commands"
"""Entry-point group of other packages' commands."""

_COMMANDS = {
    "create": "commands.create:create",
    "import": "commands.import_:import_",
    "export": "commands.export:export",
    "replay": "commands.replay:replay",
    "explain": "commands.explain:explain",
    "sql": "commands.sql:sql",
    "streams": "commands.streams:streams",
    "topics": "commands.topics:topics",
    "retained": "commands.retained:retained",
    "sessions": "commands.sessions:sessions",
    "queue": "commands.queue:queue",
    "info": "commands.info:info",
    "verify": "commands.verify:verify",
    "generations": "commands.generations:generations",
    "retention": "commands.retention:retention",
    "compact": "commands.compact:compact",
    "delete": "commands.delete:delete",
    "checkpoint": "commands.checkpoint:checkpoint",
    "recommend": "commands.recommend:recommend",
    "plugins": "commands.plugins:plugins",
    "demo": "demo.demo:demo",
}
"""In the order of the help; each module is loaded when its command is asked for."""


@attrs.frozen(kw_only=True)
class ForeignCommand:
    """A command that another package brings: ``command``, or the ``reason`` why there is none."""

    name: str
    distribution: str
    command: click.Command | None
    reason: str = ""


def foreign_commands(name: str | None = None) -> list[ForeignCommand]:
    """Load the commands of other packages, or only those called ``name``, each guarded from the others."""
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
"""What an argument has that is no text; bytes that aren't UTF-8 come as lone surrogates."""


class _Program(click.Group):
    """Loads commands when they are needed, and ends every one of them the same way."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name our commands, then those of other packages that work."""
        return [*_COMMANDS, *sorted(c.name for c in foreign_commands() if c.command is not None)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; say so if it is another package's and fails."""
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
        """Refuse what can't be stored, printed or opened: arguments that are no text, or have a zero byte."""
        for argument in args:
            if _NO_TEXT.search(argument):
                raise Failure(f"the argument {argument[:80]!a} is not UTF-8 text without NUL", USAGE)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn what it raises into one line and an exit code."""
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            try:
                return super().invoke(ctx)
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
    click.echo(f"warning: {' '.join(str(message).split())}", err=True)  # some texts have several lines


def _forget_stdout() -> None:
    """Let the interpreter's last flush go nowhere: whoever read us has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@click.group(cls=_Program, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="topicstore")
def cli() -> None:
    """Keep MQTT messages, and replay them by topic filter and time.

    Try `topicstore demo`; `topicstore COMMAND --help` explains each command.
    """


def main() -> None:
    """Run the program with the process's arguments and exit."""
    cli(prog_name="topicstore")
