"""Provides a token sink for tests: records the outputs, and can wait for the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.testing.output_checker import OutputChecker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.port import Engine, Handle
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.request import GenerateRequest, TokenDelta

__all__ = ["CheckingSink", "until"]

PATIENCE: Seconds = 20.0
"""Seconds that any wait in a test may take; far above what it should."""


class CheckingSink:
    """A `TokenSink` that checks what it gets. `wait` raises violations, since an engine must
    survive a sink that raises."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        """Submit at once. Errors: those of `submit`."""
        self.ledger = OutputChecker(request)
        self.violation: AssertionError | None = None
        self._engine = engine
        self._done = asyncio.Event()
        self._some = asyncio.Event()
        self.handle: Handle = engine.submit(request, self)

    def on_delta(self, delta: TokenDelta) -> None:
        self._book(lambda: self.ledger.take(delta))
        self._some.set()

    def on_error(self, error: PdserveError) -> None:
        self._book(lambda: self.ledger.fail(error))
        self._some.set()

    def _book(self, entry: Callable[[], None]) -> None:
        try:
            entry()
        except AssertionError as violation:
            self.violation = self.violation or violation
        if self.ledger.done or self.violation:
            self._done.set()

    def abort(self) -> None:
        """Abort the submission; any later call is a violation."""
        self.ledger.aborted = True
        self._engine.abort(self.handle)
        self._done.set()

    async def some(self) -> OutputChecker:
        """Wait for the first call."""
        async with asyncio.timeout(PATIENCE):
            await self._some.wait()
        return self.checked()

    async def wait(self) -> OutputChecker:
        """Wait for the end. Errors: AssertionError for a violation."""
        async with asyncio.timeout(PATIENCE):
            await self._done.wait()
        return self.checked()

    def checked(self) -> OutputChecker:
        """The checker. Errors: AssertionError for a violation."""
        if self.violation is not None:
            raise self.violation
        return self.ledger


async def until(condition: Callable[[], bool], patience: Seconds = PATIENCE) -> None:
    """Poll until a condition holds. Errors: TimeoutError."""
    async with asyncio.timeout(patience):
        while not condition():  # noqa: ASYNC110  no event
            await asyncio.sleep(0.005)
