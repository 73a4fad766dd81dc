"""The deployed nginx configuration in front of servers that fail, or answer bit by bit."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest


class Server(ThreadingHTTPServer):
    """Answers, or reads every request and then hangs up. The second half of a reply waits until the first arrived."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[str] = []
        self.hangs_up = False
        self.first_half_arrived = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(self.command)
        self.close_connection = True
        if self.server.hangs_up:
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"first")
        if self.server.first_half_arrived.wait(5):
            self.wfile.write(b"second")

    do_GET = do_POST = answer  # noqa: N815 - the names http.server looks up

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    pair = Server(), Server()
    threads = [threading.Thread(target=one.serve_forever, args=(0.01,)) for one in pair]
    for thread in threads:
        thread.start()
    yield pair
    for one, thread in zip(pair, threads, strict=True):
        one.shutdown()
        one.server_close()
        thread.join()


@pytest.fixture
def balancer(servers, balance):
    return balance(*(one.server_port for one in servers))


@pytest.fixture
def failing(servers):
    for one in servers:
        one.hangs_up = True
    return servers


def test_a_batch_that_was_sent_is_never_sent_to_another_replica(balancer, failing):
    reply = httpx.post(f"{balancer.url}/clients/phone/predict", content=b"batch")
    assert reply.status_code == 502
    assert failing[0].seen + failing[1].seen == ["POST"]


def test_a_read_is_sent_to_the_other_replica_when_the_first_hangs_up(balancer, failing):
    httpx.get(f"{balancer.url}/clients/phone")
    assert failing[0].seen == failing[1].seen == ["GET"]


@pytest.mark.usefixtures("failing")
def test_what_no_replica_answers_is_a_problem_that_says_what_is_known(balancer):
    reply = httpx.post(f"{balancer.url}/clients/phone/predict", content=b"batch", headers={"X-Request-Id": "trace-1"})
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.headers["Retry-After"] == "1"
    problem = reply.json()
    assert (problem["status"], problem["retryable"], problem["state_committed"]) == (502, True, "unknown")
    assert problem["request_id"] == reply.headers["X-Request-Id"] == "trace-1"


def test_every_batch_goes_to_the_other_replica_when_one_does_not_listen(balancer, servers):
    deaf, listening = servers
    deaf.shutdown()
    deaf.server_close()
    listening.first_half_arrived.set()
    replies = [httpx.post(f"{balancer.url}/clients/phone-{number}/predict", content=b"batch") for number in range(8)]
    assert {reply.text for reply in replies} == {"firstsecond"}
    assert listening.seen == ["POST"] * 8


def test_a_reply_goes_out_as_it_comes(balancer, servers):
    with httpx.stream("GET", f"{balancer.url}/clients/phone") as reply:
        parts = reply.iter_raw()
        assert next(parts) == b"first"
        for one in servers:
            one.first_half_arrived.set()
        assert b"".join(parts) == b"second"
