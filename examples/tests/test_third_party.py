"""Installs the third-party distributions from their folders, outside this environment, and runs their tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "distribution", "needs"),
    [
        ("third_party_backend", "topicstore-lmdb", "lmdb"),
        ("third_party_layout", "topicstore-per-topic", "rocksdict"),
        ("third_party_encryption", "topicstore-encrypting", "cryptography"),
    ],
)
def test_installed_from_its_folder(name: str, distribution: str, needs: str, tmp_path: Path) -> None:
    """A distribution's wheel can be built and installed, topicstore lists its plugin, and its own tests pass."""
    for module in (needs, "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install {module}")
    target = tmp_path / "installed"
    # pip uses the installed build backend, and no network.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    _run(*pip, "--target", target, EXAMPLES / name)
    environment = {**os.environ, "PYTHONPATH": str(target), "TOPICSTORE_CONFORMANCE": "quick"}
    assert distribution in _run(sys.executable, "-m", "topicstore.cli", "plugins", environment=environment)
    _run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", EXAMPLES / name / "pyproject.toml"),
        EXAMPLES / name / "tests",
        environment=environment,
    )


def _run(*command: object, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:]
    return done.stdout
