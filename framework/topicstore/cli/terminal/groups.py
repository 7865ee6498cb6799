"""Commands with subcommands, one of which is meant where none is named."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["GroupWithDefault"]


class GroupWithDefault(click.Group):
    """``NAME PATH`` means ``NAME DEFAULT PATH``."""

    def __init__(self, *arguments: Any, default: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default in front of what is neither a subcommand nor a call for help."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self._default, *args]
        return super().parse_args(ctx, args)
