"""HTTP/1.1 over bare sockets: what no well-meaning library would send, and what comes back."""

import http.client
import json
import random
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, whole."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


@dataclass
class Target:
    """A service, and what became of the requests that were sent to it.

    Args:
        url: where it listens.
        source: address of this machine that connections come from; by default, whichever the kernel takes.
        patience_s: longest wait for a reply; by default longer than the deadline of any request.
        replies: how often each status, with the code of its problem, was replied; `closed` and `silent` without one.
        wrong: replies from 500 on that are no honest 503, and no deadline that passed.
    """

    url: str
    source: str = ""
    patience_s: float = 40.0
    replies: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def connect(self) -> socket.socket:
        address = urlsplit(self.url)
        own = (self.source, 0) if self.source else None
        connection = socket.create_connection((address.hostname, address.port), self.patience_s, own)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def ask(self, request: bytes, connection: socket.socket | None = None) -> Reply | None:
        """Send a request and read its reply; None if there is none. Without a connection, over one of its own."""
        own = connection or self.connect()
        with suppress(OSError):  # refused before it was all sent; the reply may be there
            own.sendall(request)
        try:
            return self.read(own)
        finally:
            if connection is None:
                own.close()

    def read(self, connection: socket.socket) -> Reply | None:
        """Read a reply and count it."""
        try:
            found = http.client.HTTPResponse(connection)
            found.begin()
            reply = Reply(found.status, found.headers, found.read())
        except (OSError, http.client.HTTPException) as error:
            self.replies["silent" if isinstance(error, TimeoutError) else "closed"] += 1
            return None
        self._judge(reply)
        return reply

    def _judge(self, reply: Reply) -> None:
        problem = _problem(reply)
        self.replies[f"{reply.status} {problem.get('code', '')}".strip()] += 1
        # 504 is the deadline of the request itself, which some attackers name.
        honest = reply.status in {503, 504} and problem.get("retryable") is True and "Retry-After" in reply.headers
        if reply.status >= 500 and not honest:
            self.wrong.append(f"{reply.status} {reply.headers.get('Retry-After', '')} {reply.body[:300]!r}")


def _problem(reply: Reply) -> dict[str, object]:
    if reply.headers.get_content_type() != "application/problem+json":
        return {}
    found = json.loads(reply.body)
    return found if isinstance(found, dict) else {}


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request as its sender words it; `_` in the names of headers stands for `-`."""
    return head(method, path, len(body), **headers) + body


def head(method: str, path: str, length: int, **headers: str) -> bytes:
    """The head of a request, whose body comes later, or never."""
    named = {"Host": "127.0.0.1", "Content-Length": str(length)}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def batch(client: str, rows: int, **headers: str) -> bytes:
    """A batch of images of noise, no two alike: flat and repeated ones are not learned from."""
    sent = {"Content_Type": "application/octet-stream", "X_Tensor_Shape": f"{rows},1,28,28", **headers}
    return request("POST", f"/clients/{client}/predict", random.randbytes(rows * 784), **sent)
