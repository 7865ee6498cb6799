"""Skeletons of plugins: `topicstore plugins new` writes one.

Each folder has the files of a distribution, with ``.txt`` at the end of their names, as templates
(`string.Template`) of ``name``, ``Name`` and ``distribution``. ``package`` and ``plugin`` in the paths of the package
and the test stand for the plugin's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

__all__ = ["KINDS", "write_skeleton"]

KINDS = ("backend", "layout")
_ENDING = ".txt"


def write_skeleton(kind: str, name: str, directory: Path) -> list[Path]:
    """Write the skeleton of a backend or a layout into a new directory; return the paths of its files.

    ``name`` is a lower-case identifier. Raises FileExistsError if the directory exists.
    """
    directory.mkdir(parents=True)
    words = name.split("_")
    values = {"name": name, "Name": "".join(map(str.capitalize, words)), "distribution": "-".join(words)}
    written = []
    for place, template in sorted(_templates(files(__name__) / kind)):
        target = directory / _named(place, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(template.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
        written.append(target)
    return written


def _templates(folder: Traversable, place: str = "") -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _templates(each, f"{place}{each.name}/")
        elif each.name.endswith(_ENDING):
            yield f"{place}{each.name.removesuffix(_ENDING)}", each


def _named(place: str, name: str) -> str:
    return place.replace("src/package/", f"src/topicstore_{name}/").replace("test_plugin.py", f"test_{name}.py")
