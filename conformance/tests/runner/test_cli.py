"""`topicstore conformance`: rejected arguments, and the output for a plugin that fails every test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner
from topicstore.cli import cli

PLUGIN = """
import sys

from topicstore import hookimpl
from topicstore.contract.plugin_specs import BackendSpec, LayoutSpec
from topicstore_backends.memory import MemoryBackend
from topicstore_layouts.reference import ReferenceLayout

@hookimpl
def topicstore_backends():
    return [BackendSpec(name="broken", target="broken_plugin:Broken", summary="", capabilities={"unheard_of"}),
            BackendSpec(name="absent", target="broken_plugin:Broken", summary="", needs=("no_such_module",))]

@hookimpl
def topicstore_layouts():
    return [LayoutSpec(name="picky", target="broken_plugin:Picky", summary="", requires={"unheard_of"})]

class Broken(MemoryBackend):
    def open_shard(self, path, keyspaces, *, create):
        if "xdist" in sys.modules:  # in the suites, and not in the first step before them
            raise KeyError("of all things")
        return super().open_shard(path, keyspaces, create=create)

class Picky(ReferenceLayout):
    pass
"""
PROGRAM = """
import functools, json, sys
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore_conformance.runner import running

told = []
once = functools.cache(lambda run_all: run_all(running.plans_for("broken", None, "quick"), told.append))

def run_all(plans, tell, *, first_failure, run_all=running.run_all):
    runs = once(run_all)
    assert list(plans) == [run.plan for run in runs]
    for run in told:
        tell(run)
    return runs

running.run_all = run_all
command = ["conformance", "--backend", "broken", "--quick"]
results = [CliRunner().invoke(cli, [*command, *how]) for how in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.stdout, result.stderr] for result in results]))
"""
"""Runs the suites once, and then the command for each output format with these results."""
PROMISE = "Closing ends a compaction between two steps, with an error, and the next opening finds all messages."


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the plugin `PLUGIN` is installed, and its layout is the only one."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "broken_plugin.py").write_text(PLUGIN)
    information = folder / "broken-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[topicstore]\nbroken = broken_plugin\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "TOPICSTORE_DISABLE_PLUGINS": "layouts", "COLUMNS": "200"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "topicstore.cli", "conformance", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def refused(*arguments: str) -> str:
    """Run the command in this process; check that it fails as wrong usage, and return the error message."""
    result = CliRunner().invoke(cli, ["conformance", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr


def test_a_name_of_what_to_test_is_required() -> None:
    """No name, a name together with --all, and two output formats are each wrong usage."""
    assert "--backend" in refused()
    assert "--all" in refused("--all", "--backend", "memory")
    assert "exclude" in refused("--backend", "memory", "--json", "--markdown")


def test_unregistered_names() -> None:
    """An unknown name is rejected with a list of the registered names."""
    for option in ("--backend", "--layout"):
        told = refused(option, "no such", "--quick")
        assert "'no such'; there are: " in told


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the suites' dependencies are missing, the error names the command that installs them."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)  # makes the import system report the module as missing
    assert 'needs hypothesis: pip install "topicstore[conformance]"' in refused("--backend", "memory")


def test_what_does_not_fit(environment: dict[str, str]) -> None:
    """An incompatible pair and a plugin that can't be loaded are rejected with the reason."""
    for names, reason in (
        (("--backend", "memory", "--layout", "picky"), "'picky' can't run on backend 'memory', which lacks unheard_of"),
        (("--backend", "absent"), "backend 'absent' needs no_such_module"),
    ):
        done = run(environment, *names)
        assert (2, "") == (done.returncode, done.stdout)
        assert reason in done.stderr


@pytest.fixture(scope="module")
def formats(environment: dict[str, str]) -> dict[str, str]:
    """The output for the plugin's backend with its layout, by output option."""
    how = {"": [], "--json": ["--json"], "--markdown": ["--markdown"]}
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(how.values()))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(done.stdout)
    for code, _, told in results:
        assert 1 == code
        lines = sorted(line.partition(": ")[0] for line in told.splitlines())
        assert ["backend broken, quick", "broken-picky, quick", "parts broken-picky, quick"] == lines
    return {option: printed for option, (_, printed, _) in zip(how, results, strict=True)}


@pytest.fixture
def printed(formats: dict[str, str]) -> str:
    """The command's output without an output option."""
    return formats[""]


def test_broken_promises_are_named(printed: str) -> None:
    """Each failed test's docstring is printed once, and equal failures of several tests are printed together."""
    assert 1 == printed.count(PROMISE)
    broke = [line for line in printed.splitlines() if line.startswith("broken-picky broke: ")]
    assert 1 == len(broke)
    after = printed.partition(broke[0])[2]
    assert ": KeyError: 'of all things' (" in after
    assert "test_close_beside_a_compaction[broken-picky]" in after.partition("equal failures: ")[2].splitlines()[0]


def test_the_verdict_names_what_was_not_tried(printed: str) -> None:
    """The verdict says for each suite whether its promises were kept, and names those not tried, with the reason."""
    verdict = printed.partition("backend broken: NOT kept: ")[2]
    assert "    not tried: needs persistent\n        " in verdict
    assert "tried less often" in verdict


def test_groups_are_counted(printed: str) -> None:
    """The output lists the capabilities, and then a row for each group with its counts and the reasons of skips."""
    table = printed.partition("broken-picky")[2].partition("backend broken")[0]
    rows = {line.split()[0]: line for line in table.splitlines() if line}
    assert "unheard_of" == table.split()[0]
    assert "needs persistent (" in rows["damage"]
    kept, broken, skipped = rows["all"].split()[1:4]
    assert kept.isdigit()
    assert broken.isdigit() or broken == "-"
    assert skipped.isdigit() or skipped == "-"


def test_json(formats: dict[str, str]) -> None:
    """The JSON document has the outcome of every test, and the plugins that were not tested."""
    found: dict[str, Any] = json.loads(formats["--json"])
    assert found["kept"] is False
    assert {"absent": "backend 'absent' needs no_such_module"}.items() <= found["left_out"].items()
    runs = {(each["suite"], each["layout"]): each for each in found["runs"]}
    assert {("backend", None), ("database", "picky"), ("parts", "picky")} == runs.keys()
    tests = runs["database", "picky"]["tests"]
    (closing,) = [test for test in tests if test["promise"] == PROMISE]
    assert ("compaction", "failed", "KeyError: 'of all things'") == (
        closing["group"],
        closing["outcome"],
        closing["reason"],
    )
    assert {"failed", "skipped"} <= {test["outcome"] for test in tests}
    assert ["unheard_of"] == runs["database", "picky"]["capabilities"]


def test_markdown(formats: dict[str, str]) -> None:
    """The Markdown tables list the declared capabilities, the results of each suite, and the incompatible pairs."""
    begin, backends, layouts, results, end = formats["--markdown"].strip().split("\n\n")
    assert begin.startswith("<!-- printed by: topicstore conformance")
    assert end.startswith("<!-- end of")
    assert "| `broken` | " in backends
    assert "| yes |" in backends
    assert "| `picky` | nothing | unheard_of |" in layouts.splitlines()[2]
    assert "| `broken-picky` | quick" in results
    assert "| backend `broken` | quick" in results
