"""What the documents show can be run, and what they name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_readmes_programs_run(tmp_path: Path) -> None:
    """One after the other, as somebody tries them; those for Spark are left to the examples."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    programs = [block for block in blocks if "spark" not in block]
    assert len(programs) >= 3
    done = subprocess.run([sys.executable, "-c", "\n".join(programs)], cwd=tmp_path, capture_output=True, text=True)
    assert "" == done.stderr
    assert "fleet/eu/bus-7/speed b'41.5'" in done.stdout
    assert "b'43.0'" in done.stdout


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"])
def test_files_that_are_named_are_there(name: str) -> None:
    """Paths are from the root, or from the package that the document is about."""
    named = set(re.findall(r"(?<![\w./-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))\b", (ROOT / name).read_text()))
    assert named
    places = (ROOT, ROOT / "framework" / "topicstore", ROOT / "framework")
    assert [] == [path for path in sorted(named) if not any((place / path).exists() for place in places)]


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "framework/PLUGINS.md", "README.md"])
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
