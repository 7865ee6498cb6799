"""The plugin hooks for authentication and authorization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pluggy

from topicstore.contract import hookspecs
from topicstore.contract.access import AuthenticationRequest, AuthorizationRequest, Credentials, Question
from topicstore.contract.errors import PluginError
from topicstore.plugins import GROUP, registry

__all__ = ["AccessHooks"]


class AccessHooks:
    """The plugins that a server's settings name, called in that order. Called in separate threads."""

    def __init__(self, plugins: Sequence[tuple[str, Any]], hook: str) -> None:
        """Register plugins, given by name and object. Raises `PluginError` if a plugin doesn't implement the hook."""
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._names = ", ".join(name for name, _ in plugins)
        for name, plugin in reversed(plugins):  # pluggy calls plugins in the reverse order
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
        """Return for each client the first plugin's answer: a user name, or False to refuse; None without an answer."""
        request = AuthenticationRequest(clients=tuple(clients))
        answers = self._manager.hook.topicstore_authenticate(request=request)
        return [_first(row, (str,)) for row in self._rows(answers, len(clients), "topicstore_authenticate")]

    def authorize(self, questions: Sequence[Question]) -> list[bool | None]:
        """Return for each question the first plugin's answer: allowed or not; None without an answer."""
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
