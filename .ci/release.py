"""Build the wheel and the source distribution, and try each as a user would: `make release-check`.

``python release.py VENV DIST`` builds both into the folder DIST. It checks their metadata, that the wheel has exactly
the packages' files that git knows, without those that `pyproject.toml` leaves out, and that CHANGELOG.md has the
version with a date. It then installs each into a new virtual environment VENV, in a folder without the sources, and
runs the smoke test of `lowest.py` there. The exit status is that of the first step that fails.
"""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from lowest import run, smoke

ROOT = Path(__file__).parents[1]
PINNED = ROOT / ".ci" / "constraints.txt"
EXTRAS = "rocksdb,leveldb,duckdb,server"
"""The extras of the engines, and of the server's commands."""


def main(venv: Path, dist: Path) -> None:
    """Build, check and install."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version = settings["project"]["version"]
    sdist, wheel = build(dist, version)
    contents = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    check_contents(sdist, wheel, contents["packages"], tuple(contents["exclude"]))
    run(sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel))
    print("metadata: valid, and the README can be shown")
    check_changelog(version)
    for distribution in (wheel, sdist):
        try_installed(distribution, version, venv)
    print(f"topicstore {version} can be released")


def build(dist: Path, version: str) -> tuple[Path, Path]:
    """Return the source distribution, and the wheel that is built of it."""
    shutil.rmtree(dist, ignore_errors=True)
    hatch = (sys.executable, "-m", "hatchling", "build", "--directory", str(dist.resolve()))
    run(*hatch, "--target", "sdist", cwd=ROOT)
    sdist = dist / f"topicstore-{version}.tar.gz"
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(sdist) as archive:
            archive.extractall(directory, filter="data")
        run(*hatch, "--target", "wheel", cwd=Path(directory, f"topicstore-{version}"))
    return sdist, dist / f"topicstore-{version}-py3-none-any.whl"


def check_contents(sdist: Path, wheel: Path, packages: list[str], left_out: tuple[str, ...]) -> None:
    """Check that the wheel has all files of the packages but those left out, and that the sdist has all tracked files.

    Neither has any other file.
    """
    tracked = set(run("git", "-C", str(ROOT), "ls-files", "-z").rstrip("\0").split("\0"))
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if ".dist-info/" not in name}
    parents = {package: str(Path(package).parent) + "/" for package in packages}
    wanted = {
        name.removeprefix(parent)
        for package, parent in parents.items()
        for name in tracked
        if name.startswith(f"{package}/") and not name.startswith(left_out)
    }
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    for what, missing in (("the wheel", wanted - found), ("the source distribution", tracked - packed)):
        if missing:
            sys.exit(f"{what} lacks {', '.join(sorted(missing))}")
    for what, more in (("the wheel", found - wanted), ("the source distribution", packed - tracked)):
        if more:
            sys.exit(f"{what} has files that git doesn't know: {', '.join(sorted(more))}")
    print(f"contents: {len(found)} files in the wheel, {len(packed)} in the source distribution, as git has them")


def check_changelog(version: str) -> None:
    """Check that the newest section is the version's; say what else is to be done to it before a release."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)(?: \((.+)\))?$", text, re.MULTILINE)
    if newest is None or newest[1] != version:
        sys.exit(f"CHANGELOG.md begins with {newest and newest[1]}, and not with {version}")
    fragments = sorted(path.name for path in (ROOT / "changelog.d").glob("*.*.md"))
    if fragments:
        print(f"changes: {len(fragments)} fragments wait for `towncrier build` ({', '.join(fragments)})")
    if not newest[2] or not re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2]):
        print(f"changes: the section {version} has no date yet")


def try_installed(distribution: Path, version: str, venv: Path) -> None:
    """Install a distribution into an empty environment, and run its program."""
    shutil.rmtree(venv, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(venv))
    python, program = (str(venv / "bin" / name) for name in ("python", "topicstore"))
    wanted = f"{distribution.resolve()}[{EXTRAS}]"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", str(PINNED), wanted)
    with tempfile.TemporaryDirectory() as directory:
        printed = run(program, "--version", cwd=Path(directory))
        if version not in printed:
            sys.exit(f"{distribution.name} calls itself {printed}")
        smoke([program], Path(directory))
    print(f"{distribution.name}: installed and tried")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
