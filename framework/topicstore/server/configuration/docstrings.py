"""Descriptions of the settings' tables and keys, read from docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Mapping
from itertools import pairwise

__all__ = ["about_settings", "about_table"]


def about_table(cls: type) -> str:
    """Return a class's docstring without the leading name of the table."""
    text = re.sub(r"^(Section|Table|One of) ``[^`]+``[^:;.]*[:;.] *", "", inspect.getdoc(cls) or "")
    return text[:1].upper() + text[1:]


@functools.cache
def about_settings(cls: type) -> Mapping[str, str]:
    """Return the docstrings of a class's fields, by field name."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for one, after in pairwise(statements):
        match one, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = re.sub(r"\s+", " ", text).strip()
            case _:
                pass
    return found
