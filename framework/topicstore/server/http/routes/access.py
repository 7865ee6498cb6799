"""``/users``, ``/rules`` and ``/bans``: who may connect to the MQTT listeners, and what clients may do.

Users are kept in the password file, rules in the settings file, bans in a file of the database's directory. Each change
is in its file, and in force, when the request is answered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import delete, get, post, put
from litestar.exceptions import NotFoundException
from litestar.params import JSONBody, PathParameter, QueryParameter

from topicstore.contract.errors import UnsupportedError
from topicstore.server.access.bans import Ban, Banned
from topicstore.server.access.passwords import PasswordFile
from topicstore.server.config.model import Rule
from topicstore.server.http.context import Context, TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.parameters import Page
from topicstore.server.reload import Reloaded

__all__ = ["ROUTES"]

_LONGEST_BAN = 1e10
"""The most seconds of a ban, about 317 years."""


class User(msgspec.Struct):
    """A user of the password file."""

    name: str


class Password(msgspec.Struct, forbid_unknown_fields=True):
    """The password of a user to add or to change."""

    password: str

    def __repr__(self) -> str:  # omits the password
        return "Password()"


class ChangedUser(msgspec.Struct):
    """A user that was added or changed."""

    name: str
    new: bool
    """Whether the user was added; otherwise the password was changed."""


class NewBan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A ban to add, or to replace the one of the same kind and value."""

    kind: Banned
    value: str
    seconds: Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_BAN)] | None = None
    """The duration of the ban in seconds; null if it lasts until it is lifted."""
    reason: str = ""


# --- users ---


def _users(context: Context) -> PasswordFile:
    path = context.mqtt.settings.authentication.password_file
    if path is None:
        raise UnsupportedError("the settings name no authentication.password_file, where users are kept")
    return PasswordFile(path)


@get("/users", guards=[needs("admin")], tags=["access"], sync_to_thread=True)
def users(context: TheContext) -> Page[User]:
    """Return the users of the password file, sorted by name."""
    return Page(items=[User(name) for name in _users(context).names()])


_UserName = Annotated[str, PathParameter(description="The user's name, percent-encoded.")]


@put("/users/{name:str}", guards=[needs("admin")], tags=["access"], sync_to_thread=True)
def put_user(context: TheContext, name: _UserName, data: JSONBody[Password]) -> ChangedUser:
    """Add a user, or change the password of one. Later connections need the new password."""
    return ChangedUser(name, new=_users(context).put(name, data.password.encode()))


@delete("/users/{name:str}", guards=[needs("admin")], tags=["access"], status_code=200, sync_to_thread=True)
def remove_user(context: TheContext, name: _UserName) -> User:
    """Remove a user. The user's open connections stay: kick them, or ban the user."""
    file = _users(context)
    if name not in file.names():
        raise NotFoundException(f"there is no user {name!r}")
    file.remove(name)
    return User(name)


# --- rules ---


@get("/rules", guards=[needs("admin")], tags=["access"], sync_to_thread=True)
def rules(context: TheContext) -> Page[Rule]:
    """Return the access rules, in the order in which they are applied."""
    return Page(items=list(context.mqtt.settings.authorization.rules))


@put("/rules", guards=[needs("admin")], tags=["access"], sync_to_thread=True)
def put_rules(context: TheContext, data: JSONBody[list[Rule]]) -> Reloaded:
    """Replace all access rules in the settings file, and read the settings again, as SIGHUP does.

    If the settings can't be used, the file and the rules stay as they were. Rules of the environment, and of a
    program's settings, can't be changed.
    """
    return context.mqtt.change_rules_soon(tuple(data)).result()


# --- bans ---

_Value = Annotated[str, QueryParameter(description="The client id, the user name, or the address or network.")]
_Kind = Annotated[
    Banned, QueryParameter(description="The kind of the banned value: a client id, a user name, or an address.")
]


@get("/bans", guards=[needs("admin")], tags=["access"], sync_to_thread=True)
def bans(context: TheContext) -> Page[Ban]:
    """Return the bans that are not over, sorted by kind and value, with those of flapping clients."""
    return Page(items=context.mqtt.bans.listed())


@post("/bans", guards=[needs("admin")], tags=["access"], sync_to_thread=True)
def add_ban(context: TheContext, data: JSONBody[NewBan]) -> Ban:
    """Ban a client id, a user, or an address or network. Within a second or two, open connections end with 0x98."""
    return context.mqtt.bans.put(data.kind, data.value, seconds=data.seconds, reason=data.reason)


@delete("/bans", guards=[needs("admin")], tags=["access"], status_code=200, sync_to_thread=True)
def remove_ban(context: TheContext, kind: _Kind, value: _Value) -> Ban:
    """Lift a ban, also one of a flapping client."""
    found = context.mqtt.bans.remove(kind, value)
    if found is None:
        raise NotFoundException(f"the {kind} {value!r} is not banned")
    return found


ROUTES = [users, put_user, remove_user, rules, put_rules, bans, add_ban, remove_ban]
