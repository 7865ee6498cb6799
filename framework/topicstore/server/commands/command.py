"""The common parts of the server's commands: the check of the libraries that they need, and the option ``--json``."""

from __future__ import annotations

import importlib.util
from typing import Any

import click

__all__ = ["check_installed", "json_option", "print_json"]

_NEEDS = (
    "argon2",
    "flask_swagger_ui",
    "h11",
    "httpx",
    "litestar",
    "ohmqtt",
    "prometheus_client",
    "uvicorn",
    "websockets",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")


def check_installed() -> None:
    """Raise `click.UsageError` if libraries are missing; the error names the command that installs them.

    The libraries are an optional extra, but the commands that need them are always listed.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise click.UsageError(f'the server needs {", ".join(missing)}: pip install "topicstore[server]"')


def print_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
