"""Run the whole test suite in circumstances that are harder than a developer's, each time in a fresh clone.

`make test-hard` runs all of them, ``make test-hard RUNS="busy one-core"`` those that are named; one that is named
twice runs twice. A row of a table is printed for each run as it ends, followed by what failed in it, and all that a
run printed is kept. A run has failed if a test failed, if pytest printed no summary, or if a process is left over.

A circumstance that can't be made here (another user, a small /dev/shm or another Python) is left out with the reason.
The exit status is 1 if a run failed, or if a circumstance that was named was left out.
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
KEPT = re.compile(
    r"PATH|LANG|TZ|JAVA_HOME|PYENV_ROOT|PIP_(?!CACHE).*|OPENBLAS_.*|SSL_CERT_.*|(?i:(http|https|no)_proxy)"
)
"""Variables that runs inherit: those for finding and installing packages, and none that affects the tests."""
NOBODY = 65534
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
SMALL = "64m"
"""The size of a small /dev/shm, as containers have it by default."""
GRACE = 120
"""Seconds after the end of a run in which the processes that it began may end, too."""
LINES = 150
"""The most lines of a failed run's output that are printed."""


class Circumstance(NamedTuple):
    """The conditions under which a run tests."""

    what: str
    busy: bool = False
    one_core: bool = False
    random: bool = False
    python: str = ""
    """The beginning of a version of Python: the oldest or, with ``newest``, the newest installed one is used."""
    newest: bool = False
    nobody: bool = False
    small_shm: bool = False
    locale: str = ""
    mode: str = ""
    """The mode of the suites (`topicstore_conformance.conditions.tries`); empty for the default."""


CIRCUMSTANCES = {
    "busy": Circumstance("every core is kept busy by something else", busy=True),
    "busy-random": Circumstance("every core is kept busy, tests in random order", busy=True, random=True),
    "one-core": Circumstance("one core", one_core=True),
    "one-core-busy": Circumstance("one core, which is kept busy by something else", one_core=True, busy=True),
    "random": Circumstance("tests in random order", random=True),
    "python-3.11": Circumstance("the oldest Python 3.11", python="3.11."),
    "python-3.13": Circumstance("the newest Python 3.13", python="3.13.", newest=True),
    "nobody": Circumstance("a user that is not root", nobody=True),
    "small-shm": Circumstance(f"shared memory of {SMALL}", small_shm=True),
    "locale-c": Circumstance("LANG=C", locale="C"),
    "all-at-once": Circumstance(
        f"every core busy, random order, not root, shared memory of {SMALL}, LANG=C",
        busy=True,
        random=True,
        nobody=True,
        small_shm=True,
        locale="C",
    ),
    "full": Circumstance("every random test tries as often as in a release", mode="full"),
}


class ImpossibleError(Exception):
    """A circumstance that can't be made on this machine."""


# --- what a circumstance needs ----------------------------------------------------------


def version_of(python: str) -> str:
    """Return the version of an interpreter with which environments can be made, or nothing."""
    asked = [python, "-c", "import platform, venv, ensurepip; print(platform.python_version())"]
    said = subprocess.run(asked, capture_output=True, text=True)
    return said.stdout.strip() if said.returncode == 0 else ""


def interpreter(one: Circumstance) -> str:
    """Return the Python that a circumstance runs with: another user can't run one in a home directory."""
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


def check_possible(one: Circumstance) -> None:
    """Raise `ImpossibleError` if this process may not start processes of another user, or mount file systems."""
    for wanted, probe in ((one.nobody, [*AS_NOBODY, "true"]), (one.small_shm, ["unshare", "--mount", "true"])):
        if wanted and (shutil.which(probe[0]) is None or subprocess.run(probe, capture_output=True).returncode):
            raise ImpossibleError(f"{probe[0]} is not there, or not permitted")


def environment(one: Circumstance, folder: Path, python: str) -> dict[str, str]:
    """Return the environment of a new user: an empty home, no caches, and no settings of tools."""
    data = DATA
    if one.nobody and subprocess.run([*AS_NOBODY, "ls", str(DATA)], capture_output=True).returncode:
        data = folder / "no-data"  # the other user may not read `DATA`
    made = {
        "HOME": str(folder / "home"),
        "PIP_CACHE_DIR": str(folder / "cache"),
        "PYTHON": python,
        "TOPICSTORE_DATA": str(data),
    }
    if one.locale:
        made |= {"LANG": one.locale, "LC_ALL": one.locale}
    if one.mode:
        made["TOPICSTORE_CONFORMANCE"] = one.mode
    return {**{name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}, **made}


def command(one: Circumstance) -> list[str]:
    """Return the command that runs all tests in this circumstance."""
    words = ["make", "test-all"]
    if one.random:
        words.append(f"ARGS=--random-order-bucket=global --random-order-seed={secrets.randbelow(10**6)}")
    if one.nobody:
        words = [*AS_NOBODY, *words]
    if one.small_shm:
        mounted = f'mount -t tmpfs -o size={SMALL},mode=1777 tmpfs /dev/shm && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", mounted, "sh", *words]
    return words


@contextlib.contextmanager
def kept_busy(cpus: list[int]) -> Iterator[None]:
    """Keep each of these CPUs busy."""
    spin = "import os\nparent = os.getppid()\nos.sched_setaffinity(0, [{}])\nwhile os.getppid() == parent: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin.format(cpu)]) for cpu in cpus]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


# --- a run ------------------------------------------------------------------------------


def run(one: Circumstance, commit: str, output: Path, folder: Path) -> tuple[str, str, bool]:
    """Run `make test-all` in a fresh clone below an empty folder; return the Python, the result, and if it passed."""
    check_possible(one)
    python = interpreter(one)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "topicstore")], check=True)
    subprocess.run(["git", "-C", str(folder / "topicstore"), "checkout", "--quiet", "--detach", commit], check=True)
    for name in ("home", "cache"):
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
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        try:
            code = process.wait()
            left = left_over(folder)
        finally:
            end(folder)
    text = output.read_text(errors="replace")
    found = re.findall(r"^=+ (.*(?:passed|failed|error).*) in [\d.]+s.*=+$", text, re.MULTILINE)
    summary = "; ".join(found) if found else f"no summary; make ended with {code}"
    summary += "".join(f"; {flaky}" for flaky in re.findall("^FLAKY .*$", text, re.MULTILINE))
    if left:
        summary += f"; left running: {', '.join(left)}"
    return version_of(python), summary, code == 0 and bool(found) and not left


def processes(folder: Path) -> dict[int, str]:
    """Return the processes that have this run's home in their environment, each with its name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(f"HOME={folder}/home") in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found


def left_over(folder: Path) -> list[str]:
    """Return the names of the processes of a run that don't end after it."""
    deadline = time.monotonic() + GRACE
    while (found := processes(folder)) and time.monotonic() < deadline:
        time.sleep(1)
    return sorted(found.values())


def end(folder: Path) -> None:
    """Kill the processes that a run has left."""
    for pid in processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Run the requested circumstances, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CIRCUMSTANCES))
    parser.add_argument("--output", type=Path, default=ROOT / "test-hard", help="where each run's output is kept")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(CIRCUMSTANCES)
    if unknown:
        parser.error(f"no circumstance is called {', '.join(sorted(unknown))}; there are: {', '.join(CIRCUMSTANCES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes and folders are removed
    chosen.output.mkdir(parents=True, exist_ok=True)
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    print(f"commit {commit}, {len(CPUS)} CPUs, {platform.platform()}\n")
    print("| run | circumstance | Python | result | minutes |\n| --- | --- | --- | --- | ---: |", flush=True)
    good = True
    for number, name in enumerate(chosen.names or CIRCUMSTANCES, start=1):
        one, output = CIRCUMSTANCES[name], chosen.output / f"{number:02}-{name}.log"
        folder, began = Path(tempfile.mkdtemp(prefix=f"topicstore-{name}-")), time.monotonic()
        try:
            python, result, passed = run(one, commit, output, folder)
        except ImpossibleError as reason:
            python, result, passed = "", f"left out: {reason}", not chosen.names
        except subprocess.CalledProcessError as failed:
            python, result, passed = "", str(failed), False
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        minutes = (time.monotonic() - began) / 60
        print(
            f"| {number} | {one.what} | {python} | {'' if passed else 'FAILED: '}{result} | {minutes:.1f} |", flush=True
        )
        if not passed and output.exists():
            print("\n".join(output.read_text(errors="replace").splitlines()[-LINES:]), flush=True)
        good = good and passed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
