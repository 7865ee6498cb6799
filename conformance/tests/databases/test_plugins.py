"""The suite of transforms on correct ones: one that shifts bytes, in memory and on disk, and one that compresses."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable

import pytest
from topicstore.plugins import registry
from topicstore_conformance import Pair, PluginSuite, pair_of
from topicstore_conformance.conditions.capabilities import declaring
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.subjects.pairs import known
from topicstore_conformance.subjects.transforms import SHIFTING, Shifting

CAPABILITIES = {str(pair): pair.capabilities for pair in known()}


@pytest.fixture(autouse=True)
def shifting(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the plugin ``shifting`` for this process and its children; return its name."""
    folder = tmp_path_factory.mktemp("installed")
    information = folder / "shifting-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: shifting\nVersion: 1\n")
    target = "topicstore_conformance.subjects.transforms:SHIFTING"
    (information / "entry_points.txt").write_text(f"[topicstore]\nshifting = {target}\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setitem(registry().plugins, "shifting", SHIFTING)
    return "shifting"


class Compressing(Shifting):
    """A transform that adds a salt and compresses, so that equal payloads have different stored forms."""

    def encode(self, payloads: Iterable[bytes]) -> list[bytes]:
        return [os.urandom(4) + zlib.compress(bytes(payload)) for payload in payloads]

    def decode(self, payloads: Iterable[bytes]) -> list[bytes]:
        return [zlib.decompress(bytes(payload)[4:]) for payload in payloads]


@declaring(CAPABILITIES["memory-block"])
class TestCompressing(PluginSuite):
    @pytest.fixture
    def pair(self, monkeypatch: pytest.MonkeyPatch) -> Pair:
        monkeypatch.setitem(registry().plugins, "compressing", Compressing(0))
        return pair_of("memory", "block", plugins=["compressing"])


@declaring(CAPABILITIES["memory-block"])
class TestInMemory(PluginSuite):
    @pytest.fixture
    def pair(self, shifting: str) -> Pair:
        return pair_of("memory", "block", plugins=[shifting])


@declaring(CAPABILITIES["rocksdb-block"])
class TestOnDisk(PluginSuite):
    @pytest.fixture
    def pair(self, shifting: str) -> Pair:
        need("rocksdb")
        return pair_of("rocksdb", "block", plugins=[shifting])


def test_transforms_are_installed_for_children(shifting: str) -> None:
    """The entry point, which child processes use, names the same transform as this process uses."""
    assert sys.modules[type(SHIFTING).__module__].SHIFTING is registry().wrapper(shifting)
