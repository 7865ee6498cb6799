"""Run the whole test suite on machines that are harder to run on, each run in a fresh clone: `make test-hard`.

Names of circumstances on the command line choose some of them; one that is named twice runs twice. Prints a row
for each run as it ends, keeps each run's output, and ends with 1 if a test failed anywhere. A circumstance that
this machine can't make (another user without being root, a Python that is not there) is left out with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("TOPICSTORE_DATA") or ROOT.parent / "shared" / "data")
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
NOBODY = 65534
SMALL = "64m"
"""Of /dev/shm: what containers give by default."""


class Circumstance(NamedTuple):
    """What is made hard for a run."""

    what: str
    busy: bool = False
    one_core: bool = False
    random: bool = False
    python: str = ""
    """Begins with this version; the oldest that is here, or with ``newest`` the newest."""
    newest: bool = False
    nobody: bool = False
    small_shm: bool = False
    locale: str = ""


CIRCUMSTANCES = {
    "busy": Circumstance("every core is kept busy by something else", busy=True),
    "busy-random": Circumstance("every core is kept busy, tests in random order", busy=True, random=True),
    "one-core": Circumstance("one core", one_core=True),
    "one-core-busy": Circumstance("one core, which is kept busy by something else", one_core=True, busy=True),
    "random": Circumstance("tests in random order", random=True),
    "python-3.11": Circumstance("the oldest Python 3.11", python="3.11."),
    "python-3.13": Circumstance("the newest Python 3.13", python="3.13.", newest=True),
    "nobody": Circumstance("a user that is not root", nobody=True),
    "small-shm": Circumstance(f"/dev/shm of {SMALL}", small_shm=True),
    "locale-c": Circumstance("LANG=C", locale="C"),
    "all-at-once": Circumstance(
        f"every core busy, random order, not root, /dev/shm of {SMALL}, LANG=C",
        busy=True,
        random=True,
        nobody=True,
        small_shm=True,
        locale="C",
    ),
}


class ImpossibleError(Exception):
    """A circumstance that can't be made on this machine."""


def version_of(python: str) -> str:
    """Return the version of an interpreter with which environments can be made, or nothing."""
    asked = [python, "-c", "import platform, venv, ensurepip; print(platform.python_version())"]
    said = subprocess.run(asked, capture_output=True, text=True)
    return said.stdout.strip() if said.returncode == 0 else ""


def interpreter(one: Circumstance) -> str:
    """Return the Python that a circumstance runs with: another user can't run those in somebody's home."""
    if not one.python and not one.nobody:
        return sys.executable
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob("versions/*/bin")
    found: dict[tuple[int, ...], str] = {}
    for path in (folder / f"python3{minor}" for folder in folders for minor in ("", ".11", ".12", ".13", ".14")):
        version = version_of(str(path)) if path.is_file() and (not one.nobody or path.parts[1] == "usr") else ""
        if version.startswith(one.python or "3.") and re.fullmatch(r"3\.(1[1-9])\.\d+", version):
            found[tuple(map(int, version.split(".")))] = str(path)
    if not found:
        raise ImpossibleError(f"no Python {one.python or '3.11 or later'} is here that may be used")
    return found[max(found) if one.newest else min(found)]


@contextlib.contextmanager
def kept_busy(cpus: list[int]) -> Iterator[None]:
    """Keep each of these CPUs busy."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{cpu}])\nwhile True: pass"])
        for cpu in cpus
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def run(one: Circumstance, output: Path, folder: Path) -> tuple[str, str]:
    """Run `make test` in a fresh clone below an empty folder; return the Python, and the runner's own summary."""
    if (one.nobody or one.small_shm) and os.geteuid() != 0:
        raise ImpossibleError("it needs root to begin with")
    python = interpreter(one)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "topicstore")], check=True)
    for name in ("home", "tmp", "cache"):
        (folder / name).mkdir()
    if one.nobody:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(folder)], check=True)
    cpus = CPUS[-1:] if one.one_core else CPUS
    with output.open("wb") as file, kept_busy(cpus if one.busy else []):
        process = subprocess.Popen(
            command(one),
            cwd=folder / "topicstore",
            env=environment(one, folder, python),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = re.findall(
        r"^=+ (.*(?:passed|failed|error).*) in [\d.]+s.*=+$", output.read_text(errors="replace"), re.MULTILINE
    )
    summary = found[-1] if found else f"no summary; make ended with {code}"
    return version_of(python), summary if code == 0 else f"FAILED: {summary}"


def environment(one: Circumstance, folder: Path, python: str) -> dict[str, str]:
    """Return a newcomer's environment: an empty home, no caches, nothing that steers the tools."""
    steering = ("PYTEST_", "LC_", "XDG_", "MAKE", "MFLAGS", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(steering)}
    places = {"HOME": "home", "TMPDIR": "tmp", "PIP_CACHE_DIR": "cache"}
    own = {name: str(folder / place) for name, place in places.items()}
    locale = {"LANG": one.locale, "LC_ALL": one.locale} if one.locale else {}
    return {**kept, **own, **locale, "TOPICSTORE_DATA": str(DATA), "PYTHON": python}


def command(one: Circumstance) -> list[str]:
    """Return the README's test command, below what makes this circumstance."""
    words = ["make", "test"]
    if one.random:
        words.append(f"ARGS=--random-order-bucket=global --random-order-seed={secrets.randbelow(10**6)}")
    if one.nobody:
        words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", *words]
    if one.small_shm:
        mounted = f'mount -t tmpfs -o size={SMALL},mode=1777 tmpfs /dev/shm && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", mounted, "sh", *words]
    return words


def main() -> int:
    """Run what was asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CIRCUMSTANCES))
    parser.add_argument("--output", type=Path, default=ROOT / "test-hard", help="where each run's output is kept")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(CIRCUMSTANCES)
    if unknown:
        parser.error(f"no circumstance is called {', '.join(sorted(unknown))}; there are: {', '.join(CIRCUMSTANCES)}")
    chosen.output.mkdir(exist_ok=True)
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    print(f"commit {commit.stdout.strip()}, {len(CPUS)} CPUs, {platform.platform()}\n", flush=True)
    print("| run | circumstance | Python | result | minutes |\n| --- | --- | --- | --- | ---: |", flush=True)
    failed = False
    for number, name in enumerate(chosen.names or list(CIRCUMSTANCES), start=1):
        one = CIRCUMSTANCES[name]
        folder = Path(tempfile.mkdtemp(prefix=f"topicstore-{name}-"))
        began = time.monotonic()
        try:
            python, result = run(one, chosen.output / f"{number:02}-{name}.log", folder)
            failed = failed or result.startswith("FAILED")
            minutes = (time.monotonic() - began) / 60
            print(f"| {number} | {one.what} | {python} | {result} | {minutes:.1f} |", flush=True)
        except ImpossibleError as reason:
            print(f"| {number} | {one.what} |  | left out: {reason} |  |", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
