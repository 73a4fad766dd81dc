"""Requests to an HTTP server over so many connections, as work of a process of its own: the same for every server.

    python -m acclimate_bench.cost.load PORT PATH SHAPE CONNECTIONS

Each connection is kept alive throughout a block and sends its next request once it has the last reply; a `{}` in the
path is replaced by the number of the connection.
"""

import itertools
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from acclimate_bench.cost.inputs import noise
from acclimate_bench.cost.remote import local, obey


class Connection:
    """One kept-alive connection, and the request to each path, which it sends in turn again and again."""

    def __init__(self, port: int, paths: Sequence[str], shape: tuple[int, ...]) -> None:
        body = noise(*shape).tobytes()
        heads = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/octet-stream\r\n"
            f"X-Tensor-Shape: {','.join(map(str, (20, *shape)))}\r\nX-Tensor-Layout: NCHW\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
            for path in paths
        )
        self._requests = itertools.cycle([head.encode() + body for head in heads])
        self._port = port
        self.connect()

    def connect(self) -> None:
        """Open it, anew once it is closed."""
        self._socket = socket.create_connection(("127.0.0.1", self._port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self) -> None:
        """Send the next request and read the reply.

        Raises:
            SystemExit: the reply is not 200.
        """
        self._socket.sendall(next(self._requests))
        head, body = self._head()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"the server answered {(head + body)[:500]!r}")
        left = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]) - len(body)
        while left > 0:
            left -= len(self._receive())
        if b"\r\nconnection: close" in head:  # nginx lets a connection have 1000 requests
            self.close()
            self.connect()

    def close(self) -> None:
        """Close it: servers end connections that were idle, each after a time of its own."""
        self._socket.close()

    def _head(self) -> tuple[bytes, bytes]:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._receive()
        head, _, body = received.partition(b"\r\n\r\n")
        return head.lower() + b"\r\n", body

    def _receive(self) -> bytes:
        received = self._socket.recv(65536)
        if not received:
            raise SystemExit("the server closed the connection")
        return received


def one_by_one(port: int, path: str, shape: tuple[int, ...], times: int) -> list[float]:
    """Seconds of each of so many requests, one after the other, over one new connection."""
    connection = Connection(port, [path], shape)
    try:
        return local(connection.exchange)(times)
    finally:
        connection.close()


def exchanges(port: int, path: str, shape: tuple[int, ...], number: int, times: int) -> list[float]:
    """Seconds per request of about `times` requests, over so many new connections at the same time."""
    share = -(-times // number)
    connections = [Connection(port, [path.format(k)], shape) for k in range(number)]
    with ThreadPoolExecutor(number) as threads:
        began = time.perf_counter()
        list(threads.map(partial(_repeat, share), connections))  # raises what a thread raised
        seconds = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return [seconds / (share * number)]


def _repeat(times: int, connection: Connection) -> None:
    for _ in range(times):
        connection.exchange()


if __name__ == "__main__":
    port, path, shape, number = sys.argv[1:]
    obey(partial(exchanges, int(port), path, tuple(map(int, shape.split(","))), int(number)))
