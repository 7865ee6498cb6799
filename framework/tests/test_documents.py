"""What the documents show can be run, and what they name is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from topicstore.cli.demo.fleet import fleet
from topicstore.files.formats import encode_lines

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "framework" / "guides").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "conformance" / "README.md", *GUIDES]
ALL = ["ARCHITECTURE.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in DOCUMENTS)]


def blocks(language: str) -> list[object]:
    """Return the documents' blocks in a language, each with the name of its document and its number there.

    Those that start Spark or run whole suites are slow.
    """
    return [
        pytest.param(
            block,
            id=f"{path.relative_to(ROOT)}-{number}",
            marks=[pytest.mark.slow] if "spark" in block or "topicstore conformance" in block else [],
        )
        for path in DOCUMENTS
        for number, block in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        )
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as ``make demo`` leaves it, in which a reader tries one block and no other."""
    (tmp_path / "demo-data").mkdir()
    with (tmp_path / "demo-data" / "fleet.jsonl").open("wb") as sample:
        sample.writelines(map(encode_lines, fleet(3_000)))
    return tmp_path


def run_shell(script: str, folder: Path) -> str:
    """Run commands as somebody pastes them; fail with what they say if one of them does."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert 0 == done.returncode, done.stdout
    return done.stdout


@pytest.mark.parametrize("block", blocks("python"))
def test_programs_in_documents_run(block: str, folder: Path) -> None:
    """Each by itself, in an empty folder, without a warning."""
    if "spark" in block:
        pytest.importorskip("pyspark", reason='needs Spark: pip install "topicstore[spark]"')
    done = subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=folder, capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr
    assert "spark" in block or "" == done.stderr


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_in_documents_run(block: str, folder: Path) -> None:
    """Each block by itself, after the demo."""
    run_shell(block, folder)


@pytest.mark.parametrize("block", blocks("console"))
def test_dialogues_in_documents_are_true(block: str, folder: Path) -> None:
    """What the commands are shown to print is what they print, but for numbers, which depend on the machine."""
    commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    printed = run_shell("\n".join(commands), folder)
    shown = re.sub(r"^\$ .*\n", "", block, flags=re.MULTILINE)
    assert wording(shown) == wording(printed)


def wording(text: str) -> list[str]:
    """Return the words of a text: neither numbers nor units, which go with them, nor what a message holds."""
    text = re.sub(r"^\{.*\}$|, [\d,]+ a second", "", text, flags=re.MULTILINE)
    return re.findall(r"(?<![\w.])[a-zA-Z]{3,}(?![\w.])", text)


def test_the_readme_is_short() -> None:
    """What else there is to say stands in the guides, all of which it names."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert [] == [guide.name for guide in GUIDES if f"framework/guides/{guide.name}" not in text]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """To a file or folder, and where they name a heading, to one that is there."""
    for target, _, heading in re.findall(r"\]\(([^)#:]*)(#([^)]*))?\)", path.read_text()):
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings]


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"])
def test_files_that_are_named_are_there(name: str) -> None:
    """Paths are from the root, or from the package that the document is about."""
    named = set(re.findall(r"(?<![\w./-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))\b", (ROOT / name).read_text()))
    assert named
    places = (ROOT, ROOT / "framework" / "topicstore", ROOT / "framework")
    assert [] == [path for path in sorted(named) if not any((place / path).exists() for place in places)]


@pytest.mark.parametrize("name", ALL)
def test_modules_that_are_named_are_there(name: str) -> None:
    """Whatever is written as a dotted name of ours leads to a module, or to a name in one."""
    named = set(re.findall(r"`(topicstore(?:_\w+)?(?:\.[a-z_]\w*)+)", (ROOT / name).read_text()))
    folders = {path.parent.name: path.parent for path in ROOT.glob("*/topicstore*/__init__.py")}
    missing = []
    for dotted in sorted(named):
        package, *rest = dotted.split(".")
        if package not in folders or rest[0] in ("commands", "json", "toml"):
            continue  # an entry-point group, or a file
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
