"""A replica closes its port: who is connected by then is answered, though not accepted yet."""

import asyncio
import signal
import socket
import sys
import time

import httpx
import pytest

from acclimate_service.http.server import LAST_IN_S, let_last_in, refuse_newcomers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can drop handshakes at a listening socket")
LEAD_S = 2.0
CALLERS = 24
BODY = bytes(28 * 28)


def call(url, client):
    """Connect and send a batch, without waiting for anything of the service's own."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = (
        f"POST /clients/{client}/predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\n"
        f"X-Tensor-Shape: 1,28,28\r\nContent-Length: {len(BODY)}\r\n\r\n"
    )
    connection.sendall(head.encode() + BODY)
    return connection


def first_line(connection):
    """Of the reply, or what came in its place."""
    with connection, connection.makefile("rb") as reply:
        try:
            return reply.readline().rstrip()
        except ConnectionError as error:
            return type(error).__name__


def await_draining(url):
    deadline = time.monotonic() + 60
    while httpx.get(f"{url}/v2/health/ready").status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_batches_of_connections_that_wait_to_be_accepted_when_the_lead_ends_are_answered(serve):
    service = serve(drain_lead_s=LEAD_S)
    service.signal(signal.SIGTERM)
    await_draining(service.url)
    service.signal(signal.SIGSTOP)  # the kernel goes on shaking hands
    ends = time.monotonic() + LEAD_S
    connections = [call(service.url, number) for number in range(CALLERS)]
    while time.monotonic() < ends:
        time.sleep(0.05)
    service.signal(signal.SIGCONT)
    assert {first_line(one) for one in connections} == {b"HTTP/1.1 200 OK"}
    assert service.wait() == 0
    assert service.log.read_text() == ""


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_listener_that_refuses_newcomers_still_has_those_who_were_there(family, host):
    with socket.create_server((host, 0), family=family) as listener:
        address = listener.getsockname()[:2]
        with socket.create_connection(address) as early:
            refuse_newcomers(listener)
            early.sendall(b"batch")
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.1)
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(5) == b"batch"
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


@pytest.mark.parametrize("busy_at", [("accept",), ("connection_made",), ("accept", "connection_made")], ids=str)
def test_whoever_is_accepted_by_a_busy_loop_is_read_from_before_it_ends(busy_at):
    """The loop is held up for longer than a round of waiting, before it accepts or before it reads."""

    class Connection(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            connections.append(self)
            if "connection_made" in busy_at:
                time.sleep(2 * LAST_IN_S)

        def data_received(self, data):
            read.append(data)

    async def connect_and_end(listener):
        for _ in range(3):
            callers.append(socket.create_connection(listener.getsockname()))
            callers[-1].sendall(b"batch")
        await let_last_in([listener])
        for each in connections:
            each.transport.close()
        await asyncio.sleep(0)

    async def serve(listener):
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Connection, sock=listener)
        end = loop.create_task(connect_and_end(listener))
        if "accept" in busy_at:
            loop.call_soon(time.sleep, 2 * LAST_IN_S)  # in the same round, before the loop looks at the listener
        await end
        server.close()

    connections, callers, read = [], [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(serve(listener))
    for caller in callers:
        caller.close()
    assert read == [b"batch"] * 3
