"""A client of a running server's HTTP interface, for the program's commands.

`RemoteDatabase` answers the calls of `topicstore.Database` that the commands make, with the same objects and errors.
Importing this package loads no HTTP library: `httpx` is loaded when a server is asked.
"""

from __future__ import annotations
