"""Authentication of clients by a plugin, a certificate or a password, or as anonymous; the hooks of access plugins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pluggy

from topicstore.contract import hookspecs
from topicstore.contract.access import AuthenticationRequest, AuthorizationRequest, Credentials, Question
from topicstore.contract.errors import PluginError, UnknownPluginError
from topicstore.plugins import GROUP, registry
from topicstore.server.config.model import AuthenticationSettings, AuthorizationSettings, SettingsError
from topicstore.server.listeners.peer import Peer

from .passwords import PasswordCheck, PasswordFile, PasswordFileError
from .permissions import AccessList, ClientIdPatterns, Permissions
from .threads import Batches, BusyError, TooManyWaitingError

__all__ = [
    "Access",
    "AccessHooks",
    "Identity",
    "Login",
    "Refusal",
]


class AccessHooks:
    """The plugins that a server's settings name, called in that order, in worker threads."""

    def __init__(self, plugins: Sequence[tuple[str, Any]], hook: str) -> None:
        """Register plugins, given by name and object. Raises `PluginError` if a plugin doesn't implement the hook."""
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._names = ", ".join(name for name, _ in plugins)
        for name, plugin in reversed(plugins):  # pluggy calls the plugin registered last first
            self._manager.register(plugin, name)
        implemented = {one.plugin_name for one in getattr(self._manager.hook, hook).get_hookimpls()}
        for name, _ in plugins:
            if name not in implemented:
                raise PluginError(f"the plugin {name!r} doesn't implement {hook}")

    @classmethod
    def installed(cls, names: Sequence[str], hook: str) -> AccessHooks:
        """Load installed plugins by name. Raises `UnknownPluginError` and `PluginError`."""
        return cls([(name, registry().wrapper(name)) for name in names], hook)

    def authenticate(self, clients: Sequence[Credentials]) -> list[str | bool | None]:
        """Return for each client a plugin's first answer: a user name, or False to refuse; None without an answer."""
        request = AuthenticationRequest(clients=tuple(clients))
        answers = self._manager.hook.topicstore_authenticate(request=request)
        return [_first(row, (str,)) for row in self._rows(answers, len(clients), "topicstore_authenticate")]

    def authorize(self, questions: Sequence[Question]) -> list[bool | None]:
        """Return for each request the first answer of a plugin: allowed or not; None if no plugin answers."""
        request = AuthorizationRequest(questions=tuple(questions))
        answers = self._manager.hook.topicstore_authorize(request=request)
        return [_first(row, (bool,)) for row in self._rows(answers, len(questions), "topicstore_authorize")]

    def _rows(self, answers: list[Any], count: int, hook: str) -> list[tuple[Any, ...]]:
        for answer in answers:
            if isinstance(answer, str) or not isinstance(answer, Sequence) or len(answer) != count:
                raise PluginError(f"{hook} of one of the plugins {self._names} didn't return {count} answers")
        return list(zip(*answers, strict=True)) if answers else [()] * count


def _first(row: tuple[Any, ...], kinds: tuple[type, ...]) -> Any:
    """Return the first answer that is not None. A wrong type is an error, so that it can't allow anything."""
    for answer in row:
        if answer is None:
            continue
        if answer is False or isinstance(answer, kinds):
            return answer
        raise PluginError(f"a plugin answered with a {type(answer).__name__}")
    return None


_CLIENT_IDS = {"any": ("*",), "username": ("%u",)}
"""The patterns for the keywords of `AuthenticationSettings.client_id`."""

_log = logging.getLogger("topicstore.server.access")


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """The credentials and the peer of a client that connects."""

    client_id: str
    assigned: bool = False
    """Whether the server has assigned the client id."""
    user_name: str | None
    password: bytes | None
    peer: Peer

    def __repr__(self) -> str:  # omits the password
        return f"Login({self.client_id!r}, {self.user_name!r}, {self.peer.address})"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of an authenticated client; ``user`` is None for an anonymous client."""

    user: str | None
    client_id: str
    loopback: bool


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The refusal of a client.

    ``credentials``: its user name or password is wrong. ``forbidden``: anonymous clients may not connect from its
    address. ``client id``: its user may not use that client id. ``unavailable``: authentication is not possible at the
    moment.
    """

    why: Literal["credentials", "forbidden", "client id", "unavailable"]
    text: str
    """The reason, in words that the client may see."""


class Access:
    """The authentication and authorization of a server. Used in the event loop, except `reread` and `join`."""

    def __init__(
        self,
        authentication: AuthenticationSettings,
        authorization: AuthorizationSettings,
        *,
        authenticate: AccessHooks | None = None,
        authorize: AccessHooks | None = None,
    ) -> None:
        """Read the password file, and load the plugins that the settings name, unless hooks are given.

        Raises `SettingsError`, which names the setting of a pattern or plugin that can't be used, and
        `PasswordFileError`.
        """
        self._anonymous = authentication.anonymous
        hooks = authenticate is not None or authorize is not None
        self.restricts = hooks or authentication.restricts or authorization.restricts
        """Whether there are users, plugins or rules, so that clients on this machine have no implicit rights."""
        self._client_ids = _client_ids(authentication)
        self._list = AccessList(authorization)
        if authenticate is None and authentication.plugins:
            authenticate = _installed("authentication", authentication.plugins, "topicstore_authenticate")
        if authorize is None and authorization.plugins:
            authorize = _installed("authorization", authorization.plugins, "topicstore_authorize")
        path = authentication.password_file
        self._passwords = None if path is None else PasswordCheck(PasswordFile(path))
        self._who = (
            None
            if authenticate is None
            else Batches[Credentials, str | bool | None](authenticate.authenticate, "topicstore-authenticate")
        )
        self._what = (
            None if authorize is None else Batches[Question, bool | None](authorize.authorize, "topicstore-authorize")
        )

    async def authenticate(self, login: Login) -> Identity | Refusal:
        """Authenticate a client. Failures of plugins and of the password file are logged, and refuse the client."""
        try:
            found = await self._named(login)
        except (BusyError, TooManyWaitingError) as busy:
            _log.warning("clients are refused because too many connect: %s", busy)
            return Refusal(why="unavailable", text="too many clients connect at the same time")
        except PasswordFileError as bad:
            _log.error("clients are refused because their passwords can't be checked: %s", bad)
            return Refusal(why="unavailable", text="passwords can't be checked now")
        except Exception:  # noqa: BLE001 - a plugin may raise anything; it is logged, and must not end the connection's task
            _log.exception("clients are refused because a plugin failed to say who they are")
            return Refusal(why="unavailable", text="it can't be found out now who the client is")
        if isinstance(found, Refusal):
            return found
        if not login.assigned and not self._client_ids.match(login.client_id, found):
            return Refusal(why="client id", text="the client id is not one that this user may have")
        return Identity(user=found, client_id=login.client_id, loopback=login.peer.loopback)

    async def _named(self, login: Login) -> str | Refusal | None:
        """Return the user's name, None for an anonymous client, or the refusal."""
        peer, via = login.peer, login.peer.via
        if self._who is not None and "plugins" in via.sources:
            [answer] = await self._who.ask([_credentials(login)])
            if isinstance(answer, str):
                return answer
            if answer is False:
                return Refusal(why="credentials", text="the user name or the password is wrong")
        if peer.certificate_name is not None:
            return peer.certificate_name
        if login.user_name is not None and self._passwords is not None and "passwords" in via.sources:
            if await self._passwords.matches(login.user_name, login.password or b"", peer.site):
                return login.user_name
            return Refusal(why="credentials", text="the user name or the password is wrong")
        anonymous = via.anonymous or self._anonymous
        if anonymous == "always" or (anonymous == "loopback" and peer.loopback):
            return None
        return Refusal(why="forbidden", text="a user name and a password are needed here")

    def reread(self) -> None:
        """Read the password file if it was replaced. May be called in any thread.

        Raises `PasswordFileError` if it can't be read; then its last valid content stays in force.
        """
        if self._passwords is not None:
            self._passwords.reread()

    def permissions(self, identity: Identity) -> Permissions:
        """Return the permissions of a client, a new object for each connection."""
        rules = self._list.of(identity.user, identity.client_id, loopback=identity.loopback)
        return Permissions(identity.user, identity.client_id, rules, self._what)

    def end(self) -> None:
        """End the threads. Pending calls raise `asyncio.CancelledError`."""
        for threads in (self._passwords, self._who, self._what):
            if threads is not None:
                threads.end()

    def join(self) -> None:
        """Wait until the threads have ended, after `end`. May be called in any thread."""
        for threads in (self._passwords, self._who, self._what):
            if threads is not None:
                threads.join()

    def close(self) -> None:
        """Call `end`, then `join`, which waits for running calls of plugins."""
        self.end()
        self.join()


def _installed(section: str, names: Sequence[str], hook: str) -> AccessHooks:
    try:
        return AccessHooks.installed(names, hook)
    except (PluginError, UnknownPluginError) as bad:
        raise SettingsError(f"{section}.plugins: {bad}") from bad


def _client_ids(authentication: AuthenticationSettings) -> ClientIdPatterns:
    named = authentication.client_id
    try:
        return ClientIdPatterns(_CLIENT_IDS[named] if isinstance(named, str) else named)
    except ValueError as bad:
        raise SettingsError(f"authentication.client_id: {bad}") from bad


def _credentials(login: Login) -> Credentials:
    return Credentials(
        client_id=login.client_id,
        user_name=login.user_name,
        password=login.password,
        certificate_name=login.peer.certificate_name,
        address=login.peer.address,
        loopback=login.peer.loopback,
        listener=login.peer.via.name,
    )
