"""The common parts of the server's commands: the check of the libraries that they need, and shared options."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from topicstore.server.config.model import DurableSessionsSettings
    from topicstore.server.config.units import Period

__all__ = ["check_installed", "json_option", "keep_option", "naming", "print_json", "with_rules"]

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

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")


def check_installed(*further: str) -> None:
    """Raise `click.UsageError` if libraries are missing; the error names the command that installs them.

    The libraries are an optional extra, but the commands that need them are always listed. ``further``: modules that
    only some commands need.
    """
    missing = [name for name in (*_NEEDS, *further) if importlib.util.find_spec(name) is None]
    if missing:
        raise click.UsageError(f'the server needs {", ".join(missing)}: pip install "topicstore[server]"')


def print_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def keep_option(alone: str) -> Callable[[Decorated], Decorated]:
    """Return the option ``--keep``. ``alone`` is the help's sentence about a period without a filter."""
    return click.option(
        "--keep",
        multiple=True,
        metavar="[FILTER=]TIME",
        help="Keep stored messages for 12h, 30d or infinity; with FILTER=, store the messages published to FILTER, and "
        f"keep them for that time. {alone}",
    )


def with_rules(sessions: DurableSessionsSettings, store: Sequence[str], keep: Sequence[str]) -> DurableSessionsSettings:
    """Return settings with the persistence rules of ``--store`` and the retention periods of ``--keep`` added."""
    if not (store or keep):
        return sessions
    import msgspec

    from topicstore.server.config.model import PersistenceSettings

    rules, period = list(sessions.persistence), sessions.message_retention_period
    with naming("--store"):
        rules += [PersistenceSettings(topic_filter=one) for one in store]
    for text in keep:
        topic_filter, equals, time = text.rpartition("=")
        with naming("--keep"):
            length = _period(time)
            if equals:
                rules.append(PersistenceSettings(topic_filter=topic_filter, keep=length))
            else:
                period = length
                rules += [] if store else [PersistenceSettings()]
    return msgspec.structs.replace(sessions, persistence=tuple(dict.fromkeys(rules)), message_retention_period=period)


def _period(text: str) -> Period:
    """Parse a duration above 0, or ``infinity``. Raises ValueError."""
    from topicstore.server.config.units import Period

    found = Period.read(text)
    if not found:
        raise ValueError(f"{text!r} is no time for which messages could stay")
    return found


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Convert a ValueError to a usage error that names the option."""
    try:
        yield
    except ValueError as bad:
        raise click.BadParameter(str(bad), param_hint=f"'{option}'") from bad
