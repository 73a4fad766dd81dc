"""Work beside requests: it has no part in their deadlines, and is never silent when it fails."""

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Watch(Protocol):
    """Told how work went that nobody waits for, by its name; it must be quick and must not raise."""

    def failed(self, task: str, error: Exception) -> None:
        """It raised."""

    def succeeded(self, task: str) -> None:
        """It was done."""


class Logged(Watch):
    """Writes failures to the log, and remembers none."""

    def failed(self, task: str, error: Exception) -> None:
        """It raised."""
        _log.warning("%s failed in the background: %r", task, error)


class Tasks:
    """Keeps tasks alive until they end.

    Args:
        watch: told of each piece of work that nobody waits for.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run what nobody waits for. It knows nothing of the request in which it was begun."""
        task = asyncio.create_task(work, name=name, context=Context())
        self._running.add(task)
        task.add_done_callback(self._unawaited)
        return task

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run what somebody waits for, who is told of its error. It goes on if they go away."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._awaited)
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
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._watch.succeeded(task.get_name())
        elif isinstance(error, Exception):
            self._watch.failed(task.get_name(), error)
