"""HTTP/1.1 as uvicorn speaks it, with bounds on what a peer may cost, and replies that leave in one piece.

A head has at most `MAX_HEAD_BYTES` and `MAX_HEADERS` and is here within `HEAD_S`. Who reads nothing is cut off after
`WRITE_S`. There are at most `most_connections()` connections. An offer to upgrade is ignored (RFC 9110, 7.8): bytes of
a body are never taken for a request.
"""

import asyncio
import logging
import resource
import socket
import time
import uuid
from contextlib import suppress
from typing import Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from acclimate_service.errors import Problem
from acclimate_service.http.pacing import PIECE_BYTES, Uploads, network_of
from acclimate_service.http.problems import reply

MAX_HEAD_BYTES: Final = 64 * 1024
"""Target, names and values of a request's head, and four bytes more for each header; its trailers may have as many."""
MAX_HEADERS: Final = 128
_HEAD_PIECE: Final = 16 * 1024
"""Bytes of a head that are parsed before it is looked at: so many may hold 2,700 headers, which take 3 ms."""
HEAD_S: Final = 10.0
"""Seconds that a head may take to come, and what is left of a body once its reply was sent."""
WRITE_S: Final = 10.0
"""Seconds within which a peer must take `LEAST_READ` bytes of its replies, or all."""
LEAST_READ: Final = 64 * 1024
LINGER_S: Final = 1.0
"""Seconds for which what still comes after a refusal is dropped; to close at once would reset the reply on its way."""
MAX_CONNECTIONS: Final = 8192
_OTHER_FILES: Final = 256
"""File descriptors that are kept for all but connections of callers."""
_OVERHEAD: Final = 8
"""Bytes of framing that each byte of a chunked body may cost; a chunk of one byte takes five."""
_FIRST_LOOK_S: Final = 0.005
_LOOK_S: Final = 0.1
_LOG_EVERY_S: Final = 10.0
_log = logging.getLogger(__name__)
_complaints: dict[str, float] = {}
_uploads = Uploads()


def most_connections() -> int:
    """How many connections there may be: `MAX_CONNECTIONS`, or fewer where the process may not open as many files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, files - _OTHER_FILES))


def _complain(message: str, *facts: object) -> None:
    """Log a warning, but each one not more often than an operator can read: callers can bring about any number."""
    now = time.monotonic()
    if now - _complaints.get(message, float("-inf")) >= _LOG_EVERY_S:
        _complaints[message] = now
        _log.warning(message, *facts)


class Http1(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve a connection, if there is room for it."""
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport)))
        self._address = network_of(self.client[0]) if self.client else ""
        self._under_way = 0  # requests
        self._in_head = False
        self._open = False  # a message has begun and not ended
        self._offered = False  # the head offers an upgrade, which the parser stops at
        self._resuming = False  # a parser that knows of no offer reads the framing of the same message again
        self._served = False
        self._half_closed = False
        self._body_bytes = self._overhead = 0
        self._parting: Problem | None = None
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, self._too_slow)
        if len(self.connections) > most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_head_timer()
        _uploads.leave(self._address, self._under_way)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a caller who sends no more but may still read.

        One who has left altogether looks the same until something is sent to it. So an interim reply is sent, which
        every caller of HTTP/1.1 must be able to read (RFC 9110, 15.2), and which one who has left answers by a reset.
        """
        if self._open or not self._busy:
            return False
        self._half_closed = True
        if not (self.pipeline or self.cycle.response_started or self.scope["http_version"] == "1.0"):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(_FIRST_LOOK_S, self._look_for_reset)
        return True

    def _look_for_reset(self) -> None:
        """The event loop looks at no socket any more whose peer sends nothing."""
        if self._busy and not self.transport.is_closing():
            if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()
            else:
                self.loop.call_later(_LOOK_S, self._look_for_reset)

    def data_received(self, data: bytes) -> None:
        """Read on. What comes after a request that was refused is not looked at."""
        self._unset_keepalive_if_required()
        if len(data) >= PIECE_BYTES and (rest_s := _uploads.rest_s(self._address, len(data))):
            cast(JoiningTransport, self.transport).rest(rest_s)
        start = 0
        while start < len(data):
            if self._parting is not None or self.transport.is_closing():
                return
            end = start + (MAX_HEAD_BYTES if self._open and not self._in_head else _HEAD_PIECE)
            self._feed(data[start:end])
            start = end
        self._watch_head()

    def _feed(self, data: bytes) -> None:
        went_on, body = self._open, self._body_bytes
        try:
            self.parser.feed_data(data)
            if self._open and (self._in_head or self.headers):  # neither a head nor trailers are kept without end
                self._check_head()
            if went_on and self._open:
                # what is neither body nor reported: the rest of a head, of a chunk's or a trailer's line
                self._overhead += len(data) - (self._body_bytes - body)
                if self._overhead > MAX_HEAD_BYTES + _OVERHEAD * self._body_bytes:
                    raise _too_large()
        except httptools.HttpParserUpgrade as offer:
            self._read_as_framed()
            if self._parting is None:
                self._feed(data[offer.args[0] :])
        except Problem as problem:
            self._refuse(problem)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(
                cause if isinstance(cause, Problem) else Problem("malformed_request", f"this is no HTTP: {error}")
            )

    def _check_head(self) -> None:
        """Refuse a head that is too large, as far as it is here, or trailers."""
        if len(self.headers) > MAX_HEADERS:
            raise Problem("head_too_large", f"a request may have {MAX_HEADERS} headers")
        if len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers]) > MAX_HEAD_BYTES:
            raise _too_large()

    def _read_as_framed(self) -> None:
        """Let a parser that knows of no offer read the body of the message whose head is complete.

        The one that has seen the offer takes the rest of the connection for another protocol.
        """
        self._offered = False
        if self.scope["method"] == "CONNECT":
            self._open = False  # it has no body
            return self._refuse(Problem("malformed_request", "this is no proxy: CONNECT is not accepted"))
        head = self.scope["headers"]
        framing = [(name, value) for name, value in head if name in (b"content-length", b"transfer-encoding")]
        if not self.cycle.keep_alive:
            framing.append((b"connection", b"close"))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % each for each in framing) + b"\r\n")

    # callbacks of the parser

    def on_message_begin(self) -> None:
        """A head begins."""
        if not self._resuming:
            super().on_message_begin()
            self._open = self._in_head = True
            self._body_bytes = self._overhead = 0

    def on_headers_complete(self) -> None:
        """The head is here."""
        if not self._resuming:
            self._check_head()
        self.headers = []  # what comes now are trailers, which nobody looks at: the scope has those of the head
        if self._resuming:
            self._resuming = False
            return
        self._in_head = False
        self._offered = self.parser.should_upgrade()
        if self._offered and self.parser.get_method() == b"CONNECT":
            self.scope["method"] = "CONNECT"  # its target is no path
            return
        try:
            super().on_headers_complete()
        except httptools.HttpParserInvalidURLError as error:
            raise Problem("malformed_request", "the target is no path") from error
        self._served = True
        self._under_way += 1
        _uploads.under_way[self._address] += 1

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here, unless the parser only stops at an offer."""
        if not self._offered:
            self._open = False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A reply was sent."""
        self._under_way -= 1
        _uploads.under_way[self._address] -= 1
        super().on_response_complete()
        if self.pipeline or self.transport.is_closing():
            return
        if self._parting is not None:
            self._part(self._parting)
        elif self._half_closed:
            self.transport.close()
        elif (
            self._open
        ):  # the rest of this body or of the next head has its time, which is not that of an idle connection
            self._unset_keepalive_if_required()
            self._watch_head()

    # bounds

    @property
    def _busy(self) -> bool:
        """Whether a request is to be answered whose head is complete."""
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def _watch_head(self) -> None:
        """Have the clock run while the peer owes a head, or the rest of a body that nobody reads."""
        if self._busy:
            if self._head_timer is not None:
                self._stop_head_timer()
        elif self._head_timer is None and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(Problem("head_too_slow", f"a head was not here within {HEAD_S:g} s"))
        else:
            self.transport.close()

    def _make_room(self) -> None:
        """Close a connection that never sent a request, or else this one."""
        _complain("there are more than %d connections; silent ones are closed, others refused", most_connections())
        for other in self.connections:
            if (
                isinstance(other, Http1)
                and not other._served
                and other is not self
                and not other.transport.is_closing()
            ):
                other.transport.abort()
                return
        self._refuse(
            Problem("too_many_connections", "the replica has as many connections as it can; try again shortly")
        )

    def _refuse(self, problem: Problem) -> None:
        """Look at nothing that comes from now on, and end the connection after the replies that are due."""
        self._parting = problem
        self._stop_head_timer()
        if self._open:  # parser and protocol hold each other, and what they hold, until garbage is collected
            self.headers.clear()
        if self._open and not self._in_head:
            if not self._busy:  # the reply was sent already; another one would be taken for that to the next request
                self.transport.close()
            elif self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()  # the request that is broken waits for its turn
            elif self.cycle.response_started:
                self.transport.close()
            else:
                self._part(problem)
        elif not self._busy:
            self._part(problem)

    def _part(self, problem: Problem) -> None:
        made = reply(problem, uuid.uuid4().hex)
        headers = (*self.server_state.default_headers, *made.raw_headers, (b"connection", b"close"))
        lines = b"".join(b"%b: %b\r\n" % each for each in headers)
        self.transport.write(STATUS_LINE[made.status_code] + lines + b"\r\n" + bytes(made.body))
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _too_large() -> Problem:
    return Problem(
        "head_too_large",
        f"target and headers of a request may have {MAX_HEAD_BYTES} bytes together, as may its trailers",
    )


class JoiningTransport:
    """Holds what is written until the next piece comes, but no longer than to the event loop's next round.

    uvicorn writes head and body one after the other. Two pieces are two system calls, and wake the caller twice. Who
    does not read what was written is cut off. All that does not write is the transport's own.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        self.set_protocol = transport.set_protocol
        self._loop = asyncio.get_running_loop()
        self._held = b""
        self._written = 0
        self._taken = 0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = self._rests = False  # either keeps the transport from reading

    def pause_reading(self) -> None:
        """Read nothing until told to."""
        self._paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless the transport rests."""
        self._paused = False
        if not self._rests:
            self._transport.resume_reading()

    def rest(self, seconds: float) -> None:
        """Read nothing for so long."""
        self._rests = True
        self._transport.pause_reading()
        self._loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._rests = False
        if not (self._paused or self._transport.is_closing()):
            self._transport.resume_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send together with what is held, or hold."""
        if self._held:
            held, self._held = self._held, b""
            self._written += len(held) + len(data)
            if self._transport.is_closing():
                return  # asyncio's own transport, from Python 3.12 on, has nothing left to write with then
            with suppress(RuntimeError):  # so uvloop says that the connection was lost meanwhile
                self._transport.writelines((held, data) if data else (held,))  # that tries an empty piece for ever
                self._watch()
        else:
            self._held = bytes(data)
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Send what was written, and close."""
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        """Send what was written, and say that nothing follows."""
        self._flush()
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self) -> None:
        """Close at once; what was not sent is dropped."""
        self._held = b""
        self._transport.abort()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._written += len(held)
            with suppress(RuntimeError):
                self._transport.write(held)
                self._watch()

    def _watch(self) -> None:
        """Look at what the peer takes for as long as it has not taken all."""
        if self._timer is None and self._transport.get_write_buffer_size():
            self._taken = self._written - self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(WRITE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if left and self._written - left < self._taken + LEAST_READ:
            _complain("a connection is cut off: its peer has not read %d bytes of replies", left)
            self._transport.abort()
        else:
            self._watch()
