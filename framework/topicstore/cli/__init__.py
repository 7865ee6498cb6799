"""The program ``topicstore``. `main` runs it; `cli` is its click group.

Other packages add commands through the entry-point group ``topicstore.commands``: each entry is
a `click.Command`, and the entry's name is the command's.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import cli

__all__ = ["cli", "main"]


def main() -> None:
    """Run the program with the process's arguments and exit.

    Signal handlers are installed before anything else is imported, because imports may take seconds.
    """
    # NumPy's OpenBLAS starts a thread for each core, which spins 30 ms. Nothing here multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.argv[1:2] == ["serve"]:
        from topicstore.server.signals import hold_signals

        hold_signals()
    else:
        from .terminal.interrupts import interrupt_on_sigterm

        interrupt_on_sigterm()
    from .app import main as run

    run()


if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts any name

    def __getattr__(name: str) -> Any:
        """Import the click group when it is first used."""
        if name != "cli":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .app import cli

        globals()["cli"] = cli
        return cli
