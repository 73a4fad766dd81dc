"""Redis goes away and comes back."""

import asyncio
import os
import signal
import threading
import time
from contextlib import contextmanager
from unittest.mock import AsyncMock

import numpy as np
import pytest

from acclimate_client import Client
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_service.state.redis.link import ANSWER_S
from acclimate_service.state.writer import Writer


class Outage:
    """A Redis that the test stops and starts, in a thread of its own."""

    def __init__(self, data_dir):
        self._server = EmbeddedRedis(data_dir, appendfsync="always")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.url = self._server.url

    def _run(self, work):
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def start(self):
        self._run(self._server.start())

    def stop(self):
        self._run(self._server.stop())

    @property
    def pid(self):
        return self._server.pid

    def close(self):
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def redis_at(path):
    outage = Outage(path)
    try:
        outage.start()
        yield outage
    finally:
        outage.close()


@pytest.fixture
def redis(tmp_path):
    with redis_at(tmp_path / "redis") as outage:
        yield outage


@pytest.mark.parametrize("warm", [True, False], ids=["state in memory", "state in Redis alone"])
def test_batches_are_refused_while_redis_is_away_and_go_on_after_it(
    redis, make_replica, serial, stream, post, assert_problem, warm
):
    replica = make_replica(redis_url=redis.url, **({} if warm else {"cache_bytes": 0}))
    batches = stream(0, 3)
    with replica.sdk() as sdk:
        answers = [sdk.predict("cam", batches[0], probabilities=True)]
        redis.stop()
        for _ in range(2):
            reply = post(replica, "cam", batches[1][:, 0])
            assert assert_problem(reply, 503, "store_unavailable")["retryable"] is True
            assert reply.headers["retry-after"] == "1"
            assert redis.url.removeprefix("unix://") not in reply.text
        assert_problem(replica.http.get("/clients"), 503, "store_unavailable")
        assert_problem(replica.http.get("/clients/cam"), 503, "store_unavailable")
        assert_problem(replica.http.post("/clients/cam/reset"), 503, "store_unavailable")
        assert_problem(replica.http.delete("/clients/cam"), 503, "store_unavailable")
        assert replica.http.get("/v2/health/live").status_code == 200
        unready = until_unready(replica)
        assert (unready.status_code, unready.json()["ready"], unready.json()["live"]) == (503, False, True)
        assert unready.json()["reason"]
        redis.start()
        assert replica.http.get("/v2/health/ready").status_code == 200
        answers += [sdk.predict("cam", images, probabilities=True) for images in batches[1:]]
        assert sdk.get("cam").state.version == 3
    for answer, expected in zip(answers, serial.probabilities("atp", batches), strict=True):
        assert np.allclose(answer.probabilities, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("warm", [True, False], ids=["state in memory", "state in Redis alone"])
def test_by_the_policy_frozen_the_global_model_answers_meanwhile_and_no_state_is_lost(
    redis, make_replica, serial, stream, warm
):
    replica = make_replica(redis_url=redis.url, store_outage="frozen", **({} if warm else {"cache_bytes": 0}))
    batches = stream(0, 3)
    with replica.sdk() as sdk:
        answers = [sdk.predict("cam", batches[0], probabilities=True).probabilities]
        redis.stop()
        frozen = sdk.predict("cam", batches[1], probabilities=True)
        assert (frozen.state.status, frozen.state.version, frozen.adapter) == ("frozen", 0, "none")
        assert frozen.state.committed is False
        looked = sdk.predict("cam", batches[1], adapt=False)
        assert (looked.state.status, looked.state.committed) == ("frozen", False)
        assert np.allclose(frozen.probabilities, *serial.probabilities("none", batches[1:2]), rtol=0, atol=1e-5)
        until_unready(replica)
        redis.start()
        answers += [sdk.predict("cam", images, probabilities=True).probabilities for images in batches[1:]]
        assert sdk.get("cam").state.version == 3
    for answer, expected in zip(answers, serial.probabilities("atp", batches), strict=True):
        assert np.allclose(answer, expected, rtol=0, atol=1e-5)


def test_the_sdk_outlasts_an_outage_without_applying_twice(redis, make_replica, pool, stream):
    replica = make_replica(redis_url=redis.url)
    one, two = stream(0, 2)
    with Client(replica.url, max_retries=50, _sleep=lambda _: time.sleep(0.05)) as sdk:
        sdk.predict("cam", one)
        redis.stop()
        call = pool.submit(sdk.predict, "cam", two)
        time.sleep(0.2)
        assert not call.done()
        redis.start()
        assert call.result().state.version == 2
        assert sdk.get("cam").state.version == 2


def test_an_outage_in_the_middle_of_a_step_is_not_called_committed(redis, make_replica, gate, pool, post, shade):
    gate.shut = False
    replica = make_replica(redis_url=redis.url, adapter="gated")
    gate.shut = True
    images = shade(7)
    call = pool.submit(post, replica, "cam", images, Idempotency_Key="k")
    gate.wait_for_a_step()
    redis.stop()
    gate.open()
    reply = call.result()
    assert (reply.status_code, reply.json()["code"]) == (503, "store_unavailable")
    assert reply.json()["state_committed"] in (False, "unknown")
    redis.start()
    again = post(replica, "cam", images, Idempotency_Key="k").json()
    assert again["state"]["version"] == 1


@pytest.fixture(params=["by journal", "whole", "in chunks"])
def way(request):
    """How the states are written: large ones by their batches, small ones whole, large ones in chunks."""
    return {"by journal": {}, "whole": {"adapter": "fedcal"}, "in chunks": {"journal": False}}[request.param]


def test_a_full_redis_refuses_writers_serves_readers_and_recovers_by_itself(
    redis, make_replica, stream, assert_problem, post, way
):
    replica = make_replica(redis_url=redis.url, **way)
    images = [batch[:, 0] for batch in stream(0, 4)]
    answers = [post(replica, "cam", batch).json() for batch in images[:2]]
    exported = replica.http.get("/clients/cam/state").content
    settled_answers(replica, "cam", 2)
    before = replica.keys("cam")
    replica.redis.config_set("maxmemory", "1")
    for _ in range(2):
        reply = post(replica, "cam", images[2], Idempotency_Key="k")
        assert assert_problem(reply, 507, "store_full")["retryable"] is True
        assert reply.headers["retry-after"] == "5"
    assert_problem(post(replica, "new", images[2]), 507, "store_full")
    assert_problem(replica.http.put("/clients/new", json={"adapter": "none"}), 507, "store_full")
    assert replica.keys("cam") == before, "something was half written"
    assert replica.keys("new") == {}
    look = post(replica, "cam", images[2], "?adapt=false")
    assert (look.status_code, look.json()["state"]["version"]) == (200, 2)
    assert replica.http.get("/clients/cam").json()["state"]["version"] == 2
    assert replica.http.get("/clients/cam/state").content == exported
    until(lambda: "Redis is full" in (ready(replica) or ""))
    replica.redis.config_set("maxmemory", "0")
    assert ready(replica) is None
    third = post(replica, "cam", images[2], Idempotency_Key="k").json()
    assert (third["state"]["version"], third["state"]["replayed"]) == (3, "none")
    assert third["predictions"] == look.json()["predictions"]
    assert [answer["state"]["version"] for answer in answers] == [1, 2]
    assert post(replica, "new", images[3]).json()["state"]["version"] == 1


def settled_answers(replica, client, number):
    """Wait until the answers of a journal are stored, which happens just after the replies."""
    deadline = time.monotonic() + 5
    while replica.redis.hlen(f"acc:{{default/{client}}}:a") < number:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_full_redis_still_resets_and_deletes(redis, make_replica, stream, post, way):
    replica = make_replica(redis_url=redis.url, **way)
    images = stream(0, 1)[0][:, 0]
    for client in ("cam", "other"):
        assert post(replica, client, images).status_code == 200
    replica.redis.config_set("maxmemory", "1")
    assert replica.http.post("/clients/cam/reset").json()["state"]["version"] == 2
    assert replica.http.delete("/clients/other").status_code == 204
    replica.redis.config_set("maxmemory", "0")
    assert post(replica, "cam", images).json()["state"]["version"] == 3
    assert post(replica, "other", images).json()["state"]["version"] == 1


def test_a_value_of_another_type_under_a_clients_key_is_said_and_deleted(redis, make_replica, post, stream):
    replica, images = make_replica(redis_url=redis.url, cache_bytes=0), stream(0, 1)[0][:, 0]
    assert post(replica, "cam", images).status_code == 200
    for key in ("acc:{default/cam}:r", "acc:{default/new}:i"):
        replica.redis.delete(key)
        replica.redis.set(key, "of somebody else")
    for client in ("cam", "new"):
        refused = post(replica, client, images)
        assert (refused.status_code, refused.json()["code"]) == (503, "state_corrupt")
        assert "another type" in refused.json()["detail"]
        assert replica.http.delete(f"/clients/{client}").status_code == 204
        assert post(replica, client, images).json()["state"]["version"] == 1


def until_unready(replica):
    """What readiness says, once what was found a moment ago is no news any more."""
    deadline = time.monotonic() + 5  # many times that moment, on a busy machine
    while (reply := replica.http.get("/v2/health/ready")).status_code == 200:
        assert time.monotonic() < deadline
    assert reply.status_code == 503
    return reply


def ready(replica):
    reply = replica.http.get("/v2/health/ready")
    assert reply.status_code == (200 if reply.json()["ready"] else 503)
    return reply.json()["reason"]


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_redis_that_answers_and_takes_no_changes_is_an_obstacle(redis, make_replica):
    replica = make_replica(redis_url=redis.url)
    until(lambda: ready(replica) is None)
    replica.redis.config_set("maxmemory", "1")
    until(lambda: "Redis is full" in (ready(replica) or ""))
    replica.redis.config_set("maxmemory", "0")
    until(lambda: ready(replica) is None)
    replica.redis.replicaof("127.0.0.1", "1")
    until(lambda: "read only replica" in (ready(replica) or ""))
    replica.redis.replicaof("NO", "ONE")
    until(lambda: ready(replica) is None)


def test_replies_say_the_durability_of_the_redis_that_is_there_now(redis, make_replica, stream):
    replica, (images,) = make_replica(redis_url=redis.url), stream(0, 1)
    with replica.sdk() as sdk:
        assert sdk.predict("cam", images).state.durability == "always"
        replica.redis.config_set("appendfsync", "everysec")
        replica.redis.client_kill_filter(_type="pubsub")
        until(lambda: sdk.predict("cam", images).state.durability == "everysec")
        assert sdk.get("cam").state.durability == "everysec"


def test_a_subscription_that_stays_lost_is_counted_and_shown_until_it_is_back(redis, make_replica, stream, caplog):
    replica, (images,) = make_replica(redis_url=redis.url), stream(0, 1)

    def failing():
        reply = replica.http.get("/v2/health/ready")
        assert reply.status_code == 200, "batches are answered"
        return {each["task"]: each for each in reply.json()["failing"]}

    until(lambda: not failing())
    replica.redis.execute_command("ACL SETUSER", "default", "-subscribe")
    replica.redis.client_kill_filter(_type="pubsub")
    until(lambda: failing().get("announcements", {}).get("seconds", 0) > 1)
    assert failing()["announcements"]["error"] == "NoPermissionError"
    assert replica.metric('acclimate_background_failures_total{task="announcements"}') > 1
    assert replica.metric('acclimate_background_failing{task="announcements"}') == 1
    assert "announcements failed in the background" in caplog.text
    assert "NoPermissionError" in caplog.text
    with replica.sdk() as sdk:
        assert sdk.predict("cam", images).state.version == 1
    replica.redis.execute_command("ACL SETUSER", "default", "+subscribe")
    until(lambda: not failing())
    assert replica.metric('acclimate_background_failing{task="announcements"}') == 0


def test_a_redis_that_hangs_does_not_hold_up_the_probes(redis, make_replica):
    replica = make_replica(redis_url=redis.url)
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert replica.http.get("/v2/health/live").status_code == 200
        assert time.monotonic() - began < 0.5
        assert "does not answer" in until_unready(replica).json()["reason"]
        assert time.monotonic() - began < 3
    finally:
        os.kill(redis.pid, signal.SIGCONT)


def test_a_redis_that_hangs_is_503_within_the_deadline(redis, make_replica, post, stream, pool, monkeypatch):
    replica, (one, two) = make_replica(redis_url=redis.url), [batch[:, 0] for batch in stream(0, 2)]
    assert post(replica, "warm", one).status_code == 200
    monkeypatch.setattr(Writer, "_hold_place", AsyncMock())  # fails first else, before anything is sent
    soon = {"X-Request-Timeout-Ms": "1500"}
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        calls = [
            pool.submit(post, replica, "warm", two, **soon),
            pool.submit(post, replica, "cold", two, **soon),
            pool.submit(replica.http.post, "/clients/warm-2/reset", headers=soon),
            pool.submit(replica.http.delete, "/clients/other", headers=soon),
        ]
        replies = [call.result() for call in calls]
        assert time.monotonic() - began < 4
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    assert [(reply.status_code, reply.json()["code"]) for reply in replies] == [(503, "store_unavailable")] * 4
    assert [reply.json()["state_committed"] for reply in replies[:2]] == ["unknown", False]
    assert post(replica, "cold", two).json()["state"]["version"] == 1
    assert post(replica, "warm", two).json()["state"]["version"] in (2, 3)


@pytest.mark.parametrize("warm", [True, False], ids=["state in memory", "state in Redis alone"])
def test_a_redis_that_hangs_is_503_on_every_route_within_one_bound(redis, make_replica, post, stream, pool, warm):
    replica = make_replica(redis_url=redis.url, adapter="fedthe", **({} if warm else {"cache_bytes": 0}))
    (images,), http = [batch[:, 0] for batch in stream(0, 1)], replica.http
    names = ["look", "predict", "reset", "delete", "configure", "export", "import", "told", "enrol", "examples"]
    replies = {name: post(replica, name, images).json() for name in names}
    state = http.get("/clients/import/state").content
    told = {"rows": [{"request_id": replies["told"]["request_id"], "row": 0, "label": 0}]}
    examples = {"images": images[:, None].tolist(), "labels": [0] * len(images)}
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        calls = [
            pool.submit(timed, *call)
            for call in [
                (post, replica, "look", images, "?adapt=false"),
                (post, replica, "predict", images),
                (post, replica, "new", images),
                (http.get, "/clients/look"),
                (http.post, "/clients/reset/reset"),
                (http.delete, "/clients/delete"),
                (put, http, "/clients/configure", {"adapter": "none"}),
                (http.get, "/clients/export/state"),
                (put_state, http, "/clients/import/state", state),
                (post_json, http, "/clients/told/feedback", told),
                (post_json, http, "/clients/enrol/enroll", examples),
                (post_json, http, "/clients/examples/feedback", examples),
                (http.get, "/models/fashion-cnn/adapters"),
            ]
        ]
        found = [call.result() for call in calls]
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    for reply, seconds in found:
        assert (reply.status_code, reply.json()["code"]) == (503, "store_unavailable"), (reply.url, reply.text)
        assert reply.headers["retry-after"] == "1"
        assert seconds < ANSWER_S + 2, reply.url
    assert post(replica, "look", images).json()["state"]["version"] == 2


def timed(call, *arguments):
    began = time.monotonic()
    return call(*arguments), time.monotonic() - began


def put(http, path, body):
    return http.put(path, json=body)


def post_json(http, path, body):
    return http.post(path, json=body)


def put_state(http, path, state):
    return http.put(path, content=state, headers={"Content-Type": "application/octet-stream"})


def test_a_private_redis_that_dies_is_started_again_and_callers_wait_for_it(redis, make_replica, stream):
    replica = make_replica(redis_url=redis.url)
    one, two = stream(0, 2)
    with Client(replica.url, max_retries=200, _sleep=lambda _: time.sleep(0.05)) as sdk:
        sdk.predict("cam", one)
        os.kill(redis.pid, signal.SIGKILL)
        assert sdk.predict("cam", two).state.version == 2
