"""The program ``topicstore``. `main` runs it; `cli` is its click group.

Other packages add commands through the entry-point group ``topicstore.commands``: each entry is
a `click.Command`, and the entry's name is the command's.
"""

from __future__ import annotations

from .app import cli, main

__all__ = ["cli", "main"]
