"""Whether what the server needs is installed: it is an extra of the distribution, its commands are always there."""

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
    """Raise `click.UsageError`, with the command that helps, if a library is missing."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise click.UsageError(f'the server needs {", ".join(missing)}: pip install "topicstore[server]"')
