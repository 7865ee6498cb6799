"""Warnings that name the line of the program that called the package, however deep within it they are given.

`warnings.warn` does so by itself from Python 3.12 on (``skip_file_prefixes``).
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from pathlib import Path

import pluggy

__all__ = ["warn_caller"]

_OURS = f"{Path(__file__).parents[1]}/", f"{Path(pluggy.__file__).parent}/", contextlib.__file__
"""Beginnings of the names of files to skip between the program's line and the place that warns."""


def warn_caller(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Give a warning at the line from which the package was called."""
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
