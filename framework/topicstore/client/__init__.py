"""A client of a running server's HTTP interface, for the program's commands.

`RemoteDatabase` has the methods of `topicstore.Database` that the commands call; they return the same objects and raise
the same errors. Importing this package loads no HTTP library: `httpx` is loaded when a `Connection` is made.
"""

from __future__ import annotations
