"""The console on standard output, and progress bars. This module loads rich."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["TrimmedConsole", "messages_bar"]


class TrimmedConsole(Console):
    """A console that ends lines where their text ends, unless it is a terminal that shows them."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))

    def on_broken_pipe(self) -> None:
        """End the program as any other that writes to a reader that has gone."""
        raise BrokenPipeError


@contextlib.contextmanager
def messages_bar(what: str) -> Iterator[Callable[[float, float | None, int], None]]:
    """Show a bar on standard error, with the messages per second; yield what updates it."""
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
