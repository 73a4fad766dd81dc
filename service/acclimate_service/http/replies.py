"""Replies as JSON, and as bytes that are sent piece by piece."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PIECE: Final = 2**20
"""Bytes that are sent at a time."""


def json(body: Mapping[str, Any] | Sequence[Any], status: int = 200) -> Response:
    """A JSON reply."""
    return Response(orjson.dumps(body), status, media_type="application/json")


class HeldReply(Response):
    """Bytes that are sent in pieces, each once the peer has taken the one before, and then no longer counted."""

    media_type = "application/octet-stream"

    def __init__(self, data: bytes, headers: Mapping[str, str], held: ExitStack) -> None:
        super().__init__(headers={**headers, "Content-Length": str(len(data))})
        self._data = memoryview(data)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them, as ASGI has it."""
        with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for piece in pieces_of(self._data):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def pieces_of(data: bytes | memoryview) -> Iterator[memoryview]:
    """Data as they are sent: each piece once the peer has taken the one before."""
    whole = memoryview(data)
    for start in range(0, len(whole), _PIECE):
        yield whole[start : start + _PIECE]
