"""The programs and commands in the documents run, and the files and names in them exist."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.cli.demo.fleet import fleet
from topicstore.files.formats import encode_lines
from topicstore.plugins import registry
from topicstore.server import read_settings

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "framework" / "guides").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "conformance" / "README.md", *GUIDES]
ALL = ["ARCHITECTURE.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in DOCUMENTS)]


SERVES = re.compile(r"^(?:\$ )?(topicstore serve\b[^&#\n]*)(?:#.*)?$", re.MULTILINE)
"""A server that is started in the foreground, so that no later command of the block runs before the server ends."""
SETTINGS = [
    ROOT / "framework" / "guides" / f"{name}.md"
    for name in ("configuration", "home_automation", "http", "production", "server")
]
"""The documents whose TOML blocks are server settings."""


def blocks(language: str, documents: list[Path] = DOCUMENTS, *, serving: bool = False) -> list[object]:
    """Return the documents' code blocks in a language, each with the name of its document and its number there.

    With `serving`, return only blocks that start a server, otherwise only the others. Blocks that start Spark or the
    conformance suite are marked as slow.
    """
    return [
        pytest.param(
            block,
            id=f"{path.relative_to(ROOT)}-{number}",
            marks=[pytest.mark.slow] if "spark" in block or "topicstore conformance" in block else [],
        )
        for path in documents
        for number, block in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        )
        if (SERVES.search(block) is not None) == serving
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as ``make demo`` leaves it, in which one code block of a document is run."""
    (tmp_path / "demo-data").mkdir()
    with (tmp_path / "demo-data" / "fleet.jsonl").open("wb") as sample:
        sample.writelines(map(encode_lines, fleet(3_000)))
    return tmp_path


def run_shell(script: str, folder: Path) -> str:
    """Run commands as a pasted script, return their output, and fail with it if a command fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as shell:
            shell.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)  # a server that a failed script has left
        output.seek(0)
        printed = output.read()
    assert 0 == shell.returncode, printed
    return printed


@pytest.mark.parametrize("block", blocks("python"))
def test_programs_in_documents_run(block: str, folder: Path) -> None:
    """Each Python block runs by itself in a new folder, without a warning."""
    if "spark" in block:
        pytest.importorskip("pyspark", reason='needs Spark: pip install "topicstore[spark]"')
    for name in re.findall(r"^import (duckdb|pandas|polars)$", block, re.MULTILINE):
        pytest.importorskip(name, reason=f"needs {name}: pip install {name}")
    done = subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=folder, capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr
    assert "spark" in block or "" == done.stderr


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_in_documents_run(block: str, folder: Path) -> None:
    """Each shell block runs by itself, in a folder with the demo's data."""
    run_shell(block, folder)


def pasted(path: Path) -> str:
    """Return a page's programs and commands as one script, without servers in the foreground, which would not end."""
    script = []
    for language, block in re.findall(
        r"^```(sh|console|python)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
    ):
        if language == "python":
            script.append(f"python -W error - <<'END_OF_PROGRAM'\n{block}END_OF_PROGRAM")
            continue
        commands = block if language == "sh" else "\n".join(re.findall(r"^\$ (.*)$", block, re.MULTILINE))
        script.append(SERVES.sub("", re.sub(r"^\$ ", "", commands, flags=re.MULTILINE)))
    return "\n".join(script)


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_run_as_they_are_pasted(path: Path, folder: Path) -> None:
    """All blocks of a page run one after the other, in one shell and one folder, and leave nothing running."""
    script = pasted(path)
    for module, package in (
        ("pyspark", '"topicstore[spark]"'),
        ("duckdb", '"topicstore[duckdb]"'),
        ("pandas", "pandas"),
        ("polars", "polars"),
    ):
        if module.removeprefix("py") in script:
            pytest.importorskip(module, reason=f"needs {module}: pip install {package}")
    run_shell(f'{script}\nif [ -n "$(jobs -r)" ]; then jobs; exit 1; fi', folder)


@pytest.mark.parametrize("block", blocks("console"))
def test_dialogues_in_documents_are_true(block: str, folder: Path) -> None:
    """Commands print the lines that their console block shows, except for numbers, which depend on the machine."""
    commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    printed = run_shell("\n".join(commands), folder)
    shown = re.sub(r"^\$ .*\n", "", block, flags=re.MULTILINE)
    assert wording(shown) == wording(printed)


@pytest.mark.parametrize("block", [*blocks("sh", serving=True), *blocks("console", serving=True)])
def test_servers_in_documents_start(block: str, folder: Path) -> None:
    """Each server in a block starts on free ports, prints the lines of the block, and ends with code 0."""
    *before, serve = re.findall(r"^\$ (.*)$", block, re.MULTILINE) or block.splitlines()
    run_shell("\n".join(before), folder)
    listener = "LISTENERS__MQTTS" if "--tls" in block else "LISTENERS__MQTT"
    variables = {f"TOPICSTORE__{name}__LISTEN": "127.0.0.1:0" for name in (listener, "HTTP")}
    with subprocess.Popen(
        [sys.executable, "-m", *serve.partition("#")[0].replace("topicstore", "topicstore.cli", 1).split()],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            first, address = server.stdout.readline(), server.stdout.readline()
            assert f"{listener.rpartition('__')[2].lower()}://127.0.0.1:" in address
            assert "$" not in block or f"$ {serve}\n{first}" in block
        finally:
            server.terminate()
    assert 0 == server.returncode


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml_in_documents_can_be_read(block: str) -> None:
    """Each TOML block is valid TOML."""
    assert tomllib.loads(block)


@pytest.mark.parametrize("block", blocks("toml", SETTINGS))
def test_settings_in_documents_are_settings(block: str, tmp_path: Path) -> None:
    """Each TOML block in the guides of the server is a whole settings file."""
    (tmp_path / "server.toml").write_text(block)
    assert read_settings(tmp_path / "server.toml", {}) != read_settings(None, {})


@pytest.mark.parametrize("block", blocks("sql"))
def test_sql_in_documents_is_understood(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each SQL block of the documents runs in DuckDB, over an export or over a database with the table layout."""
    duckdb = pytest.importorskip("duckdb", reason='needs DuckDB: pip install "topicstore[duckdb]"')
    monkeypatch.chdir(folder)
    if "read_parquet" in block:
        run_shell("topicstore import data demo-data/fleet.jsonl; topicstore generations add data", folder)
        run_shell("topicstore export data cold", folder)
        assert duckdb.sql(block).fetchall()
        return
    with ts.open("data", backend="duckdb", layout="table") as db:
        db.store([ts.Message("hall/co2", b"412", timestamp=1_748_783_000_000_000)])
        assert 1 == db.sql(block).num_rows


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_stand_in_blocks_that_are_run(path: Path) -> None:
    """A code block without a language is no command to test: it shows output, installs packages, or calls a server."""
    for block in re.findall(r"^```\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        assert not re.search(r"^(\$ |topicstore |python |pip )", block, re.MULTILINE), block


def test_environment_variables_are_in_the_table() -> None:
    """The guide's table lists exactly the environment variables that are read."""
    table = (ROOT / "framework" / "guides" / "command_line.md").read_text()
    assert registry().variables == set(re.findall(r"^\| `(TOPICSTORE_[A-Z]\w*)` \|", table, re.MULTILINE))


def wording(text: str) -> list[str]:
    """Return the words of a text, without numbers and their units, and without printed messages."""
    text = re.sub(r"^\{.*\}$|, [\d,]+ a second", "", text, flags=re.MULTILINE)
    return re.findall(r"(?<![\w.])[a-zA-Z]{3,}(?![\w.])", text)


def test_the_readme_is_short() -> None:
    """The README has at most 200 lines and links every guide."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert [] == [guide.name for guide in GUIDES if f"framework/guides/{guide.name}" not in text]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Links lead to existing files, and to existing headings."""
    for target, _, heading in re.findall(r"\]\(([^)#:]*)(#([^)]*))?\)", path.read_text()):
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings]


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"])
def test_files_that_are_named_are_there(name: str) -> None:
    """Files that documents name exist, relative to the root, the framework or the package."""
    named = set(re.findall(r"(?<![\w./-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))\b", (ROOT / name).read_text()))
    assert named
    places = (ROOT, ROOT / "framework" / "topicstore", ROOT / "framework")
    assert [] == [path for path in sorted(named) if not any((place / path).exists() for place in places)]


@pytest.mark.parametrize("name", ALL)
def test_modules_that_are_named_are_there(name: str) -> None:
    """Dotted names of the packages' modules and members in documents resolve."""
    named = set(re.findall(r"`(topicstore(?:_\w+)?(?:\.[a-z_]\w*)+)", (ROOT / name).read_text()))
    folders = {path.parent.name: path.parent for path in ROOT.glob("*/topicstore*/__init__.py")}
    missing = []
    for dotted in sorted(named):
        package, *rest = dotted.split(".")
        if package not in folders or rest[0] in ("commands", "json", "toml"):
            continue  # the dotted name is an entry-point group or a file name
        at = folders[package]
        for part in rest:
            if (at / part).is_dir():
                at = at / part
            else:
                module = at / f"{part}.py"
                text = (module if module.exists() else at / "__init__.py").read_text()
                if not module.exists() and part not in text:
                    missing.append(dotted)
                break
    assert [] == missing
