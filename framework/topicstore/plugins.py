"""Discovery and loading of plugins.

The process has one `Registry` of all installed plugins; listing them imports no engine. A plugin that can't be loaded
is recorded with the reason, and doesn't affect the others. Each open database has a separate pluggy manager with only
the plugins that it was opened with.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import attrs
import pluggy

from .contract import hookspecs
from .contract.engine import Backend
from .contract.errors import BackendUnavailableError, IncompatibleError, PluginError, UnknownPluginError
from .contract.layout import Layout
from .contract.log_store import LogStore
from .contract.options import make_options
from .contract.plugin_specs import BackendSpec, LayoutSpec, LogStoreSpec, PluginSpec, WorkloadSpec
from .runtime.warning import warn_caller

__all__ = [
    "GROUP",
    "FailedPlugin",
    "PluginPair",
    "Registry",
    "check_pair",
    "data_path",
    "load_target",
    "missing_modules",
    "registry",
    "why_absent",
]

GROUP = "topicstore"
"""Entry-point group of plugins."""
DISABLE = "TOPICSTORE_DISABLE_PLUGINS"
"""Environment variable with the names of plugins that are not to be loaded, separated by commas."""
_DISABLED = f"disabled by {DISABLE}"
_PREFIX = "TOPICSTORE_"
"""Prefix of the names of environment variables, of topicstore and of plugins."""
_SETTINGS = "TOPICSTORE__"
"""Prefix of the variables that are settings of a server. The server checks these itself."""

S = TypeVar("S")


@attrs.frozen(kw_only=True)
class FailedPlugin:
    """An installed plugin that can't be used, with the reason."""

    name: str
    distribution: str
    reason: str

    @property
    def disabled(self) -> bool:
        """Whether the plugin was disabled by the environment variable `DISABLE`."""
        return self.reason == _DISABLED


@attrs.frozen
class PluginPair:
    """A backend and a layout that are registered, whether or not they work together."""

    backend: BackendSpec
    layout: LayoutSpec

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities that the backend or the layout declares."""
        return self.backend.capabilities | self.layout.capabilities

    def why_refused(self) -> str | None:
        """Return why the layout can't run on the backend, or None if it can. Imports neither."""
        try:
            check_pair(self.backend, self.layout)
        except IncompatibleError as reason:
            return str(reason)
        return None

    def why_absent(self) -> str | None:
        """Return why the backend or the layout can't be loaded in this environment, or None if both can."""
        return why_absent(self.backend) or why_absent(self.layout)

    @property
    def works(self) -> bool:
        """Whether a database with this backend and layout can be opened in this environment."""
        return self.why_refused() is None and self.why_absent() is None


class Registry:
    """The plugins of this process, their specifications, and the plugins that failed to load."""

    def __init__(self, entries: Iterable[importlib.metadata.EntryPoint], disabled: Iterable[str] = ()) -> None:
        self.failed: list[FailedPlugin] = []
        self.plugins: dict[str, Any] = {}
        self.distributions: dict[str, str] = {}
        self.origins: dict[tuple[type[PluginSpec], str], str] = {}
        self.variables = {DISABLE}
        self._specs: dict[type[PluginSpec], dict[str, Any]] = {kind: {} for kind in _REGISTRATION.values()}
        self._manager = _manager()
        off = set(disabled)
        for entry in sorted(entries, key=_builtin_first):
            if entry.name in off:
                self._fail(entry, _DISABLED)
            else:
                self._load(entry)

    def _fail(self, entry: importlib.metadata.EntryPoint, reason: str) -> None:
        self.failed.append(FailedPlugin(name=entry.name, distribution=_distribution(entry), reason=reason))

    def _load(self, entry: importlib.metadata.EntryPoint) -> None:
        if entry.name in self.plugins:
            owner = self.distributions[entry.name]
            self._fail(entry, f"the name {entry.name!r} is taken by a plugin of {owner}; rename one of them")
            return
        try:
            plugin = entry.load()
            self._manager.register(plugin, entry.name)
            self._manager.check_pending()
            found = _specs_of(plugin, self._manager)
            self._refuse_taken(found)
            variables = _variables_of(plugin, self._manager)
        except Exception as error:  # noqa: BLE001 - whatever a plugin does must not stop the others; it is shown
            if self._manager.get_plugin(entry.name) is not None:
                self._manager.unregister(name=entry.name)
            self._fail(entry, f"{type(error).__name__}: {error}")
            return
        self.plugins[entry.name] = plugin
        self.distributions[entry.name] = _distribution(entry)
        self.variables |= variables
        for spec in found:
            self._specs[type(spec)][spec.name] = spec
            self.origins[type(spec), spec.name] = entry.name

    def _refuse_taken(self, found: list[PluginSpec]) -> None:
        for number, spec in enumerate(found):
            owner = self.origins.get((type(spec), spec.name))
            if any(type(other) is type(spec) and other.name == spec.name for other in found[:number]):
                owner = "this plugin itself"
            if owner is not None:
                kind = type(spec).__name__.removesuffix("Spec").lower()
                raise PluginError(f"the {kind} name {spec.name!r} is taken by {owner!r}")

    # --- lookups ---

    def backends(self) -> dict[str, BackendSpec]:
        """Return all backends by name."""
        return dict(self._specs[BackendSpec])

    def layouts(self) -> dict[str, LayoutSpec]:
        """Return all layouts by name."""
        return dict(self._specs[LayoutSpec])

    def pairs(self) -> list[PluginPair]:
        """Return every backend with every layout, sorted by their names."""
        layouts = sorted(self.layouts().items())
        return [PluginPair(backend, layout) for _, backend in sorted(self.backends().items()) for _, layout in layouts]

    def log_stores(self) -> dict[str, LogStoreSpec]:
        """Return all log stores by the schemes of their URLs."""
        return dict(self._specs[LogStoreSpec])

    def workloads(self) -> dict[str, WorkloadSpec]:
        """Return all workloads by name."""
        return dict(self._specs[WorkloadSpec])

    def backend(self, name: str) -> BackendSpec:
        """Return one backend's spec. Raises `UnknownPluginError`."""
        spec: BackendSpec = self._find(self._specs[BackendSpec], name, "backend")
        return spec

    def layout(self, name: str) -> LayoutSpec:
        """Return one layout's spec. Raises `UnknownPluginError`."""
        spec: LayoutSpec = self._find(self._specs[LayoutSpec], name, "layout")
        return spec

    def log_store(self, scheme: str) -> LogStoreSpec:
        """Return the spec of the log store for a URL's scheme. Raises `UnknownPluginError`."""
        spec: LogStoreSpec = self._find(self._specs[LogStoreSpec], scheme, "log store")
        return spec

    def make_layout(self, backend: BackendSpec, name: str, options: Mapping[str, Any]) -> Layout:
        """Return a layout object with these options. Raises `IncompatibleError` if the backend lacks a capability."""
        spec = self.layout(name)
        check_pair(backend, spec)
        target: type[Layout] = load_target(spec)
        return target(make_options(name, target.Options, options))

    def full_options(self, layout: str, values: Mapping[str, Any]) -> Any:
        """Return all options of a layout including defaults, so that equivalent options compare equal."""
        target: type[Layout] = load_target(self.layout(layout))
        return make_options(layout, target.Options, values)

    def wrapper(self, name: str) -> Any:
        """Return the plugin object of an entry point's name. Raises `UnknownPluginError`."""
        return self._find(self.plugins, name, "plugin")

    def _find(self, table: dict[str, S], name: str, kind: str) -> S:
        if name in table:
            return table[name]
        reasons = "".join(f"; plugin {f.name!r} {'is' if f.disabled else 'failed:'} {f.reason}" for f in self.failed)
        raise UnknownPluginError(
            f"there is no {kind} {name!r}; there are: {', '.join(sorted(table)) or 'none'}{reasons}"
        )


def _builtin_first(entry: importlib.metadata.EntryPoint) -> tuple[bool, str, str]:
    """Return a sort key that puts topicstore's own plugins first, and then orders by distribution and name.

    The plugin that gets a name claimed by two plugins then doesn't depend on the order of installation.
    """
    return _distribution(entry) != "topicstore", _distribution(entry), entry.name


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return _name(entry.dist) if entry.dist is not None else "an unknown distribution"


@functools.cache  # each access to ``name`` parses all metadata of the distribution
def _name(distribution: importlib.metadata.Distribution) -> str:
    return distribution.name


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


_DATA_PATH = ("topicstore_store", "topicstore_read", "topicstore_replay")
_REGISTRATION = {
    "topicstore_backends": BackendSpec,
    "topicstore_layouts": LayoutSpec,
    "topicstore_logs": LogStoreSpec,
    "topicstore_workloads": WorkloadSpec,
}


def _answers(plugin: Any, hook: str, manager: pluggy.PluginManager) -> list[Any]:
    """Return everything that a plugin provides through one registration hook."""
    others = [other for other in manager.get_plugins() if other is not plugin]
    return [one for answer in manager.subset_hook_caller(hook, others)() for one in answer]


def _variables_of(plugin: Any, manager: pluggy.PluginManager) -> set[str]:
    found = _answers(plugin, "topicstore_variables", manager)
    for name in found:
        if not isinstance(name, str) or not name.startswith(_PREFIX):
            raise PluginError(f"topicstore_variables returned {name!r}, not a name that begins with {_PREFIX}")
    return set(found)


def _specs_of(plugin: Any, manager: pluggy.PluginManager) -> list[PluginSpec]:
    found: list[PluginSpec] = []
    for hook, kind in _REGISTRATION.items():
        for spec in _answers(plugin, hook, manager):
            if not isinstance(spec, PluginSpec) or not isinstance(spec, kind):
                raise PluginError(f"{hook} returned a {type(spec).__name__}, not a {kind.__name__}")
            found.append(spec)
    return found


@functools.cache
def registry() -> Registry:
    """Return the process's registry, which the first call creates from the installed entry points.

    Warns about environment variables with topicstore's prefix that no plugin reads, except settings of a server, and
    about names in `DISABLE` that aren't installed.
    """
    disabled = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    entries = importlib.metadata.entry_points(group=GROUP)
    made = Registry(entries, disabled)
    for name in sorted(set(disabled) - entries.names):
        warn_caller(f"{DISABLE}: there is no plugin {name!r}{_suggestion(name, entries.names)}")
    given = {name for name in os.environ if name.startswith(_PREFIX) and not name.startswith(_SETTINGS)}
    for name in sorted(given - made.variables):
        warn_caller(f"nothing reads the environment variable {name}{_suggestion(name, made.variables)}")
    return made


def _suggestion(name: str, known: Iterable[str]) -> str:
    import difflib

    likely = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return f"; is {likely[0]} meant?" if likely else f"; there are: {', '.join(sorted(known))}"


def data_path(wrappers: Iterable[tuple[str, Any]], implementation: Any) -> pluggy.PluginManager:
    """Return a pluggy manager for one database, with the implementation of the hooks and its wrappers, outermost first.

    Raises `PluginError` for a wrapper that implements a data-path hook without ``hookimpl(wrapper=True)``.
    """
    manager = _manager()
    manager.register(implementation, "topicstore")
    for name, plugin in reversed(list(wrappers)):
        manager.register(plugin, name)  # pluggy calls the plugin that was registered last first
    for hook in _DATA_PATH:
        for found in getattr(manager.hook, hook).get_hookimpls():
            if found.plugin is not implementation and not (found.wrapper or found.hookwrapper):
                raise PluginError(f"{hook} of plugin {found.plugin_name!r} must be a hookimpl(wrapper=True)")
    return manager


def load_target(spec: PluginSpec) -> type[Any]:
    """Import and return the class that a spec names.

    Raises `BackendUnavailableError`, with the pip command, if a required module is missing or the import fails, and
    `PluginError` if the class doesn't implement the contract.
    """
    kind, expected = _kind(spec)
    missing = missing_modules(spec)
    hint = f": {spec.advice}" if spec.advice else f': pip install "{spec.install}"' if spec.install else ""
    if missing:
        raise BackendUnavailableError(f"{kind} {spec.name!r} needs {', '.join(missing)}{hint}")
    module, _, name = spec.target.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a plugin may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise BackendUnavailableError(f"{kind} {spec.name!r} can't be loaded ({reason}){hint}") from error
    if not (isinstance(target, type) and issubclass(target, expected)):
        raise PluginError(f"{kind} {spec.name!r}: {spec.target} is not a {expected.__name__}")
    if inspect.isabstract(target):
        raise PluginError(f"{kind} {spec.name!r}: {spec.target} lacks {', '.join(sorted(target.__abstractmethods__))}")
    if not attrs.has(target.Options):
        raise PluginError(f"{kind} {spec.name!r}: the Options of {spec.target} are not an attrs class")
    return target


def why_absent(spec: PluginSpec) -> str | None:
    """Return why `load_target` can't load a plugin in this environment, or None if it can."""
    try:
        load_target(spec)
    except (BackendUnavailableError, PluginError) as reason:
        return str(reason)
    return None


def _kind(spec: PluginSpec) -> tuple[str, type[Backend | Layout | LogStore]]:
    """Return the name of the kind of plugin that a spec describes, and the base class that its target must have."""
    if isinstance(spec, LayoutSpec):
        return "layout", Layout
    if isinstance(spec, LogStoreSpec):
        return "log store", LogStore
    return "backend", Backend


def missing_modules(spec: PluginSpec) -> list[str]:
    """Return the modules that a spec needs and that are not installed, without importing any."""
    return [name for name in spec.needs if not _installed(name)]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_pair(backend: BackendSpec, layout: LayoutSpec) -> None:
    """Raise `IncompatibleError` if the layout requires a capability that the backend doesn't declare."""
    missing = layout.requires - backend.capabilities
    if missing:
        raise IncompatibleError(
            f"layout {layout.name!r} can't run on backend {backend.name!r}, which lacks {', '.join(sorted(missing))}"
        )
