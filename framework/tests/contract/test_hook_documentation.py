"""The guide to plugins documents every hook with its arguments, and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from topicstore.contract import hookspecs
from topicstore.contract.requests import ReadRequest, ReplayRequest, StoreRequest

DOCUMENT = (Path(__file__).parents[2] / "guides" / "plugins.md").read_text()
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("topicstore_")}
REQUESTS = {
    "topicstore_store": StoreRequest,
    "topicstore_read": ReadRequest,
    "topicstore_replay": ReplayRequest,
}


def section(hook: str) -> str:
    """Return the text below a hook's heading."""
    return re.split(r"^#+ ", DOCUMENT.split(f"### {hook}(", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_hook_has_a_heading_with_its_arguments() -> None:
    """The guide's headings are exactly the hooks with their arguments."""
    headings = re.findall(r"^### (topicstore_\w+\(.*\))$", DOCUMENT, flags=re.MULTILINE)
    expected = [f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in HOOKS.items()]
    assert expected == headings


def test_every_argument_and_field_of_a_request_is_explained() -> None:
    """A hook's section names all its arguments, and the fields of its request."""
    missing = []
    for name, hook in HOOKS.items():
        text = section(name)
        request = REQUESTS.get(name)
        fields = [] if request is None else [f"request.{field}" for field in request.__annotations__ if field != "db"]
        parameters = [p for p in inspect.signature(hook).parameters if p not in ("db", "request")]
        missing += [f"{name}: {word}" for word in fields + parameters if f"`{word}`" not in text]
    assert [] == missing


def test_every_hook_has_a_docstring() -> None:
    """Every hook has a docstring."""
    assert [] == [name for name, hook in HOOKS.items() if not inspect.getdoc(hook)]
