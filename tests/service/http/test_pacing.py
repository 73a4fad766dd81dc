"""One caller's refusals and large bodies keep the event loop from nobody else."""

import asyncio
import socket
import time
import weakref

import pytest
from fastapi import FastAPI, Request

from acclimate_service.errors import Problem
from acclimate_service.http import pacing, problems, protocol
from acclimate_service.http.pacing import BYTES_PER_S, LONGEST_S, PIECE_BYTES, REFUSALS_PER_S, Refusals, Uploads
from acclimate_service.http.protocol import JoiningTransport
from acclimate_service.keys import EVERYBODY

GAP_S = 1 / REFUSALS_PER_S
PIECE_S = PIECE_BYTES / BYTES_PER_S


async def kept(refusals, caller, times):
    """Seconds for which each of so many refusals at once was kept."""
    began = time.monotonic()

    async def keep():
        await refusals.keep(caller)
        return time.monotonic() - began

    return sorted(await asyncio.gather(*[keep() for _ in range(times)]))


async def test_the_first_refusal_leaves_at_once_and_further_ones_evenly():
    refusals = Refusals()
    many, other = await asyncio.gather(kept(refusals, "many", 10), kept(refusals, "other", 1))
    assert max(many[0], *other) < GAP_S
    assert all(seconds >= number * GAP_S for number, seconds in enumerate(many))
    await asyncio.sleep(GAP_S)
    assert await kept(refusals, "many", 1) < [GAP_S], "who waits is told at once"


async def test_no_refusal_is_kept_longer_than_is_promised():
    seconds = await kept(Refusals(), "many", 2 * REFUSALS_PER_S)
    assert LONGEST_S <= seconds[-1] < LONGEST_S + 0.5


async def test_beyond_so_many_kept_refusals_others_leave_at_once(monkeypatch):
    monkeypatch.setattr(pacing, "MOST_KEPT", 3)
    seconds = await kept(Refusals(), "many", 10)
    assert sum(each >= GAP_S for each in seconds) == 3


async def test_a_refusal_that_is_kept_keeps_nothing_of_its_request():
    class Body:
        pass

    def refuse():
        body = Body()
        bodies.append(weakref.ref(body))
        raise Problem("too_many_requests", "no room")

    async def answer():
        try:
            refuse()
        except Problem as error:
            return await problems.answer(request, error)

    app, bodies = FastAPI(), []
    problems.install(app, [])
    state = {"caller": EVERYBODY, "request_id": "r", "caller_request_id": None}
    request = Request({"type": "http", "app": app, "state": state, "client": ("127.0.0.1", 1)})
    replies = [asyncio.create_task(answer()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not replies[2].done()
    assert [body() for body in bodies] == [None] * 3
    assert [reply.status_code for reply in await asyncio.gather(*replies)] == [429] * 3


def test_who_is_refused_again_and_again_is_answered_at_his_pace(make_replica, gate, pool, post, assert_problem, shade):
    gate.shut = False
    replica = make_replica(adapter="gated", max_waiting=1)
    gate.shut = True
    held = pool.submit(post, replica, "cam", shade(0))
    replica.await_waiting(1)
    began = time.monotonic()
    for _ in range(11):
        assert_problem(post(replica, "other", shade(1)), 429, "too_many_requests")
    assert time.monotonic() - began >= 10 * GAP_S
    gate.open()
    assert held.result().status_code == 200


def test_a_connection_rests_after_a_large_piece_while_others_are_served():
    uploads = Uploads()
    uploads.under_way["large"] += 1
    assert uploads.rest_s("large", PIECE_BYTES) == 0, "nobody else is there"
    uploads.under_way["other"] += 1
    rests = [uploads.rest_s("large", PIECE_BYTES) for _ in range(10)]
    assert rests == pytest.approx([number * PIECE_S for number in range(1, 11)], abs=0.005), "it has many connections"
    assert uploads.rest_s("other", PIECE_BYTES) == PIECE_S
    assert max(uploads.rest_s("large", 2**20) for _ in range(200)) <= LONGEST_S + 2**20 / BYTES_PER_S
    uploads.leave("other", 1)
    assert uploads.rest_s("large", PIECE_BYTES) == 0


async def test_a_transport_that_rests_reads_nothing_and_then_all():
    came = asyncio.Event()

    class Reader(asyncio.Protocol):
        def data_received(self, data):
            came.set()

    here, there = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(Reader, sock=here)
    joining = JoiningTransport(transport)

    async def comes():
        """Seconds until what is sent now is read."""
        began = time.monotonic()
        came.clear()
        there.send(b"x")
        await asyncio.wait_for(came.wait(), 5)
        return time.monotonic() - began

    with there:
        joining.rest(0.05)
        assert await comes() >= 0.04
        joining.rest(0.05)
        joining.pause_reading()
        joining.resume_reading()  # as uvicorn does once the body is taken
        assert await comes() >= 0.04
        joining.rest(0.05)
        joining.pause_reading()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(comes(), 0.2)
        joining.resume_reading()
        await asyncio.wait_for(came.wait(), 5)
        transport.abort()


def test_requests_are_under_way_until_their_end_or_that_of_their_connection(make_replica, post, shade):
    replica = make_replica()
    before = protocol._uploads.under_way.total()
    with socket.create_connection((replica.http.base_url.host, replica.http.base_url.port)) as connection:
        connection.sendall(b"POST /clients/a/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        deadline = time.monotonic() + 5
        while protocol._uploads.under_way.total() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert protocol._uploads.under_way.total() == before + 1
    assert post(replica, "cam", shade(0)).status_code == 200
    while protocol._uploads.under_way.total() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert protocol._uploads.under_way.total() == before
