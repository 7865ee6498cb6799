"""The program ``topicstore``. `main` runs it; `cli` is the click group behind it.

Other packages add commands through the entry-point group ``topicstore.commands``: each entry is
a `click.Command` under the name it is to have.
"""

from __future__ import annotations

from .app import cli, main

__all__ = ["cli", "main"]
