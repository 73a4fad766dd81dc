"""What replicas tell each other about clients, at once and without any promise.

A replica that keeps a state in memory is told when the client was deleted, and one that writes a client's journal is
asked for it when the client's next batch came to another replica. Redis forgets a message that nobody is there
to hear, so whoever was away for a while must ask whether anything was said.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

from redis import exceptions as failures
from redis.asyncio.connection import AbstractConnection

from acclimate_service.state.redis.link import Link

DROP: Final = "acc:drop"
"""Channel of clients whose state is to be forgotten."""
HAND_OVER: Final = "acc:hand-over"
"""Channel of clients whose journal another replica waits for."""


class Announcements:
    """A subscription that comes back by itself, on a connection of its own; it never stands in the way of requests.

    Args:
        link: where Redis is.
        dropped: told each client to be forgotten, as it was published.
        missed: told that messages may have been missed: at the start, and after each interruption.
        failed: told why there is no subscription, at each try.
        wanted: told each client whose journal another replica waits for, as it was published.
        pause: before another try to subscribe (s).
        quiet: silence after which Redis is asked whether it is still there (s).
    """

    def __init__(
        self,
        link: Link,
        dropped: Callable[[str], None],
        missed: Callable[[], None],
        failed: Callable[[Exception], None],
        wanted: Callable[[str], None] = lambda _: None,
        *,
        pause: float = 1.0,
        quiet: float = 10.0,
    ) -> None:
        self._link = link
        self._heard = {DROP.encode(): dropped, HAND_OVER.encode(): wanted}
        self._missed = missed
        self._failed = failed
        self._pause = pause
        self._quiet = quiet
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen from now on, until closed."""
        self._task = asyncio.create_task(self._listen())

    async def aclose(self) -> None:
        """Listen no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _listen(self) -> None:
        while True:
            try:
                await self._subscribed()
            except Exception as error:  # whatever was said or made of it: without a subscription nothing is heard
                self._failed(error)
            await asyncio.sleep(random.uniform(self._pause / 2, self._pause))

    async def _subscribed(self) -> None:
        connection = await self._link.subscription()
        try:
            await connection.send_command("SUBSCRIBE", *self._heard)
            for _ in self._heard:
                await connection.read_response()
            self._missed()  # only now: what is said from here on is heard
            while True:
                kind, *rest = await self._next(connection)
                if kind == b"message":
                    channel, message = rest
                    self._heard[channel](message.decode(errors="replace"))
        finally:
            await connection.disconnect(nowait=True)

    async def _next(self, connection: AbstractConnection) -> Any:
        """Whatever Redis says next; a connection on which it does not even answer a question is dead."""
        heard = await connection.read_response(timeout=self._quiet)
        if heard is None:
            await connection.send_command("PING")
            heard = await connection.read_response(timeout=self._quiet)
        if heard is None:
            raise failures.TimeoutError(f"Redis has been silent for {2 * self._quiet:g} s")
        return heard
