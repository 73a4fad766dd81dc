"""A real HTTP server on 127.0.0.1 that records requests and plays scripted failures, and both clients before it."""

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from acclimate_client import AsyncClient, Client

MODEL = {"name": "fashion-cnn", "version": "1"}
KEY_EXPIRES = {"key_expires_at_earliest": "2031-05-06T07:08:09Z"}
JOURNAL = {"base": 3, "journal_entries": 2, "journal_bytes": 1568, "owner": "replica-1"}


@dataclass(frozen=True)
class Recorded:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """Answers with this status and body."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Drop:
    """Cuts the connection after `sent` bytes of the reply."""

    sent: bytes = b""


@dataclass(frozen=True)
class Stall:
    """Answers only after the client has lost patience."""

    seconds: float = 0.15


def problem(code: str, status: int, *, retryable: bool, headers: Mapping[str, str] | None = None, **more: Any) -> Reply:
    body = {"code": code, "status": status, "detail": f"about {code}", "retryable": retryable, "request_id": "r-1"}
    return Reply(status, body | more, {"Content-Type": "application/problem+json", **(headers or {})})


def usual_answer(request: Recorded) -> Reply:
    """What a healthy service says, with members of a later version that this client does not know."""
    client_id = request.path.split("/")[2] if request.path.startswith("/clients/") else ""
    known = {"client_id": client_id, "model": MODEL | {"stage": "prod"}, "adapter": "atp", "later": {"a": 1}}
    known |= KEY_EXPIRES if "Idempotency-Key" in request.headers else {}
    state = {"version": 5, "status": "warm", "committed": True, "replayed": "none", "durability": "always", "later": 1}
    if request.method == "DELETE":
        return Reply(204)
    if request.path.endswith("/predict"):
        return Reply(body=known | predictions(request) | {"state": state, "request_id": "r-1"})
    if request.path.endswith("/reset"):
        return Reply(body=known | {"state": state | {"status": "reset"}})
    if request.path.endswith("/rollback"):
        return Reply(body=known | {"restored": 412, "state": state})
    if request.path.endswith("/enroll"):
        return Reply(body=known | {"enrolled": 2, "state": state})
    if request.path.endswith("/feedback"):
        rows = {"counted": 1, "duplicate": 2, "contradicting": 3, "unknown": 4}
        return Reply(body=known | {"state": state, "request_id": "r-2", "feedback": rows, "guard": guard()})
    if request.path.endswith("/timeline"):
        timeline = {"client_id": client_id, "model": MODEL, "classes": ["Shirt", "Dress"], "training_prior": [0.5, 0.5]}
        return Reply(body=timeline | {"points": [timeline_point()], "later": 1})
    if request.path.endswith("/asks"):
        return Reply(body=known | {"asks": [], "expires_in_s": 60} if client_id else {"clients": [], "next": None})
    if request.path.endswith("/state"):
        exported = Reply(body=b"state", headers={"Content-Type": "application/octet-stream", "ETag": '"v5"'})
        return exported if request.method == "GET" else Reply(body=known | {"state": state})
    if request.method == "PUT":
        wanted = json.loads(request.body)
        return Reply(
            body=known | {"hyperparameters": {}} | wanted | {"changed": True, "state": state | {"status": "reset"}}
        )
    if request.path == "/clients":
        usage = {"clients": 1, "most_clients": 100, "bytes": 812, "most_bytes": None, "later": 1}
        return Reply(body={"model": MODEL, "clients": [listed_client()], "usage": usage, "next": None, "later": 1})
    if request.path == "/states":
        return Reply(body=json.dumps({"exported": 0, "failed": 0, "next": None}).encode())
    if request.path == "/adapters":
        return Reply(body={"model": MODEL, "adapters": [adapter_entry()]})
    if request.path == "/models":
        return Reply(body={"models": [known | catalogue_entry()]})
    if request.path.startswith("/models/"):
        fleet = {"adapter": "atp", "hyperparameters": {"mode": "batch"}, "clients": 12, "candidate": False}
        return Reply(body={"model": MODEL, "policy": "follow-fleet", "adapters": [fleet | {"guard": evidence()}]})
    if request.path.startswith("/v2/health/"):
        return Reply(body={"live": True, "ready": True, "reason": None})
    stored = {"version": 5, "status": "warm", "bytes": 812, "tier": "redis", "durability": "always"}
    return Reply(body=known | {"state": stored | JOURNAL | {"expires_in_s": 2591999.5}, "guard": guard()})


def timeline_point() -> dict[str, Any]:
    counted = {"version": 5, "at": "2031-05-06T07:08:09.125Z", "batches": 2, "images": 40, "events": {"takeover": 1}}
    measured = {"signals": {"entropy": 0.5, "frozen": 0}, "prior": [0.25, 0.75], "modules": {"bn.weight": 0.01}}
    return counted | measured | {"verdict": "harmful", "taken_over_from": "replica-2", "later": 1}


def predictions(request: Recorded) -> dict[str, Any]:
    count = int(request.headers.get("X-Tensor-Shape", "2").split(",")[0])
    first = {
        "predictions": [{"index": 3, "label": "Dress", "probability": 0.75, "later": 0}] * count,
        "signals": {"entropy": 0.31, "prior": [0.25, 0.75], "undefined": None, "later": {"a": 1}},
    }
    posteriors = {"probabilities": [[0.0, 0.1, 0.15, 0.75]] * count}
    return first | (posteriors if request.query["probabilities"] == ["true"] else {})


def evidence() -> dict[str, Any]:
    frozen = {"accuracy": 0.75, "low": 0.5, "high": 1, "later": 1}
    adapted = {"accuracy": 0.6, "low": 0.4, "high": 0.8}
    return {"verdict": "harmful", "labelled": 40, "wins": 3, "losses": 9, "frozen": frozen, "adapted": adapted}


def guard() -> dict[str, Any]:
    return evidence() | {"answering": "frozen", "because": "own_harmful", "later": 1}


def catalogue_entry() -> dict[str, Any]:
    return MODEL | {
        "architecture": "acclimate:shallow_cnn",
        "classes": ["Shirt", "Dress"],
        "input": {"channels": 1, "height": 28, "width": 28},
        "adapters": {"atp": {"available": False, "missing": ["rates"]}, "none": {"available": True, "missing": []}},
        "default": True,
    }


def listed_client() -> dict[str, Any]:
    about = {"client_id": "cam-7", "adapter": "atp", "hyperparameters": {"mode": "batch"}, "adaptation": "paused"}
    state = {"version": 5, "bytes": 812, "changed_at": "2031-05-06T07:08:09Z"}
    return about | state | {"verdict": "harmful", "later": 1}


def adapter_entry() -> dict[str, Any]:
    return {
        "name": "fedthe",
        "description": "Mix the heads.",
        "enrols": True,
        "available": False,
        "missing": ["descriptor"],
        "hyperparameters": {"type": "object", "properties": {"alpha": {"type": "number"}}},
        "later": 1,
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive, as the real service
    disable_nagle_algorithm = True
    server: "ScriptedServer"

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.opened += 1
            self.server.open += 1

    def finish(self) -> None:
        super().finish()
        with self.server.lock:
            self.server.open -= 1

    def answer(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Recorded(self.command, url.path, parse_qs(url.query), self.headers, body)
        step = self.server.record(request)
        if isinstance(step, Drop):
            self.wfile.write(step.sent)
            self.close_connection = True
            return
        if isinstance(step, Stall):
            time.sleep(step.seconds)
            step = Reply(503)
        self.send(step)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - the names http.server looks up

    def send(self, reply: Reply) -> None:
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        content = b"" if reply.body is None else content
        self.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        if reply.status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


class ScriptedServer(ThreadingHTTPServer):
    """Plays the steps given to `play`, one a request, then answers as a healthy service does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        self.requests: list[Recorded] = []
        self.opened = 0  # connections so far
        self.open = 0  # connections now
        self._script: deque[Reply | Drop | Stall] = deque()

    def play(self, *steps: Reply | Drop | Stall) -> None:
        self._script.extend(steps)

    def record(self, request: Recorded) -> Reply | Drop | Stall:
        with self.lock:
            self.requests.append(request)
            return self._script.popleft() if self._script else usual_answer(request)

    def open_after_settling(self, expected: int) -> int:
        """Connections now; threads of cut ones get up to five seconds to notice."""
        deadline = time.monotonic() + 5
        while self.open > expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.open

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up waiting has closed its end; that is what some tests are about."""


class Blocking:
    """An AsyncClient whose methods block, so that one test speaks to both clients."""

    def __init__(self, base_url: str, *, _sleep: Callable[[float], None], **options: Any) -> None:
        async def sleep(seconds: float) -> None:
            _sleep(seconds)

        self._runner = asyncio.Runner()
        self._client = AsyncClient(base_url, _sleep=sleep, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        async def collected(items: AsyncIterator[Any]) -> list[Any]:
            return [item async for item in items]

        def run(*args: Any, **kwargs: Any) -> Any:
            called = method(*args, **kwargs)
            return self._runner.run(collected(called) if isinstance(called, AsyncIterator) else called)

        return run

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as scripted:
        thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield scripted
        scripted.shutdown()
        thread.join()


@pytest.fixture
def free_url() -> str:
    """A URL on which nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


@pytest.fixture
def slept() -> list[float]:
    """Seconds that the client of this test waited between attempts."""
    return []


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, slept: list[float]) -> Iterator[Callable[..., Any]]:
    """Opens either client; it notes its waits instead of waiting, and draws 1.0 for the jitter."""
    opened = []

    def open_client(base_url: str, **options: Any) -> Any:
        client = request.param(base_url, **{"_sleep": slept.append, "_random": lambda: 1.0} | options)
        opened.append(client)
        return client

    yield open_client
    for client in opened:
        client.close()


@pytest.fixture
def client(connect: Callable[..., Any], server: ScriptedServer) -> Any:
    return connect(server.url)


@pytest.fixture
def play() -> Any:
    """The steps a script is made of: `play.reply(...)`, `play.problem(...)`, `play.drop(...)`, `play.stall(...)`."""

    class Steps:
        reply, drop, stall = Reply, Drop, Stall
        problem = staticmethod(problem)

    return Steps
