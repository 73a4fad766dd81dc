"""Tells a service of the operator's when labels turn a client to the frozen model, by an HTTP request of its own."""

import asyncio
import hmac
import time
import uuid
from collections import deque
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import orjson

from acclimate_service.clients.requests import rfc3339
from acclimate_service.metrics import Background
from acclimate_service.state import ClientScope, Tasks

MOST_WAITING: Final = 1000
"""Notices that wait for those before them; the oldest goes for a further one."""
TRIES: Final = 5
_PAUSE_S: Final = 1.0
"""Before the second try; it doubles from one to the next."""
_LONGEST_S: Final = 10
_TASK: Final = "webhook"


class Webhook:
    """Sends notices, one after the other, in the background: no request waits for them.

    Each is sent until it is answered with 2xx, `TRIES` times at most, so it may come twice; its `id` tells. What is
    given up shows as failing work.

    Args:
        url: that takes them, by POST.
        secret: by which they are signed; empty for none.
        background: watches over it.
        pause_s: before the second try (s).
    """

    def __init__(self, url: str, secret: str, background: Background, pause_s: float = _PAUSE_S) -> None:
        self._url = url
        self._secret = secret.encode()
        self._background = background
        self._pause_s = pause_s
        self._waiting = deque[bytes]()
        self._tasks = Tasks(background)
        self._sending: asyncio.Task[None] | None = None

    def harmful(self, model: Mapping[str, str], client: ClientScope) -> None:
        """Have it told that by its own labels a client is worse off adapted, and is answered by the frozen model now.

        Args:
            model: its name and version.
            client: of it.
        """
        self._tell("client_harmful", {"tenant": client.owner or None, "client_id": client.name, "model": model})

    def _tell(self, event: str, about: Mapping[str, Any]) -> None:
        if len(self._waiting) == MOST_WAITING:
            self._waiting.popleft()
            self._background.failed(_TASK, OverflowError(f"{MOST_WAITING} notices wait; the oldest is given up"))
        notice = {"event": event, "id": uuid.uuid4().hex, "at": rfc3339(time.time()), **about}
        self._waiting.append(orjson.dumps(notice))
        if self._sending is None or self._sending.done():
            self._sending = self._tasks.start(_TASK, self._send_all())

    async def aclose(self) -> None:
        """Give up what waits."""
        await self._tasks.aclose()

    async def _send_all(self) -> None:
        while self._waiting:
            try:
                await self._send(self._waiting.popleft())
            except OSError as error:
                if not self._waiting:
                    raise
                self._background.failed(_TASK, error)

    async def _send(self, body: bytes) -> None:
        for tried in range(TRIES):
            try:
                return await asyncio.to_thread(self._post, body)
            except OSError:  # also an answer that is no success
                if tried == TRIES - 1:
                    raise
                await asyncio.sleep(self._pause_s * 2**tried)

    def _post(self, body: bytes) -> None:
        request = Request(self._url, body, {"Content-Type": "application/json", "User-Agent": "acclimate"})
        if self._secret:
            signature = hmac.new(self._secret, body, sha256).hexdigest()
            request.add_header("X-Acclimate-Signature", f"sha256={signature}")
        try:
            urlopen(request, timeout=_LONGEST_S).close()
        except HTTPError as error:
            error.close()  # it is the reply, too
            raise
