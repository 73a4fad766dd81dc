"""Replicas that end as the service does, behind nginx and Envoy as deployed; times are shorter than the real ones."""

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest

from acclimate_service.http.server import let_last_in

SCALED = {
    "balance": (
        2.2,  # above the shortest fail_timeout that nginx knows, as 5 s are above 3 s
        (
            ("keepalive_timeout 4s", "keepalive_timeout 100ms"),
            ("fail_timeout=3s", "fail_timeout=1s"),
            ("proxy_connect_timeout 1s", "proxy_connect_timeout 100ms"),
        ),
    ),
    "balance_by_envoy": (
        0.5,
        (
            ("idle_timeout: 4s", "idle_timeout: 0.1s"),
            ("interval: 1s", "interval: 0.1s"),
            ("connect_timeout: 1s", "connect_timeout: 0.1s"),
        ),
    ),
}
"""Drain lead in seconds, and what is made shorter with it in the configuration of the balancer."""


class Backend:
    """While it drains it answers, says that it is not ready, and closes every connection with its reply."""

    def __init__(self) -> None:
        self.port = 0
        self.batches: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        self._drains = False
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()

    def drain(self) -> None:
        self._drains = True

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        self._ends = asyncio.Event()
        server = await asyncio.start_server(self._converse, sock=self._listener)
        await self._ends.wait()
        await let_last_in([self._listener])
        server.close()
        conversations = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*conversations)  # each ends with its reply, or the balancer closed it as idle

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        await reader.readexactly(int(headers.get("content-length", 0)))
        batch = headers.get("idempotency-key")
        self.batches.update([batch] if batch else [])
        status = "503 no" if self._drains and not batch else "200 OK"
        closes = self._drains
        connection = "close" if closes else "keep-alive"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: {connection}\r\n\r\nok".encode())
        await writer.drain()
        return not closes


class Load:
    """Callers, each with clients of its own, who never repeat a batch; what became of them."""

    def __init__(self, url: str, callers: int = 6) -> None:
        self.sent: list[str] = []
        self.outcomes: Counter[int | str] = Counter()
        self._url = url
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(callers)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _call(self, caller: int) -> None:
        pauses = random.Random(caller)
        with httpx.Client(base_url=self._url) as http:
            while not self._ends.wait(pauses.uniform(0, 0.05)):
                batch = f"{caller}-{len(self.sent)}"
                self.sent.append(batch)
                path = f"/clients/{caller}.{pauses.randrange(7)}/predict"
                try:
                    outcome = http.post(path, content=b"batch", headers={"Idempotency-Key": batch}).status_code
                except httpx.TransportError as error:
                    outcome = type(error).__name__
                self.outcomes[outcome] += 1


@pytest.fixture
def backends() -> Iterator[tuple[Backend, Backend]]:
    pair = Backend(), Backend()
    yield pair
    for one in pair:
        one.stop()


def restart(backend: Backend, lead_s: float, wait: Callable[..., None]) -> None:
    """Ends when the balancer sends batches to it again."""
    backend.drain()
    ends = time.monotonic() + lead_s
    wait(lambda: time.monotonic() > ends)
    backend.stop()
    before = backend.batches.total()
    backend.start()
    wait(lambda: backend.batches.total() > before)


@pytest.mark.parametrize("kind", SCALED, ids=["nginx", "envoy"])
def test_a_rolling_restart_loses_no_batch_and_sends_none_twice(kind, request, backends, wait):
    ports = [one.port for one in backends]
    lead_s, changes = SCALED[kind]
    balancer = request.getfixturevalue(kind)(*ports, changes=changes)
    load = Load(balancer.url)
    for one in backends:
        restart(one, lead_s, wait)
    load.stop()
    assert set(load.outcomes) == {200}
    assert backends[0].batches + backends[1].batches == Counter(load.sent)
