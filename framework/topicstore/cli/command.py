"""The common parts of commands: the argument PATH, the option ``--json``, printing, and groups with a default."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import attrs
import click

from .connecting import opened
from .terminal.display import console, print_json
from .terminal.options import PATH, json_option

__all__ = ["Answer", "GroupWithDefault", "answers", "print_answer"]

Answer = Iterator[Any]
"""The output of a command: first its JSON document (a dictionary or an attrs object), then texts and rich renderables
for people."""


def answers(
    mode: Literal["r", "r+"] | None = None, **opening: Any
) -> Callable[[Callable[..., Answer]], Callable[..., None]]:
    """Turn a generator of an `Answer` into a command's function, with the argument PATH and the option ``--json``.

    The generator is called with the database, opened in ``mode`` and closed after the document was yielded. Without a
    mode, the generator is called with the path. With ``--json``, it is not run beyond the document.
    """

    def decorate(body: Callable[..., Answer]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(path: Path, *, as_json: bool, **given: Any) -> None:
            with ExitStack() as closing:
                answer = body(path if mode is None else closing.enter_context(opened(path, mode, **opening)), **given)
                document = next(answer)
            print_answer(path, document, None if as_json else answer)

        options = json_option(run).__click_params__  # type: ignore[attr-defined]
        options.insert(0, options.pop())  # click shows the first one last in the help
        return click.argument("path", type=PATH)(run)

    return decorate


def print_answer(path: Path, document: Any, answer: Answer | None) -> None:
    """Print the texts and tables that ``answer`` yields; if it is None, print the JSON document with the path."""
    if answer is None:
        print_json({"path": str(path), **(attrs.asdict(document) if attrs.has(type(document)) else document)})
        return
    for part in answer:
        if isinstance(part, str):
            click.echo(part)
        else:
            console().print(part)


class GroupWithDefault(click.Group):
    """A group in which ``NAME PATH`` means ``NAME DEFAULT PATH``, unless PATH is missing and resembles a subcommand."""

    def __init__(self, *arguments: Any, default: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command if the first argument is neither a subcommand nor a help option."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            unknown = click.NoSuchCommand(
                args[0],
                f"{args[0]!r} is neither a command nor a database.",
                possibilities=self.commands,
                ctx=ctx,
            )
            if unknown.possibilities and not Path(args[0]).exists() and not ctx.resilient_parsing:
                raise unknown
            args = [self._default, *args]
        return super().parse_args(ctx, args)
