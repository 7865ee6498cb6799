"""Warnings attributed to the line of the application that called the package, from any depth of the call stack.

From Python 3.12 on, `warnings.warn` has the argument ``skip_file_prefixes`` for this.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from pathlib import Path

import pluggy

__all__ = ["warn_caller"]

_OURS = f"{Path(__file__).parents[1]}/", f"{Path(pluggy.__file__).parent}/", contextlib.__file__
"""Path prefixes of the files to skip in the call stack."""


def warn_caller(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Emit a warning attributed to the line from which the package was called."""
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
