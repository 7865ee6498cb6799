"""An import that kills itself with SIGKILL: ``python -m topicstore.cli.demo.doomed_import DATABASE FILE ROWS BATCH``.

After each batch the import prints the number of rows stored so far; once it reaches ROWS, the process kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import topicstore
from topicstore.cli.files.importing import Importer
from topicstore.cli.files.source_detection import open_source
from topicstore.cli.terminal.exits import failure

__all__: list[str] = []


def _run(path: str, file: str, fatal: int, batch_size: int) -> None:
    def report(_source: object, rows: int) -> None:
        print(rows, flush=True)
        if rows >= fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        topicstore.open(path, mode="x", timestamps="message", late="lift") as db,
        open_source(Path(file)) as source,
    ):
        Importer(db=db, batch_size=batch_size, observe=report).run(source)


if __name__ == "__main__":
    try:
        path, file, rows, batch = sys.argv[1:]
        _run(path, file, int(rows), int(batch))
    except Exception as error:
        end = failure(error)
        if end is None:
            raise
        end.show()
        sys.exit(end.exit_code)
