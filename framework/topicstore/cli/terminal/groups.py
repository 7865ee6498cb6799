"""Commands with subcommands, of which one is the default."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["GroupWithDefault"]


class GroupWithDefault(click.Group):
    """A group in which ``NAME PATH`` means ``NAME DEFAULT PATH``."""

    def __init__(self, *arguments: Any, default: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default before arguments that are neither a subcommand nor a call for help."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self._default, *args]
        return super().parse_args(ctx, args)
