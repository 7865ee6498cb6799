"""The documentation site and a release: complete, and of one version in all files."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import topicstore as ts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "framework" / "docs"
PAGES = DOCS / "pages"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [ROOT / place for place in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


def documented(pages: list[Path]) -> set[str]:
    """Return the dotted names whose docstrings are shown on the given pages."""
    return {name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}


def test_every_public_name_is_in_the_reference() -> None:
    """The API reference has each public name of `topicstore`, and the module of errors as a whole."""
    shown = documented(list((PAGES / "reference").glob("*.md")))
    assert "topicstore.contract.errors" in shown
    errors = {
        name for name in ts.__all__ if isinstance(found := getattr(ts, name), type) and issubclass(found, Exception)
    }
    assert set() == {f"topicstore.{name}" for name in set(ts.__all__) - errors} - shown


def test_every_stored_form_is_on_its_page() -> None:
    """The page of stored formats names each module whose docstring has a stored form; every name on it exists."""
    grammars = {
        ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for package in PACKAGES
        for file in package.rglob("*.py")
        if re.search("^Stored form", ast.get_docstring(ast.parse(file.read_text())) or "", re.MULTILINE)
    }
    shown = documented([PAGES / "formats.md"])
    assert len(grammars) > 20
    assert set() == grammars - shown
    assert [] == [name for name in shown if importlib.util.find_spec(name) is None]


@pytest.mark.slow
def test_the_site_has_no_broken_link(tmp_path: Path) -> None:
    """The site is built strictly: a link, a heading or a docstring that isn't there fails the build."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip("needs mkdocs: pip install mkdocs mkdocs-material mkdocstrings[python]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", DOCS / "mkdocs.yml"]
    done = subprocess.run([*command, "--site-dir", tmp_path / "site"], capture_output=True, text=True)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "store" in (tmp_path / "site" / "reference" / "database" / "index.html").read_text()


def test_the_changelog_begins_with_the_version() -> None:
    """The newest section of the changelog is the version's, below the marker comment that `towncrier` looks for."""
    text = (ROOT / "CHANGELOG.md").read_text()
    mark = PROJECT["tool"]["towncrier"]["start_string"]
    assert text.partition(mark)[2].lstrip().startswith(f"## {PROJECT['project']['version']} (")


def test_fragments_are_of_known_kinds() -> None:
    """Each file of `changelog.d` has one line, and the name of a kind that the changelog has."""
    kinds = {kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"]}
    for path in set((ROOT / "changelog.d").iterdir()) - {ROOT / "changelog.d" / "README.md"}:
        _, kind, suffix = path.name.rsplit(".", 2)
        assert kind in kinds
        assert "md" == suffix
        assert 1 == len(path.read_text().splitlines()), path.name


def test_all_files_name_the_same_versions() -> None:
    """The workflow runs `.ci/run` on each version of Python that the project names, and pre-commit the pinned ruff."""
    named = [text.rpartition(" :: ")[2] for text in PROJECT["project"]["classifiers"] if "Python :: 3." in text]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert named == re.findall(r'"([\d.]+)"', re.search(r"python: \[(.*)\]", workflow)[1])
    assert "run: bash .ci/run" in workflow
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    pinned = re.search(r"^ruff==(.*)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"rev: v{pinned[1]}" in (ROOT / ".pre-commit-config.yaml").read_text()
