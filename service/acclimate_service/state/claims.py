"""The requests that are at work on one replica."""

from collections.abc import Iterator
from contextlib import contextmanager

from acclimate_service.state.errors import KeyReused, RequestRunning
from acclimate_service.state.machine import Request


class Claims:
    """Turns away a request whose key is at work here already, before it waits for its client's turn.

    Args:
        retry_after_ms: when whoever was turned away may ask again.
    """

    def __init__(self, retry_after_ms: int = 1000) -> None:
        self._retry_after_ms = retry_after_ms
        self._running: dict[str, str] = {}

    @contextmanager
    def hold(self, request: Request) -> Iterator[None]:
        """Claim the request for the block.

        Raises:
            RequestRunning: it is at work already.
            KeyReused: its key is, with another content.
        """
        running = self._running.get(request.rid)
        if running == request.fingerprint:
            raise RequestRunning("a request with this Idempotency-Key is being answered", self._retry_after_ms)
        if running is not None:
            raise KeyReused("this Idempotency-Key is in use with another request; use a new key")
        self._running[request.rid] = request.fingerprint
        try:
            yield
        finally:
            del self._running[request.rid]
