"""uvicorn, which gives load balancers time to learn that this replica is about to end."""

import asyncio
import signal
from types import FrameType

import uvicorn

from acclimate_service.service import Service


class DrainingServer(uvicorn.Server):
    """On SIGTERM, says for a while that it is not ready and ends its connections one by one, then ends.

    SIGINT, or a second SIGTERM, ends it at once: requests under way are answered all the same.
    """

    def __init__(self, config: uvicorn.Config, service: Service, lead_s: float) -> None:
        """Drain the service for so many seconds before its end."""
        super().__init__(config)
        self._service = service
        self._lead_s = lead_s
        self._loop = asyncio.get_running_loop()

    def heed_signals(self) -> None:
        """Obey from now on; uvicorn itself only does while it serves, and raises the signals again when it ends."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or to end."""
        if sig != signal.SIGTERM or self._service.draining or not self._lead_s:
            self._service.draining = True
            super().handle_exit(sig, frame)
        else:
            self._service.draining = True
            self._loop.call_soon_threadsafe(self._loop.call_later, self._lead_s, super().handle_exit, sig, frame)
