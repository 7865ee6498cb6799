"""Discovery, loading, validation and use of plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import topicstore as ts
from topicstore import plugins
from topicstore.contract.plugin_specs import BackendSpec, LayoutSpec
from topicstore.plugins import Registry, check_pair, load_target
from topicstore_backends.plugin import topicstore_backends

BUILT_IN = [
    EntryPoint("backends", "topicstore_backends.plugin", plugins.GROUP),
    EntryPoint("layouts", "topicstore_layouts.plugin", plugins.GROUP),
]
BACKENDS = {spec.name for spec in topicstore_backends()}

GOOD = """
from topicstore import hookimpl
from topicstore.contract.plugin_specs import BackendSpec
@hookimpl
def topicstore_backends():
    return [BackendSpec(name="{name}", target="nowhere:Nothing", summary="a test", needs=("no_such_module_",),
                        install="topicstore-test")]
"""

SHOUT = """
import attrs
from topicstore import hookimpl
seen = []
@hookimpl(wrapper=True)
def topicstore_store(request):
    request.batch = request.batch.replace(payloads=[bytes(p).swapcase() for p in request.batch.payloads])
    return (yield)
@hookimpl(wrapper=True)
def topicstore_read(request):
    result = yield
    if len(result.batch):
        batch = result.batch.replace(payloads=[bytes(p).swapcase() for p in result.batch.payloads])
        result = attrs.evolve(result, batch=batch)
    return result
@hookimpl
def topicstore_opened(db):
    seen.append("opened")
@hookimpl
def topicstore_closed(db):
    seen.append("closed")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Return a function that writes an importable module for the test, and returns its entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def write(name: str, text: str, entry: str | None = None) -> EntryPoint:
        (tmp_path / f"{name}.py").write_text(text)
        made.append(name)
        return EntryPoint(entry or name, name, plugins.GROUP)

    yield write
    for name in made:
        sys.modules.pop(name, None)


def use(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    """Make databases find their plugins in this registry."""
    monkeypatch.setattr("topicstore.storage.opening.registry", lambda: registry)


def reasons(registry: Registry) -> dict[str, str]:
    return {failed.name: failed.reason for failed in registry.failed}


def test_built_ins_come_through_entry_points_like_anyone() -> None:
    """Built-in backends and layouts are found through entry points, like plugins of other packages."""
    registry = plugins.registry()
    assert BACKENDS <= set(registry.backends())
    assert {"reference", "block"} <= set(registry.layouts())
    assert {"backends", "layouts"} <= set(registry.plugins)


def test_listing_imports_no_engine() -> None:
    """Neither importing topicstore nor listing plugins loads an engine, pyarrow, Spark or hypothesis."""
    program = (
        "import sys, topicstore; from topicstore.plugins import registry; registry().backends()\n"
        "heavy = 'rocksdict plyvel duckdb sortedcontainers pyarrow pyspark hypothesis pytest'.split()\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plugin_that_fails_to_import_takes_no_other_along(module) -> None:  # type: ignore[no-untyped-def]
    """A plugin that can't be imported is recorded with the reason, and the others work."""
    broken = module("broken_plugin_", "raise RuntimeError('boom')")
    absent = EntryPoint("absent", "no_such_module_at_all_", plugins.GROUP)
    registry = Registry([*BUILT_IN, broken, absent, module("good_plugin_", GOOD.format(name="mine"))])
    assert reasons(registry)["broken_plugin_"] == "RuntimeError: boom"
    assert "no_such_module_at_all_" in reasons(registry)["absent"]
    assert {*BACKENDS, "mine"} == set(registry.backends())


def test_a_taken_plugin_name_is_refused_and_reported(module) -> None:  # type: ignore[no-untyped-def]
    """Of two plugins with one name, the first in a fixed order works, and the other is recorded as failed."""
    registry = Registry([*BUILT_IN, module("second_", GOOD.format(name="other"), entry="backends")])
    assert reasons(registry) == {
        "backends": "the name 'backends' is taken by a plugin of an unknown distribution; rename one of them"
    }
    assert BACKENDS == set(registry.backends())


def test_a_taken_backend_name_is_refused_and_reported(module) -> None:  # type: ignore[no-untyped-def]
    """A plugin with the backend name of another plugin is ignored as a whole."""
    registry = Registry([*BUILT_IN, module("zz_thief_", GOOD.format(name="rocksdb"))])
    assert reasons(registry) == {"zz_thief_": "PluginError: the backend name 'rocksdb' is taken by 'backends'"}
    assert registry.backend("rocksdb").target == "topicstore_backends.rocksdb:RocksdbBackend"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("from topicstore import hookimpl\n@hookimpl\ndef topicstore_stor(request): ...", "unknown hook"),
        ("from topicstore import hookimpl\n@hookimpl\ndef topicstore_store(req): ...", "Argument"),
        ("from topicstore import hookimpl\n@hookimpl\ndef topicstore_backends(): return [1]", "not a BackendSpec"),
        ("from topicstore import hookimpl\n@hookimpl\ndef topicstore_backends(): return 1/0", "ZeroDivisionError"),
    ],
    ids=["no such hook", "wrong argument", "wrong result", "raises"],
)
def test_an_invalid_hook_is_reported(module, text: str, reason: str) -> None:  # type: ignore[no-untyped-def]
    """Hook implementations are validated when the plugin is loaded."""
    registry = Registry([*BUILT_IN, module("wrong_plugin_", text)])
    assert list(reasons(registry)) == ["wrong_plugin_"]
    assert reason in reasons(registry)["wrong_plugin_"]
    assert BACKENDS == set(registry.backends())


def registered(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which ``r()`` returns the registry, with these environment variables."""
    return subprocess.run(
        [sys.executable, "-c", f"from topicstore.plugins import registry as r; {program}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


def test_plugins_are_disabled_by_name() -> None:
    """Plugins in TOPICSTORE_DISABLE_PLUGINS are not loaded, and are recorded as disabled."""
    program = "print(sorted(r().layouts()), [f.reason for f in r().failed])"
    done = registered(program, TOPICSTORE_DISABLE_PLUGINS="layouts, ")
    assert ("[] ['disabled by TOPICSTORE_DISABLE_PLUGINS']\n", "") == (done.stdout, done.stderr)


def test_a_plugin_to_disable_that_is_none_is_warned_of() -> None:
    """An unknown name in TOPICSTORE_DISABLE_PLUGINS warns and suggests a similar one; the others are disabled."""
    done = registered("print(sorted(r().layouts()))", TOPICSTORE_DISABLE_PLUGINS="layouts, backend")
    assert "[]\n" == done.stdout
    warning = "RuntimeWarning: TOPICSTORE_DISABLE_PLUGINS: there is no plugin 'backend'; is backends meant?"
    assert warning in done.stderr


@pytest.mark.parametrize(
    ("name", "help_"),
    [
        ("TOPICSTORE_DISABLE_PLUGIN", "is TOPICSTORE_DISABLE_PLUGINS meant?"),
        (
            "TOPICSTORE_BACKEND",
            "there are: TOPICSTORE_CONFORMANCE, TOPICSTORE_DATA, TOPICSTORE_DISABLE_PLUGINS, TOPICSTORE_HYPOTHESIS",
        ),
    ],
)
def test_a_variable_that_nothing_reads_is_warned_of(name: str, help_: str) -> None:
    """An unknown TOPICSTORE_ variable warns once in a process; variables of plugins and server settings don't."""
    read = {"TOPICSTORE_HYPOTHESIS": "random", "TOPICSTORE__LIMITS__CONNECTIONS": "5", "MY_TOPICSTORE_X": "1"}
    done = registered("r(); r()", **{name: "", **read})
    assert 1 == done.stderr.count("Warning")
    assert f"RuntimeWarning: nothing reads the environment variable {name}; {help_}\n" in done.stderr


def test_a_plugin_names_the_variables_that_it_reads(module) -> None:  # type: ignore[no-untyped-def]
    """A plugin that returns an invalid variable name is recorded as failed."""
    text = "from topicstore import hookimpl\n@hookimpl\ndef topicstore_variables(): return [{!r}]"
    good = module("reads_", text.format("TOPICSTORE_READ_THIS"))
    registry = Registry([*BUILT_IN, good, module("strange_", text.format("PATH"))])
    assert {"TOPICSTORE_READ_THIS", "TOPICSTORE_DISABLE_PLUGINS"} == registry.variables
    assert "returned 'PATH', not a name that begins with TOPICSTORE_" in reasons(registry)["strange_"]


def test_a_missing_engine_is_named_with_the_pip_command(module, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """If an engine's package is missing, the error names the package to install, and nothing is created."""
    registry = Registry([*BUILT_IN, module("needy_", GOOD.format(name="needy"))])
    use(monkeypatch, registry)
    with pytest.raises(ts.BackendUnavailableError) as raised:
        ts.open(tmp_path / "db", backend="needy")
    assert str(raised.value) == "backend 'needy' needs no_such_module_: pip install \"topicstore-test\""
    assert not (tmp_path / "db").exists()


def test_a_target_that_is_not_what_it_says_is_refused() -> None:
    """A plugin's target that isn't a subclass of the contract's class, or can't be loaded, is refused."""
    with pytest.raises(ts.PluginError, match="is not a Backend"):
        load_target(BackendSpec(name="x", target="pathlib:Path", summary=""))
    with pytest.raises(ts.BackendUnavailableError, match="can't be loaded"):
        load_target(LayoutSpec(name="x", target="pathlib:NoSuchClass", summary=""))


def test_an_impossible_pair_is_refused_with_the_reason() -> None:
    """A layout on a backend without a required capability is refused, and the error names it."""
    backend = BackendSpec(name="slow", target="a:B", summary="", capabilities={"persistent"})
    layout = LayoutSpec(name="leaping", target="a:B", summary="", requires={"fast_seek", "sql", "persistent"})
    with pytest.raises(ts.IncompatibleError, match="lacks fast_seek, sql"):
        check_pair(backend, layout)


def test_unknown_names_list_the_known_ones() -> None:
    """The error for an unknown name lists the known names."""
    with pytest.raises(ts.UnknownPluginError, match=r"no backend 'rocks'; there are: .*memory.*rocksdb"):
        plugins.registry().backend("rocks")


def test_wrappers_are_recorded_and_required(module, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The manifest records the plugins; without one of them the database can't be opened."""
    full = Registry([*BUILT_IN, module("shout_", SHOUT, entry="shout")])
    use(monkeypatch, full)
    with ts.open(tmp_path / "db", plugins=["shout"]) as db:
        db.store([ts.Message("a", b"Hi")])
    use(monkeypatch, Registry(BUILT_IN))
    with pytest.raises(ts.UnknownPluginError, match="no plugin 'shout'"):
        ts.open(tmp_path / "db")
    use(monkeypatch, full)
    with ts.open(tmp_path / "db") as db:
        assert [m.payload for m in db.replay("#")] == [b"Hi"]


def test_lifecycle_hooks_are_called_on_the_plugins_of_the_database_only(module, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """`topicstore_opened` and `topicstore_closed` are only called on the plugins of the database.

    If `topicstore_opened` fails, the database can be opened again at once, even while the error is kept.
    """
    use(monkeypatch, Registry([*BUILT_IN, module("shout_", SHOUT, entry="shout")]))
    with ts.open(tmp_path / "other"), ts.open(tmp_path / "db", plugins=["shout"]):
        pass
    shout = sys.modules["shout_"]
    assert shout.seen == ["opened", "closed"]  # type: ignore[attr-defined]
    with monkeypatch.context() as failing:
        failing.setattr(shout, "seen", None)
        with pytest.raises(AttributeError, match="append"):
            ts.open(tmp_path / "db")
    ts.open(tmp_path / "db").close()


def test_wrappers_stand_in_the_order_given(module, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Plugins wrap in the given order: the first sees the caller's batch, and the last changes the stored batch."""
    add = """
from topicstore import hookimpl
@hookimpl(wrapper=True)
def topicstore_store(request):
    request.batch = request.batch.replace(payloads=[p + b"{letter}" for p in request.batch.payloads])
    return (yield)
"""
    entries = [module(f"add_{letter}_", add.format(letter=letter), entry=letter) for letter in "ab"]
    use(monkeypatch, Registry([*BUILT_IN, *entries]))
    with ts.open(tmp_path / "db", plugins=["a", "b"]) as db:
        db.store([ts.Message("t", b"-")])
        assert [m.payload for m in db.replay("#")] == [b"-ab"]


def test_a_plugin_may_only_wrap(module, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A plugin that implements `topicstore_store` without wrapping is refused when the database is opened."""
    text = "from topicstore import hookimpl\n@hookimpl\ndef topicstore_store(request): ..."
    use(monkeypatch, Registry([*BUILT_IN, module("replaces_", text, entry="replaces")]))
    with pytest.raises(ts.PluginError, match="topicstore_store of plugin 'replaces' must be"):
        ts.open(tmp_path / "db", plugins=["replaces"])
    assert not (tmp_path / "db").exists()


def test_a_transform_that_breaks_messages_is_refused(module, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Columns that a plugin replaces are validated like columns from a caller."""
    bad = """
from topicstore import hookimpl
@hookimpl(wrapper=True)
def topicstore_store(request):
    request.batch = request.batch.replace(topics=["a/#"] * len(request.batch))
    return (yield)
"""
    use(monkeypatch, Registry([*BUILT_IN, module("bad_", bad, entry="bad")]))
    with ts.open(tmp_path / "db", plugins=["bad"]) as db:
        with pytest.raises(ts.InvalidMessageError, match="wildcard"):
            db.store([ts.Message("t", b"")])
        assert list(db.replay("#")) == []


LAYOUTS = """
import attrs
from topicstore import hookimpl
from topicstore.contract.plugin_specs import LayoutSpec
from topicstore_layouts.reference import ReferenceLayout

class Plain(ReferenceLayout):
    pass

class Odd(ReferenceLayout):
    def open(self, engine, shard, generation):
        return object()

class Unfinished(ReferenceLayout.__mro__[1]):
    pass

class Careless(ReferenceLayout):
    Options = dict

@hookimpl
def topicstore_layouts():
    return [LayoutSpec(name=name.lower(), target=f"{__name__}:{name}", summary="a test")
            for name in ("Plain", "Odd", "Unfinished", "Careless", "Absent")] + [
            LayoutSpec(name="broken", target="no_layout_at_all_:Layout", summary="a test")]
"""


@pytest.mark.parametrize(
    ("layout", "error", "words"),
    [
        ("odd", ts.PluginError, "open returned a object, not a Slab"),
        ("unfinished", ts.PluginError, "lacks create, open"),
        ("careless", ts.PluginError, "not an attrs class"),
        ("absent", ts.BackendUnavailableError, "Absent"),
        ("broken", ts.BackendUnavailableError, "ModuleNotFoundError"),
    ],
)
def test_an_invalid_layout_is_named(module, monkeypatch, tmp_path: Path, layout, error, words) -> None:  # type: ignore[no-untyped-def]
    """An invalid layout raises an error that names it; other layouts work, even without options."""
    use(monkeypatch, Registry([*BUILT_IN, module("topicstore_test_layouts", LAYOUTS)]))
    with ts.open(tmp_path / "good", mode="x", backend="memory", layout="plain") as db:
        db.store([ts.Message("a", b"1")])
        with pytest.raises(error, match=f"{layout}.*{words}"):
            db.add_generation(layout)
        assert [b"1"] == [message.payload for message in db.replay("#")]
    with pytest.raises(error, match=f"{layout}.*{words}"):
        ts.open(tmp_path / "bad", mode="x", backend="memory", layout=layout)


def test_a_target_that_fails_when_it_is_imported(module, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Any error during the import of a target becomes a `BackendUnavailableError` that names it."""
    module("topicstore_test_fails", "raise ValueError('not today')")
    text = (
        GOOD.format(name="fails").replace("nowhere:Nothing", "topicstore_test_fails:X").replace("no_such_module_", "os")
    )
    use(monkeypatch, Registry([*BUILT_IN, module("topicstore_test_plugin", text)]))
    with pytest.raises(ts.BackendUnavailableError, match=r"fails.*ValueError: not today.*topicstore-test"):
        ts.open(tmp_path / "db", mode="x", backend="fails")
