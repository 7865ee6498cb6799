"""The console on standard output, and progress bars. Importing this module imports rich."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["TrimmedConsole", "messages_bar"]


class TrimmedConsole(Console):
    """A console that strips trailing spaces from lines unless it writes to a terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, but without trailing spaces unless the output is a terminal."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, so that the program ends as for other output to a closed pipe."""
        raise BrokenPipeError


@contextlib.contextmanager
def messages_bar(what: str) -> Iterator[Callable[[float, float | None, int], None]]:
    """Show a progress bar with messages per second on standard error; yield the function that updates it."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}", style="cyan"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None, rate="")

        def update(done: float, total: float | None, messages: int) -> None:
            elapsed = progress.tasks[0].elapsed or 0.0
            rate = f"{messages / elapsed:,.0f}/s" if elapsed > 0.2 else ""
            progress.update(task, completed=done, total=total, rate=rate)

        yield update
