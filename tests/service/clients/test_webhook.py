"""The operator's own service is told of clients that turn harmful; it is a real one, which may fail."""

import asyncio
import hmac
import json
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from acclimate_client import LabelledRow
from acclimate_service.clients import webhook
from acclimate_service.clients.webhook import TRIES, Webhook
from acclimate_service.metrics import Metrics
from acclimate_service.state import ClientScope

MODEL = {"name": "fashion-cnn", "version": "1"}


class Receiver(ThreadingHTTPServer):
    """Takes notices; the first so many are answered with 503."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.came = threading.Condition()
        self.failing = 0
        self.notices: list[tuple[dict[str, Any], str | None, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"

    def await_notices(self, number: int) -> list[dict[str, Any]]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.notices) >= number, timeout=20), self.notices
            return [notice for notice, _, _ in self.notices]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.came:
            self.server.notices.append((json.loads(body), self.headers.get("X-Acclimate-Signature"), body))
            status = 503 if len(self.server.notices) <= self.server.failing else 204
            self.server.came.notify_all()
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_client_that_turns_harmful_is_told_once_and_signed(
    make_replica, receiver, serial, stream, monkeypatch, contrary
):
    replica = make_replica(adapter="contrary", webhook_url=receiver.url, secret="shared")
    batches = stream(0, 4)
    with replica.sdk() as sdk:
        sdk.predict("other", batches[0])
        prediction = sdk.predict("cam", batches[0])
        truth = serial.probabilities("none", batches[:1])[0].argmax(axis=1).tolist()
        sdk.feedback("cam", [LabelledRow(prediction.request_id, row, label) for row, label in enumerate(truth)])
        assert receiver.notices == [], "nobody is answered otherwise yet"
        for images in batches[1:]:
            assert sdk.predict("cam", images).guard.because == "own_harmful"
    (notice,) = receiver.await_notices(1)
    at, identity = notice.pop("at"), notice.pop("id")
    assert notice == {"event": "client_harmful", "tenant": None, "client_id": "cam", "model": MODEL}
    assert (at.endswith("Z"), len(identity)) == (True, 32)
    ((_, signature, body),) = receiver.notices
    assert signature == "sha256=" + hmac.new(b"shared", body, sha256).hexdigest()
    assert replica.metric('acclimate_background_failing{task="webhook"}') == 0


async def test_what_is_not_taken_is_sent_again_and_then_given_up(receiver):
    metrics = Metrics()
    hook = Webhook(receiver.url, "", metrics.background, pause_s=0.01)
    receiver.failing = TRIES + 2
    for name in ("a", "b"):
        hook.harmful(MODEL, ClientScope(f"acme/{name}"))
    await hook._sending
    sent = [(notice["tenant"], notice["client_id"], notice["id"]) for notice, _, _ in receiver.notices]
    assert [name for _, name, _ in sent] == ["a"] * TRIES + ["b"] * 3
    assert len({identity for _, _, identity in sent}) == 2, "a notice that is sent again has the same id"
    assert {tenant for tenant, _, _ in sent} == {"acme"}
    assert {signature for _, signature, _ in receiver.notices} == {None}
    failures = metrics.registry.get_sample_value("acclimate_background_failures_total", {"task": "webhook"})
    assert (failures, dict(metrics.background.failing)) == (1, {}), "the last one was taken"


async def test_a_receiver_that_is_away_shows_as_failing_work():
    metrics = Metrics()
    hook = Webhook("http://127.0.0.1:9/", "", metrics.background, pause_s=0.001)
    hook.harmful(MODEL, ClientScope("cam"))
    with pytest.raises(OSError, match="refused"):
        await hook._sending
    assert "webhook" in metrics.background.failing


async def test_no_more_notices_wait_than_there_is_room_for(receiver, monkeypatch):
    monkeypatch.setattr(webhook, "MOST_WAITING", 2)
    metrics = Metrics()
    hook = Webhook(receiver.url, "", metrics.background)
    for name in ("a", "b", "c"):
        hook.harmful(MODEL, ClientScope(name))
    assert isinstance(metrics.background.failing["webhook"].error, OverflowError)
    await hook._sending
    assert [notice["client_id"] for notice, _, _ in receiver.notices] == ["b", "c"]


async def test_what_waits_is_given_up_at_the_end(receiver):
    receiver.failing = 100
    hook = Webhook(receiver.url, "", Metrics().background, pause_s=60)
    hook.harmful(MODEL, ClientScope("cam"))
    began = time.monotonic()
    await asyncio.to_thread(receiver.await_notices, 1)
    await hook.aclose()
    assert time.monotonic() - began < 10
