"""A replica that is told to end: it says so, answers on, hands its clients over, and is gone in time."""

import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from acclimate_client import Client

IMAGE = {"Content-Type": "application/octet-stream", "X-Tensor-Shape": "1,28,28"}


def predict(http, client):
    content = random.randbytes(28 * 28)  # a flat picture takes no step
    return http.post(f"/clients/{client}/predict", content=content, headers=IMAGE)


def await_unready(http):
    deadline = time.monotonic() + 60
    while (reply := http.get("/v2/health/ready")).status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return reply


def test_sigterm_is_followed_by_a_time_in_which_batches_are_answered_and_balancers_are_told(serve):
    service = serve(drain_lead_s=3.0)
    with httpx.Client(base_url=service.url, timeout=10) as http:
        assert "connection" not in predict(http, "cam").headers
        service.signal(signal.SIGTERM)
        began = time.monotonic()
        unready = await_unready(http)
        assert "about to end" in unready.json()["reason"]
        assert http.get("/v2/health/live").status_code == 200
        reply = predict(http, "cam")
        assert (reply.status_code, reply.json()["state"]["version"]) == (200, 2)
        assert reply.headers["connection"] == "close"
        assert service.wait() == 0
        assert time.monotonic() - began >= 2.9
    assert service.log.read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_wait(serve, second):
    service = serve(drain_lead_s=60)
    service.signal(signal.SIGTERM)
    with httpx.Client(base_url=service.url) as http:
        await_unready(http)
    service.signal(second)
    assert service.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "base"), [(20, 3), (0, 0)], ids=["in time", "without any time"])
def test_at_the_end_journals_become_snapshots_as_far_as_the_budget_goes(serve, stream, budget, base):
    batches = stream(0, 4)
    service = serve(drain_budget_s=budget)
    with Client(service.url) as client:
        for images in batches[:3]:
            client.predict("cam", images)
        assert client.get("cam").state.base == 0
    service.signal(signal.SIGTERM)
    assert service.wait() == 0
    with Client(serve().url) as client:
        state = client.get("cam").state
        assert (state.version, state.base, state.journal_entries) == (3, base, 3 - base)
        assert client.predict("cam", batches[3]).state.version == 4


STUCK = """
import sys, time
from dataclasses import dataclass
from typing import ClassVar
from acclimate_adapters import ADAPTERS, State, Step
from acclimate_service.cli import main

@dataclass(frozen=True, slots=True)
class Stuck:
    name: ClassVar[str] = "stuck"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, model):
        return State(self.name, self.layout, model.content_hash)

    def form(self, model, state):
        return {}

    def step(self, model, state, x):
        print("at work", file=sys.stderr, flush=True)
        time.sleep(3600)

ADAPTERS["stuck"] = Stuck
main(["serve"])
"""


def test_a_step_that_never_comes_back_does_not_hold_the_process(serve):
    service = serve(command=(sys.executable, "-c", STUCK), adapter="none", request_timeout_ms=1000, drain_budget_s=1)
    with httpx.Client(base_url=service.url, timeout=30) as http, ThreadPoolExecutor(1) as pool:
        assert predict(http, "cam").status_code == 200
        assert http.put("/clients/stuck", json={"adapter": "stuck"}).status_code == 200
        held = pool.submit(predict, http, "stuck")
        deadline = time.monotonic() + 30
        while "at work" not in service.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        service.signal(signal.SIGTERM)
        assert service.wait() == os.EX_SOFTWARE
        assert isinstance(held.exception(), httpx.HTTPError) or held.result().status_code >= 500
    assert "is still at one piece of work" in service.log.read_text()
    with Client(serve().url) as client:
        assert client.get("cam").state.version == 1


def test_a_replica_alone_with_its_redis_ends_at_once(serve):
    service = serve()
    with httpx.Client(base_url=service.url) as http:
        assert predict(http, "cam").status_code == 200
    began = time.monotonic()
    service.signal(signal.SIGTERM)
    assert service.wait() == 0
    assert time.monotonic() - began < 4
