"""Ceilings for the modules that the start of a program imports, because imports take most of a start's time.

Only modules of this distribution are counted: how many the standard library and other packages have differs between
their versions. The tests name only the other packages that are slow to import and that a start doesn't need.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from topicstore_conformance.conditions.skipping import need

IMPORT = "import sys, topicstore as ts"
HELP = """
import sys
from topicstore.cli import main
sys.argv[1:] = ["--help"]
try:
    main()
except SystemExit:
    pass
"""
READ = """
import sys
import topicstore as ts
with ts.open(sys.argv[1]) as db:
    db.store([ts.Message("a/b", b"1")])
    assert [one.payload for one in db.replay("a/b")] == [b"1"]
"""
SERVE = """
import asyncio, sys
import topicstore as ts
from topicstore.server import Address, ListenerSettings, Server, ServerSettings
from topicstore.server.config.units import Addresses
from topicstore.server.config.model import HttpSettings

local = Address("127.0.0.1:0")
http = HttpSettings(listen=Addresses.read([local])) if sys.argv[2] == "http" else None
settings = ServerSettings(listeners={"mqtt": ListenerSettings(listen=local)}, http=http)

async def serve():
    with ts.open(sys.argv[1]) as db:
        async with Server(db, settings) as server:
            assert server.addresses

asyncio.run(serve())
"""

PROGRAMS = {"import": IMPORT, "help": HELP, "read": READ, "mqtt": SERVE, "http": SERVE}
OURS = ("topicstore", "topicstore_backends", "topicstore_benchmarks", "topicstore_conformance", "topicstore_layouts")
CEILINGS = {"import": 3, "help": 10, "read": 144, "mqtt": 246, "http": 298}
"""The number of modules of this distribution that each program imports. Lower a ceiling when the number sinks."""
SLOW = ("pyarrow.compute", "pyarrow.parquet", "pyarrow.dataset", "pandas", "duckdb", "rich", "httpx", "sqlglot")
OF_HTTP = ("litestar", "uvicorn", "h11", "prometheus_client", "tomlkit", "websockets")
OF_DATABASES = ("numpy", "pyarrow", "rocksdict", "pluggy")
NEEDLESS = {
    "import": (*SLOW, *OF_HTTP, *OF_DATABASES, "attr", "click", "msgspec", "importlib.metadata"),
    "help": (*SLOW, *OF_HTTP, *OF_DATABASES),
    "read": (*SLOW, *OF_HTTP, "asyncio", "click", "ssl", "ohmqtt"),
    "mqtt": (*SLOW, *OF_HTTP),
    "http": (*SLOW, "websockets"),
}
"""Packages that each program must not import: they are slow, and it doesn't use them."""


@pytest.fixture(scope="module", params=PROGRAMS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """The name of a program, and the modules that it has imported at its end."""
    name: str = request.param
    if name in ("read", "mqtt", "http"):
        need("rocksdb")
    program = f"{PROGRAMS[name]}\nprint(*sys.modules, file=sys.stderr)"
    path: Path = tmp_path_factory.mktemp("start") / "db"
    done = subprocess.run([sys.executable, "-c", program, path, name], capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr
    return name, done.stderr.splitlines()[-1].split()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc, where threads can be counted")
def test_the_program_starts_no_threads_for_matrices() -> None:
    """The program has a single thread after NumPy was imported, whatever the number of cores."""
    program = f"{HELP}\nimport os, numpy\nprint(len(os.listdir('/proc/self/task')), file=sys.stderr)"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "1\n" == done.stderr


def test_a_start_imports_few_modules(started: tuple[str, list[str]]) -> None:
    """A program imports no more modules of this distribution than its ceiling, until it has done its first work."""
    name, modules = started
    ours = sorted(one for one in modules if one.partition(".")[0] in OURS)
    assert len(ours) <= CEILINGS[name], f"{name} imports {len(ours)} modules of ours: {' '.join(ours)}"
    assert len(ours) == CEILINGS[name], f"{name} imports only {len(ours)} modules of ours: lower its ceiling"


def test_a_start_imports_no_package_that_it_does_not_use(started: tuple[str, list[str]]) -> None:
    """A program imports slow packages only if it uses them; a server imports those of HTTP only if it serves HTTP."""
    name, modules = started
    assert set() == set(modules) & set(NEEDLESS[name])
