"""HTTP/1.1 as uvicorn speaks it, except that a reply leaves in one piece."""

import asyncio
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class WholeReplies(HttpToolsProtocol):
    """uvicorn's protocol; head and body of a reply, which it writes one after the other, are sent together.

    Two pieces are two system calls here, and wake the caller twice.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve a connection."""
        super().connection_made(JoiningTransport(transport))


class JoiningTransport(asyncio.Transport):
    """Holds what is written until the next piece comes, but no longer than to the event loop's next round."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send together with what is held, or hold."""
        if self._held:
            held, self._held = self._held, b""
            self._transport.writelines((held, data))
        else:
            self._held = bytes(data)
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Send what was written, and close."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Facts about the connection."""
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection to another protocol."""
        self._transport.set_protocol(protocol)

    def pause_reading(self) -> None:
        """Let the peer wait."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._transport.resume_reading()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            with suppress(RuntimeError):  # so uvloop says that the connection was lost meanwhile
                self._transport.write(held)
