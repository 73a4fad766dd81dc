"""How requests come and replies leave: framing, offers of other protocols, bounds on heads, clocks, connections."""

import asyncio
import contextlib
import gc
import json
import re
import socket
import time

import pytest
import uvicorn
import uvloop

from acclimate_service.http import protocol
from acclimate_service.http.pacing import BYTES_PER_S, PIECE_BYTES
from acclimate_service.http.protocol import MAX_HEAD_BYTES, MAX_HEADERS, Http1, JoiningTransport


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


async def lose_what_is_held(faults, pieces):
    """Write some pieces, and lose the connection before the event loop's next round."""
    here, there = socket.socketpair()
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=here)
    joining = JoiningTransport(transport)
    with there:
        transport.abort()
        for _ in range(pieces):
            asyncio.get_running_loop().call_soon(joining.write, b"head")
        await asyncio.sleep(0.01)
        for _ in range(pieces):
            joining.write(b"too late")
        joining.close()
        await asyncio.sleep(0.01)
        assert there.recv(100) == b""


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_what_is_held_for_a_connection_that_is_lost_is_dropped(loop_factory, pieces):
    faults = []
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(lose_what_is_held(faults, pieces))
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
        config = uvicorn.Config(app, port=0, http=Http1, ws="none", lifespan="off", log_level="critical")
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        servers.append(server)
        return server.servers[0].sockets[0].getsockname()[1]

    yield begin
    for server in servers:
        await server.shutdown()


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


@pytest.mark.parametrize("before", [b"", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"])
async def test_nothing_is_kept_of_a_head_or_of_trailers_that_were_refused(serve, before):
    """The connection itself lives on until its peer has gone and garbage is collected."""
    port = await serve(tell)
    others = {id(each) for each in gc.get_objects() if type(each) is Http1}
    head = before or b"GET / HTTP/1.1\r\nHost: a\r\n"
    assert (await fetch(port, head + b"A: b\r\n" * 10_000)).startswith(b"HTTP/1.1 431 ")
    (refused,) = [each for each in gc.get_objects() if type(each) is Http1 and id(each) not in others]
    assert len(refused.headers) == 0
    assert len(refused.scope["headers"]) < MAX_HEADERS


async def tell(scope, receive, send):
    """Answer with method, path and body, once all of the body is here."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message.get("more_body", False)
    told = b" ".join((scope["method"].encode(), scope["path"].encode(), body))
    headers = [(b"content-length", str(len(told)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": told})


async def talk(port, *pieces, pause=0.0):
    """Send pieces one by one, and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = bytearray()

    async def read():
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65_536):
                got.extend(piece)

    reading = asyncio.create_task(read())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
    await asyncio.wait_for(reading, 10)
    writer.close()
    return bytes(got)


def statuses(reply):
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3})", reply)]


LAST = b"GET /last HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
OFFERS = {
    "h2c as the JDK offers it": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "a websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "anything": b"Upgrade: TLS/1.0, teapot/1\r\nconnection: upgrade\r\n",
}
FRAMED = {
    "by its length": (b"Content-Length: %d\r\n", lambda body: body),
    "in chunks": (b"Transfer-Encoding: chunked\r\n", lambda body: b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
}
HIDDEN = b"DELETE /hidden HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framed", FRAMED)
@pytest.mark.parametrize("cut", [None, 1, 2, 7, "head"])
async def test_an_offer_to_upgrade_is_ignored_and_the_body_is_read_as_framed(serve, offer, framed, cut):
    header, frame = FRAMED[framed]
    length = header % len(HIDDEN) if b"%" in header else header
    head = b"POST /a HTTP/1.1\r\nHost: here\r\n" + OFFERS[offer] + length + b"\r\n"
    sent = head + frame(HIDDEN) + LAST
    size = len(head) if cut == "head" else cut or len(sent)
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    reply = await talk(await serve(tell), *pieces)
    assert statuses(reply) == [200, 200]
    assert b"\r\n\r\nPOST /a " + HIDDEN in reply
    assert b"\r\n\r\nGET /last " in reply
    assert b"101" not in reply.split(b"\r\n")[0]


async def test_an_offer_without_a_body_is_answered_and_the_connection_goes_on(serve):
    reply = await talk(await serve(tell), b"GET /a HTTP/1.1\r\nHost: x\r\n" + OFFERS["anything"] + b"\r\n" + LAST)
    assert statuses(reply) == [200, 200]
    assert b"GET /a " in reply


async def test_connect_is_refused_and_what_follows_is_no_request(serve):
    reply = await talk(await serve(tell), b"CONNECT here:80 HTTP/1.1\r\nHost: here:80\r\n\r\n" + LAST)
    assert statuses(reply) == [400]


async def test_the_preface_of_http_2_is_refused(serve):
    assert statuses(await talk(await serve(tell), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + LAST)) == [400]


def head_of(nbytes):
    """A request whose head counts so many bytes."""
    return b"GET /last HTTP/1.1\r\nConnection: close\r\nX: %b\r\n\r\n" % (b"v" * (nbytes - 5 - len("/last") - 19))


@pytest.mark.parametrize(("nbytes", "status"), [(MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431)])
async def test_a_head_has_so_many_bytes_and_no_more(serve, nbytes, status):
    assert statuses(await talk(await serve(tell), head_of(nbytes))) == [status]


@pytest.mark.parametrize(("number", "status"), [(MAX_HEADERS, 200), (MAX_HEADERS + 1, 431)])
async def test_a_head_has_so_many_headers_and_no_more(serve, number, status):
    request = b"GET / HTTP/1.1\r\nConnection: close\r\n" + b"a: b\r\n" * (number - 1) + b"\r\n"
    reply = await talk(await serve(tell), request)
    assert statuses(reply) == [status]


ENDLESS = {
    "a target": b"GET /" + b"a" * 300_000,
    "a header": b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000,
    "a name": b"GET / HTTP/1.1\r\n" + b"a" * 300_000,
    "headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000,
    "spaces before a value": b"GET / HTTP/1.1\r\nX: " + b" " * 300_000,
    "a method": b"G" * 300_000,
    "a trailer": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 300_000,
    "trailers": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 50_000,
    "an extension of a chunk": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;" + b"a" * 300_000,
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_a_head_without_end_is_refused(serve, what):
    reply = await talk(await serve(tell), ENDLESS[what])
    assert statuses(reply) in ([431], [400])
    document = json.loads(reply.partition(b"\r\n\r\n")[2])
    assert (document["status"], document["state_committed"]) == (statuses(reply)[0], False)


async def test_trailers_are_no_headers(serve):
    seen = []

    async def app(scope, receive, send):
        await tell(scope, receive, send)
        seen.extend(scope["headers"])

    request = b"POST / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Late: 1\r\n\r\n"
    assert statuses(await talk(await serve(app), request)) == [200]
    assert [name for name, _ in seen] == [b"connection", b"transfer-encoding"]


async def test_a_bad_head_after_a_good_request_is_answered_after_it(serve):
    async def slow(scope, receive, send):
        await asyncio.sleep(0.1)
        await tell(scope, receive, send)

    reply = await talk(await serve(slow), b"GET /good HTTP/1.1\r\n\r\n" + ENDLESS["a header"])
    assert statuses(reply) == [200, 431]
    assert b"GET /good " in reply


async def test_a_bad_body_is_refused_and_the_application_told(serve):
    reply = await talk(await serve(tell), b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + LAST)
    assert statuses(reply) == [400]


async def test_a_body_that_turns_out_bad_after_its_reply_is_not_answered_again(serve):
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert statuses(await talk(await serve(quick), head, b"zz\r\n" + LAST, pause=0.1)) == [413]


@pytest.fixture
def hasty(monkeypatch):
    """Clocks of a fifth of a second, and a log that has said nothing yet."""
    monkeypatch.setattr(protocol, "_complaints", {})
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
    monkeypatch.setattr(protocol, "WRITE_S", 0.2)


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        ([], []),
        ([b"\r\n"], []),
        ([b"GET / HT", b"TP/1.1\r\n"], [408]),
        ([b"GET / HTTP/1.1\r\n\r\n", b"\r\n"], [200]),
        ([b"GET / HTTP/1.1\r\n\r\nGET"], [200, 408]),
    ],
)
@pytest.mark.usefixtures("hasty")
async def test_who_sends_no_head_in_time_is_let_go(serve, sent, answers):
    assert statuses(await talk(await serve(tell), *sent, pause=0.05)) == answers


@pytest.mark.usefixtures("hasty")
async def test_a_byte_now_and_then_does_not_stop_the_clock(serve):
    reply = await talk(await serve(tell), b"GET / HTTP/1.1\r\nX: ", *[b"x"] * 100, pause=0.01)
    assert statuses(reply) == [408]


async def quick(scope, receive, send):
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.usefixtures("hasty")
async def test_a_body_that_goes_on_after_its_reply_is_not_read_for_ever(serve):
    body = [b"x" * 1000] * 100
    reply = await talk(await serve(quick), b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n", *body, pause=0.01)
    assert statuses(reply) == [413]


@pytest.mark.usefixtures("hasty")
async def test_a_request_that_takes_its_time_to_be_answered_is_not_cut_off(serve):
    async def slow(scope, receive, send):
        await asyncio.sleep(0.5)
        await tell(scope, receive, send)

    assert statuses(await talk(await serve(slow), LAST)) == [200]


@pytest.mark.parametrize("loop", ["kept", "closed"])
@pytest.mark.usefixtures("hasty")
async def test_who_reads_nothing_is_cut_off(serve, caplog, loop):
    lost = asyncio.Event()

    async def stream(scope, receive, send):
        length = b"100000000"
        headers = [(b"content-length", length), *([(b"connection", b"close")] if loop == "closed" else [])]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(100_000_000)})
        await receive()
        lost.set()

    port = await serve(stream)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(lost.wait(), 5)
        for _ in range(100):
            if "has not read" in caplog.text:
                break
            await asyncio.sleep(0.02)
    assert "has not read" in caplog.text


@pytest.mark.usefixtures("hasty")
async def test_who_reads_slowly_gets_all(serve):
    reader, writer = await asyncio.open_connection("127.0.0.1", await serve(large), limit=2**16)
    writer.write(CLOSE)
    got = b""
    while piece := await reader.read(400_000):
        got += piece
        await asyncio.sleep(0.02)
    writer.close()
    assert got.partition(b"\r\n\r\n")[2] == bytes(range(256)) * 40_000


async def test_silent_connections_make_room_for_others_and_the_log_says_so(serve, monkeypatch, caplog):
    monkeypatch.setattr(protocol, "most_connections", lambda: 20)
    monkeypatch.setattr(protocol, "_complaints", {})
    port = await serve(tell)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
    assert statuses(await talk(port, LAST)) == [200]
    assert caplog.text.count("more than 20 connections") == 1
    for _, writer in silent:
        writer.close()


async def test_where_all_connections_are_in_use_a_new_one_is_told_to_come_back(serve, monkeypatch):
    monkeypatch.setattr(protocol, "most_connections", lambda: 2)
    port = await serve(tell)
    kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    for reader, writer in kept:
        writer.write(b"GET /kept HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"/kept ")
    reply = await talk(port)
    assert statuses(reply) == [503]
    assert b"retry-after: 1" in reply
    for reader, writer in kept:
        writer.write(LAST)
        assert statuses(await reader.read()) == [200]
        writer.close()


async def test_a_request_is_answered_though_its_caller_sends_no_more(serve):
    async def slow(scope, receive, send):
        await asyncio.sleep(0.2)
        await tell(scope, receive, send)

    reader, writer = await asyncio.open_connection("127.0.0.1", await serve(slow))
    writer.write(b"POST /half HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi")
    writer.write_eof()
    reply = await asyncio.wait_for(reader.read(), 5)
    assert statuses(reply) == [100, 200]
    assert reply.endswith(b"POST /half hi")
    writer.close()


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_caller_who_leaves_is_known_to_have_left(loop_factory):
    gone = []

    async def wait(scope, receive, send):
        while (message := await receive())["type"] != "http.disconnect":
            assert message["type"] == "http.request"
        gone.append(True)

    async def run():
        config = uvicorn.Config(wait, port=0, http=Http1, ws="none", lifespan="off", log_level="critical")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
        with socket.create_connection(server.servers[0].sockets[0].getsockname()) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.1)
        for _ in range(100):
            if gone:
                break
            await asyncio.sleep(0.02)
        server.should_exit = True
        await task

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
    assert gone == [True]


async def test_of_two_callers_the_one_with_a_large_body_is_read_at_its_pace(serve):
    """The other one's request is under way meanwhile, as its body does not come."""
    size = 8 * PIECE_BYTES
    port = await serve(tell)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    other = await asyncio.open_connection("127.0.0.1", port)
    other[1].write(head % 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    writer.write(head % size + bytes(size))
    reply = await asyncio.wait_for(reader.read(), 10)
    assert time.monotonic() - began >= size / BYTES_PER_S / 2, "but for what came in smaller pieces, and the last one"
    assert reply.startswith(b"HTTP/1.1 200 ")
    for each in (writer, other[1]):
        each.close()
