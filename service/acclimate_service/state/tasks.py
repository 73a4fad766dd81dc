"""Work that nobody waits for."""

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

from acclimate_service.state.errors import StateError

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Tasks:
    """Keeps background tasks alive until they end, and logs the errors of those that nobody waits for."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], *, awaited: bool = False) -> asyncio.Task[T]:
        """Run it in the background.

        Args:
            work: what to run.
            awaited: whether somebody waits for it, who is told of its error. Other work knows nothing of the request
                in which it was begun, whose deadline is not its own.
        """
        task = asyncio.create_task(work, context=None if awaited else Context())
        self._running.add(task)
        task.add_done_callback(self._awaited if awaited else self._unawaited)
        return task

    async def aclose(self) -> None:
        """Cancel what still runs, and wait until it has ended."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _awaited(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: who waits for it may have gone away

    def _unawaited(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            work = getattr(task.get_coro(), "__qualname__", "work")
            expected = isinstance(error, StateError)  # its words say all there is to know
            _log.warning("%s failed in the background: %r", work, error, exc_info=None if expected else error)
