"""How replies leave: in one piece where they can, whole and in order where they cannot."""

import asyncio
import socket

import pytest
import uvicorn
import uvloop

from acclimate_service.http.protocol import JoiningTransport, WholeReplies


@pytest.fixture
async def wire():
    """What is written into a connection, and the socket at its other end."""
    here, there = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=here)
    there.setblocking(False)
    with there:
        yield JoiningTransport(transport), there
        transport.abort()


async def test_a_first_piece_is_held_and_sent_together_with_the_second(wire):
    joining, peer = wire
    joining.write(b"head ")
    with pytest.raises(BlockingIOError):
        peer.recv(100)
    joining.write(b"body")
    assert peer.recv(100) == b"head body"
    await asyncio.sleep(0)
    with pytest.raises(BlockingIOError):
        peer.recv(100)


async def test_a_single_piece_is_sent_in_the_next_round(wire):
    joining, peer = wire
    joining.write(b"alone")
    await asyncio.sleep(0)
    assert peer.recv(100) == b"alone"


async def test_an_empty_piece_lets_go_of_what_is_held(wire):
    joining, peer = wire
    joining.write(b"head")
    joining.write(b"")
    assert peer.recv(100) == b"head"


async def test_what_was_written_is_sent_before_the_end(wire):
    joining, peer = wire
    joining.write(b"last")
    joining.close()
    assert joining.is_closing()
    await asyncio.sleep(0.01)
    assert peer.recv(100) == b"last"
    assert peer.recv(100) == b""


async def lose_what_is_held(faults):
    """Write, and lose the connection before the event loop's next round."""
    here, there = socket.socketpair()
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=here)
    joining = JoiningTransport(transport)
    with there:
        transport.abort()
        asyncio.get_running_loop().call_soon(joining.write, b"head")
        await asyncio.sleep(0.01)
        joining.write(b"too late")
        joining.close()
        await asyncio.sleep(0.01)
        assert there.recv(100) == b""


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_what_is_held_for_a_connection_that_is_lost_is_dropped(loop_factory):
    faults = []
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(lose_what_is_held(faults))
    assert faults == []


async def stream(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one ", b"two ", b"three"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def large(scope, receive, send):
    body = bytes(range(256)) * 40_000
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]}
    )
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def serve():
    servers = []

    async def begin(app):
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, http=WholeReplies, ws="none", lifespan="off", log_level="critical")
        )
        servers.append((server, asyncio.create_task(server.serve())))
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
        return server.servers[0].sockets[0].getsockname()[1]

    yield begin
    for server, task in servers:
        server.should_exit = True
        await task


async def fetch(port, request, times=1):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request * times)
    reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return reply


CLOSE = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


async def test_streamed_replies_arrive_whole_and_in_order(serve):
    reply = await fetch(await serve(stream), CLOSE)
    assert reply.endswith(b"\r\n\r\n4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n")


async def test_replies_larger_than_the_buffers_arrive_whole(serve):
    reply = await fetch(await serve(large), CLOSE)
    assert reply.partition(b"\r\n\r\n")[2] == bytes(range(256)) * 40_000


async def test_what_is_no_http_is_refused(serve):
    assert (await fetch(await serve(large), b"\0\0\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
