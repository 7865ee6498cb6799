"""Makes docstrings Markdown: the double colon before a literal block of reStructuredText becomes a single one."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOUBLE_COLON = re.compile(r"(?<=\w)::$", re.MULTILINE)
ALONE = re.compile(r"^::\n", re.MULTILINE)


class LiteralBlocks(griffe.Extension):
    """Rewrites the docstrings of all objects."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring as soon as its object was read."""
        if obj.docstring is not None:
            obj.docstring.value = ALONE.sub("", DOUBLE_COLON.sub(":", obj.docstring.value))
