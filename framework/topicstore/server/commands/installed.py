"""A check that the server's libraries are installed: they are an optional extra, but the commands always exist."""

from __future__ import annotations

import importlib.util

import click

__all__ = ["check_installed"]

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


def check_installed() -> None:
    """Raise `click.UsageError`, with the command that installs them, if libraries are missing."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise click.UsageError(f'the server needs {", ".join(missing)}: pip install "topicstore[server]"')
