"""Questions before something is removed for good."""

from __future__ import annotations

import sys

import click

__all__ = ["check_can_ask", "confirmed", "yes_option"]

yes_option = click.option("--yes", is_flag=True, help="Don't ask.")


def check_can_ask(doing: str, *, yes: bool) -> None:
    """Refuse a command that needs an answer if nobody can give one, before anything is opened."""
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"{doing} needs --yes where nobody can be asked")


def confirmed(question: str, otherwise: str) -> bool:
    """Ask a question; print ``otherwise`` if the answer is no."""
    agreed = click.confirm(question, err=True)
    if not agreed:
        click.echo(otherwise, err=True)
    return agreed
