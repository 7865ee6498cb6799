"""Runs each coroutine test in a new event loop, and opens the databases that fixtures return."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.aio.opening import Opening
from topicstore_conformance.faults.threads import PATIENCE


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        async with AsyncExitStack() as stack:
            given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
            for name, value in given.items():
                given[name] = await stack.enter_async_context(value) if isinstance(value, Opening) else value
            await asyncio.wait_for(pyfuncitem.obj(**given), PATIENCE)

    asyncio.run(run())
    return True


@pytest.fixture
def db(tmp_path: Path) -> Opening:
    return ts.aopen(tmp_path / "db", backend="memory")
