"""Install the lowest version of every dependency that pyproject.toml allows, and test whether topicstore works with it.

``python lowest.py VENV`` makes the virtual environment anew. The smoke test imports, replays and verifies on every
engine, and asks every command for its help. The exit status is that of the first step that fails.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = {"all", "bench", "spark"}
"""Extras with servers and Java: gigabytes, of which the library needs nothing."""
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?>=([0-9.]+)[^;]*(;.*)?")
PAIRS = (("rocksdb", "block"), ("leveldb", "block"), ("duckdb", "table"), ("memory", "block"))
ROW = {"timestamp": 1_700_000_000_000_000, "topic": "a/b", "client_id": "c", "qos": 1, "retain": False, "payload": "é"}


def main(venv: Path) -> None:
    """Install and try."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name not in LEFT_OUT}
    needed = [*project["dependencies"], *(one for needs in extras.values() for one in needs)]
    lowest = {f"{found[1]}=={found[2]}{found[3] or ''}" for one in needed if (found := REQUIREMENT.fullmatch(one))}
    shutil.rmtree(venv, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(venv))
    python = str(venv / "bin" / "python")
    with tempfile.TemporaryDirectory() as directory:
        pinned = Path(directory, "lowest.txt")
        pinned.write_text("\n".join(sorted(lowest)), encoding="utf-8")
        install = ("-m", "pip", "install", "--quiet", "--constraint", str(pinned), "--editable")
        run(python, *install, f"{ROOT}[{','.join(extras)}]")
        print(f"installed: {', '.join(sorted(lowest))}")
        smoke([python, "-W", "ignore", "-m", "topicstore.cli"], Path(directory))
    print("topicstore works with the lowest versions of what it needs")


def smoke(program: list[str], directory: Path) -> None:
    """Run the program."""
    listed = run(*program, "--help").partition("Commands:\n")[2].partition("\n\n")[0]
    commands = [words[0] for line in listed.splitlines() if re.match(r"  \w", line) and (words := line.split())]
    for command in commands:
        run(*program, command, "--help")
    for backend, layout in PAIRS:
        if backend == "leveldb" and sys.version_info >= (3, 13):
            continue
        path = str(directory / backend)
        pair = ("--backend", backend, "--layout", layout)
        run(*program, "import", path, "-", *pair, stdin=json.dumps(ROW))
        if backend != "memory":
            run(*program, "replay", path, "--output", f"{path}.parquet")
            run(*program, "import", path, f"{path}.parquet")
            rows = [json.loads(line) for line in run(*program, "replay", path).splitlines()]
            if rows != [ROW, ROW]:
                sys.exit(f"{backend}: {rows}")
            run(*program, "verify", path)
    run(*program, "sql", str(directory / "duckdb"), "SELECT * FROM messages", "--json")
    print(f"{len(commands)} commands and {len(PAIRS)} engines were tried")


def run(*command: str, stdin: str = "", cwd: Path | None = None) -> str:
    """Return what a command prints; if it fails, print all and exit."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
