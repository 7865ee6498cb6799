"""Adds the repository's documents to the site, and whatever they link: each link leads to a page.

Documents keep their places in the repository, so that their links work there too. The guides alone move up, to
``guides/``. A linked folder stands for its README, and any other linked file becomes a page that shows it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "*.md",
    "framework/guides/*.md",
    "framework/topicstore/server/README.md",
    "benchmarks/README.md",
    "conformance/README.md",
    "examples/README.md",
    "examples/*/README.md",
)
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
"""The path of a link to another file of the repository."""
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml"}

documents: dict[str, Path] = {}
"""The documents of the repository by the URI of their source in the site."""


def uri_of(path: Path) -> str:
    """Return the URI of a file's page."""
    place = path.relative_to(ROOT).as_posix()
    place = place.replace("framework/guides/", "guides/")
    return place if path.suffix == ".md" else f"{place}.md"


def linked(document: Path, target: str) -> Path:
    """Return the file that a document links. Raises `PluginError` if there is none."""
    found = (document.parent / target).resolve()
    found = found / "README.md" if found.is_dir() else found
    if not found.is_file():
        raise PluginError(f"{document.relative_to(ROOT)} links {target}, which is not there")
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents, then the files that they link."""
    documents.clear()
    waiting = sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern))
    while waiting:
        path = waiting.pop()
        uri = uri_of(path)
        if uri in documents:
            continue
        documents[uri] = path
        if path.suffix == ".md":
            files.append(File.generated(config, uri, abs_src_path=str(path)))
            waiting += [linked(path, target) for target in LINK.findall(path.read_text(encoding="utf-8"))]
        else:
            files.append(File.generated(config, uri, content=shown(path)))
    return files


def shown(path: Path) -> str:
    """Return a page that shows a file which is no document."""
    text, language = path.read_text(encoding="utf-8"), LANGUAGES.get(path.suffix, "text")
    return f"# {path.name}\n\n````{language}\n{text}````\n"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Make the links of a repository's document lead to pages of the site."""
    document = documents.get(page.file.src_uri)
    if document is None or document.suffix != ".md":
        return markdown
    here = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda link: posixpath.relpath(uri_of(linked(document, link[1])), here), markdown)
