"""The command ``topicstore config``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import check_installed, json_option, keep_option, naming, print_json, with_rules

if TYPE_CHECKING:
    from cryptography import x509

    from topicstore.server.config.load import Configuration
    from topicstore.server.config.model import ServerSettings, StorageSettings
    from topicstore.server.new_server import NewServer

__all__ = ["config"]

_DIRECTORY = Path("topicstore-data")

_file = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file of settings; without it, what a server without a file has.",
)


@click.group()
def config() -> None:
    """Make, check and show the settings of a server, with its users and certificates.

    Settings of the environment count before those of the file, as in TOPICSTORE__LIMITS__CONNECTIONS=500.
    """
    check_installed()


@config.command()
@_file
@click.argument("path", type=click.Path(path_type=Path), required=False)
@json_option
def check(file: Path | None, path: Path | None, *, as_json: bool) -> None:
    """Check the settings; print "ok", the changes that a start would make to the database PATH, and who may connect.

    The command also prints the names and the expiry of certificates. It checks that plugins and the files of users and
    of TLS can be loaded, but doesn't bind addresses. Invalid settings exit with code 2, and the error names the setting
    and the reason. PATH is by default the directory that the settings name.
    """
    from topicstore.server.databases import places
    from topicstore.server.reload import check_files
    from topicstore.server.running import access

    settings = _read(file).settings
    check_files(settings)
    storages = places(settings, path or settings.messages.data_dir or _DIRECTORY)
    coming = [line for name, one, directory in storages for line in _coming(settings, name, one, directory)]
    certificates = _certificates(settings)
    if as_json:
        shown = [_shown(path, one) for path, one in certificates.items()]
        print_json({"ok": True, "changes": coming, "access": access(settings), "certificates": shown})
    else:
        valid = [_sentence(path, one) for path, one in certificates.items()]
        click.echo("\n".join(["ok", *coming, *valid, access(settings)]))


def _coming(settings: ServerSettings, name: str, storage: StorageSettings, path: Path) -> Iterator[str]:
    """Yield a line for each change of a storage's database at a start. Raises `SettingsError` for fixed settings."""
    import topicstore
    from topicstore.server.config.model import MESSAGES
    from topicstore.server.databases import changed_limits, check_fixed, check_new, missing_rules, next_layout
    from topicstore.storage.directory.manifest import read_manifest

    manifest = read_manifest(path)
    if manifest is None:
        check_new(name, storage)
        yield f"a start creates the database {path}"
        return
    check_fixed(name, storage, manifest)
    try:
        with topicstore.open(path, "r") as db:
            current = db.generations()[-1]
            following = next_layout(name, storage, manifest, current)
            rules, limits = missing_rules(db, settings), changed_limits(db, settings)
    except topicstore.DatabaseLockedError:
        yield f"what a start changes in {path} can't be seen: it is open elsewhere"
        return
    if following is not None:
        yield f"a start begins generation {current.number + 1} with the layout {following[0]!r} in {path}"
    if name != MESSAGES:
        return
    for rule in rules:
        yield f"a start adds the rule of persistence {rule.topic_filter!r}"
    for limit, value in limits.items():
        yield f"a start sets {limit} of retention to {_written(value)}"


def _written(limit: Any) -> str:
    """Return a retention limit in the notation of the settings."""
    from topicstore.server.config.units import Duration, Size

    if isinstance(limit, dict):
        return ", ".join(f"{name}={_written(length)}" for name, length in limit.items())
    if limit is None:
        return "infinity"
    if isinstance(limit, (int, float)):
        return str(Duration(limit) if isinstance(limit, float) else Size(limit))
    return str(limit)


@config.command()
@_file
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of place, value and origin.")
def show(file: Path | None, *, as_json: bool) -> None:
    """Print the settings in force, and where each comes from: default, file, or the name of a variable.

    Secrets are printed as ***.
    """
    import msgspec

    from topicstore.server.config.show import leaves, shown, shown_as_toml

    found = _read(file)
    if not as_json:
        click.echo(shown_as_toml(found), nl=False)
        return
    rows: list[dict[str, Any]] = [
        {"setting": ".".join(place), "value": value, "origin": found.origin(place)}
        for place, value in leaves(shown(found.settings))
    ]
    click.echo(msgspec.json.encode(rows).decode())


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file, by which editors complete and check it."""
    import msgspec

    from topicstore.server.config.show import json_schema

    click.echo(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode())


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--user", "users", multiple=True, metavar="NAME", help="Add a user, with a generated password.")
@click.option(
    "--tls",
    is_flag=True,
    help="Make a private certificate authority, and a certificate for this machine's names and address. Clients "
    "connect with TLS on port 8883 of all IPv4 addresses; needs --user.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="With --tls, a further name or address by which clients call the server.",
)
@keep_option("A TIME alone stores all messages.")
@json_option
def init(
    file: Path | None,
    users: tuple[str, ...],
    hosts: tuple[str, ...],
    keep: tuple[str, ...],
    *,
    tls: bool,
    as_json: bool,
) -> None:
    """Print a file of all settings with their defaults, or write the FILE of a new server.

    The options choose the settings in FILE; without any it has all settings with their defaults. Users, a token for the
    page and certificates stand in files beside it. Each user may publish and read everything, all others nothing.
    Passwords and the token are printed only once. Existing files are never overwritten.

    \b
    Examples:
      topicstore config init > server.toml
      topicstore config init server.toml --tls --user alice --keep 30d
      topicstore config init server.toml --tls --host broker.home --user alice
    """  # noqa: D301 - click wants the character
    from topicstore.server.config.show import default_file

    if file is None:
        if users or tls or hosts or keep or as_json:
            raise click.UsageError("these options need a FILE, which they write: topicstore config init server.toml …")
        click.echo(default_file(), nl=False)
        return
    if tls and not users:
        raise click.UsageError("--tls opens the server to other machines, which needs --user")
    if hosts and not tls:
        raise click.UsageError("--host names the server in its certificate, which needs --tls")
    check_installed("cryptography")
    from topicstore.server.certificate_authority import host_names
    from topicstore.server.config.model import DurableSessionsSettings
    from topicstore.server.new_server import create_server

    sessions = with_rules(DurableSessionsSettings(), (), keep)
    names = tuple(dict.fromkeys((*_checked(hosts), *host_names()))) if tls else ()
    made = create_server(file, sessions, users, names)
    if as_json:
        print_json(
            {
                "files": [str(path) for path in made.files],
                "passwords": made.passwords,
                "token": made.token,
                "names": names,
                "valid_until": made.valid_until,
            }
        )
        return
    click.echo("\n".join(_made(file, made, names)))


def _made(file: Path, made: NewServer, names: Sequence[str]) -> Iterator[str]:
    """Yield the lines for people about a new server."""
    from topicstore.server.config.model import HttpSettings
    from topicstore.server.running import trial

    named = shlex.quote(str(file))
    yield f"Made {', '.join(str(path) for path in made.files)}."
    if made.authority is not None and made.valid_until is not None:
        yield f"The certificate is valid until {made.valid_until:%Y-%m-%d}, for {', '.join(names)}."
        yield f"Before that, renew it: topicstore config certificate --renew --config {named}"
        yield f"Clients know the server by {made.authority}; ca.key signs, so nobody else may have it."
    if made.passwords:
        yield ""
        yield "Shown this one time:"
        for user, password in made.passwords.items():
            yield f"    password of {user}: {password}"
        yield f"    token of the page on http://{HttpSettings().listen}: {made.token}"
        yield f"To choose another password: topicstore users add NAME --config {named}"
    yield ""
    yield "Start the server:"
    yield f"    topicstore serve --config {named}"
    yield ""
    login = next(iter(made.passwords.items()), None)
    yield from trial("localhost", made.address.port, login=login, authority=made.authority)
    yield "What was stored:"
    yield f"    topicstore replay {shlex.quote(str(made.directory))} 'home/#'"


def _checked(hosts: Sequence[str]) -> list[str]:
    """Return host names and addresses as certificates have them."""
    from topicstore.server.certificate_authority import checked_name

    with naming("--host"):
        return [checked_name(host) for host in hosts]


@config.command()
@_file
@click.option("--renew", is_flag=True, help="Replace them by new ones of the private authority, with the same keys.")
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="With --renew, a further name or address of the server."
)
@json_option
def certificate(file: Path | None, hosts: tuple[str, ...], *, renew: bool, as_json: bool) -> None:
    """Show for which names, and until when, the server's certificates are valid; or renew them.

    --renew needs the files ca.pem and ca.key of 'config init --tls' beside the certificate. A running server uses the
    new certificates after SIGHUP; connections stay.
    """
    if hosts and not renew:
        raise click.UsageError("--host names the server in a new certificate, which needs --renew")
    settings = _read(file).settings
    names = _checked(hosts)
    if renew:
        check_installed("cryptography")
        from topicstore.server.listeners.tls import certificate_files
        from topicstore.server.new_server import renew as renewed

        files = certificate_files(settings)
        files.pop("cluster", None)  # the cluster's certificate is one for clients, which `renew` doesn't sign
        for path, key in dict.fromkeys(files.values()):
            renewed(path, key, names)
    found = _certificates(settings)
    if not found:
        raise click.UsageError("the settings name no certificate")
    if as_json:
        print_json({"certificates": [_shown(path, one) for path, one in found.items()], "renewed": renew})
        return
    for path, one in found.items():
        click.echo(_sentence(path, one))
    if renew:
        click.echo("a server that runs uses what is new after SIGHUP: systemctl reload topicstore, or kill -HUP PID")


def _certificates(settings: ServerSettings) -> dict[Path, x509.Certificate]:
    """Read the certificates that settings name."""
    from topicstore.server.listeners.tls import certificate_files

    paths = [path for path, _ in certificate_files(settings).values()]
    if not paths:
        return {}
    check_installed("cryptography")
    from topicstore.server.certificate_authority import read_certificate

    return {path: read_certificate(path) for path in paths}


def _shown(path: Path, one: x509.Certificate) -> dict[str, Any]:
    from topicstore.server.certificate_authority import names_of

    return {"certificate": str(path), "names": names_of(one), "valid_until": one.not_valid_after_utc}


def _sentence(path: Path, one: x509.Certificate) -> str:
    from topicstore.server.certificate_authority import names_of

    ends = one.not_valid_after_utc
    until = "valid until" if ends > datetime.now(UTC) else "INVALID since"
    return f"{path}: {until} {ends:%Y-%m-%d}, for {', '.join(names_of(one)) or 'no name'}"


def _read(file: Path | None) -> Configuration:
    from topicstore.server.config.load import read_configuration

    return read_configuration(file)
