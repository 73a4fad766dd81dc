"""Order, limits, deadlines and repeats, with a step that the test holds up."""

import socket
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest


def shade(value):
    """A batch of one image that tells itself apart."""
    image = (np.arange(28 * 28) % 251).astype(np.uint8).reshape(1, 28, 28)  # none of one colour: those are skipped
    image[0, 0, 0] = value
    return image


@contextmanager
def caller_of(replica, images, key=""):
    """A raw connection that has sent a batch; it hangs up at the end of the block."""
    address = urlsplit(replica.url)
    with socket.create_connection((address.hostname, address.port)) as caller:
        body = images.tobytes()
        lines = (
            "POST /clients/cam/predict HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/octet-stream",
            "X-Tensor-Shape: 1,28,28",
            f"Content-Length: {len(body)}",
            *((f"Idempotency-Key: {key}",) if key else ()),
        )
        caller.sendall("\r\n".join((*lines, "", "")).encode() + body)
        yield


@pytest.fixture
def gated(make_replica, gate):
    gate.shut = False
    replica = make_replica(adapter="gated", max_waiting=4)
    gate.shut = True
    return replica


def test_batches_of_one_client_are_answered_one_at_a_time_in_their_order(gated, gate, pool, post):
    replies = []
    for number in range(4):
        replies.append(pool.submit(post, gated, "cam", shade(50 * number)))
        gated.await_waiting(number + 1)
        time.sleep(0.02)  # from the reading of the body to the queue
    gate.wait_for_a_step()
    gate.open()
    answers = [reply.result().json() for reply in replies]
    assert [answer["state"]["version"] for answer in answers] == [1, 2, 3, 4]
    seen = answers[-1]["signals"]["seen"]
    assert seen == sorted(seen)
    assert [answer["signals"]["seen"] for answer in answers] == [seen[:1], seen[:2], seen[:3], seen]


def test_more_batches_than_may_wait_are_refused_and_the_rest_is_served(gated, gate, pool, post, assert_problem):
    replies = [pool.submit(post, gated, f"cam-{number}", shade(1)) for number in range(4)]
    gated.await_waiting(4)
    reply = post(gated, "one-more", shade(1))
    assert assert_problem(reply, 429, "too_many_requests")["retryable"] is True
    assert reply.headers["retry-after"] == "1"
    gate.open()
    assert [reply.result().status_code for reply in replies] == [200] * 4
    assert post(gated, "one-more", shade(1)).status_code == 200


@pytest.mark.parametrize("second", ["cam", "another-cam"], ids=["behind its own client", "behind another client"])
def test_a_batch_whose_deadline_passes_in_the_queue_is_answered_then_and_not_applied(
    gated, gate, pool, post, assert_problem, second
):
    first = pool.submit(post, gated, "cam", shade(1))
    gate.wait_for_a_step()
    began = time.monotonic()
    late = post(gated, second, shade(9), X_Request_Timeout_Ms="80")
    assert time.monotonic() - began < 2, "it was only answered when its turn came"
    assert assert_problem(late, 504, "deadline_exceeded")["retryable"] is True
    gate.open()
    assert first.result().json()["state"]["version"] == 1
    assert post(gated, "cam", shade(2)).json()["signals"]["seen"][1:] == pytest.approx(seen_of(gated, post, 2))


def seen_of(replica, post, value):
    return post(replica, f"fresh-{value}", shade(value)).json()["signals"]["seen"]


def test_a_batch_whose_caller_hung_up_in_the_queue_is_dropped(gated, gate, pool, post):
    first = pool.submit(post, gated, "cam", shade(1))
    gate.wait_for_a_step()
    with caller_of(gated, shade(200)):
        gated.await_waiting(2)
        time.sleep(0.05)  # from the reading of the body to the queue
    time.sleep(0.05)
    gate.open()
    assert first.result().json()["state"]["version"] == 1
    gated.await_waiting(0)
    assert gated.http.get("/clients/cam").json()["state"]["version"] == 1
    assert post(gated, "cam", shade(3)).json()["state"]["version"] == 2


def test_a_caller_who_hangs_up_during_the_step_loses_the_answer_but_not_the_batch(gated, gate, post):
    with caller_of(gated, shade(1), key="k"):
        gate.wait_for_a_step()
    gate.open()
    gated.await_waiting(0)
    reply = post(gated, "cam", shade(1), Idempotency_Key="k").json()
    assert (reply["state"]["version"], reply["state"]["replayed"]) == (1, "stored")


def test_a_key_at_work_is_409_for_the_same_body_and_422_for_another(gated, gate, pool, post, assert_problem):
    first = pool.submit(post, gated, "cam", shade(1), Idempotency_Key="k")
    gate.wait_for_a_step()
    same = post(gated, "cam", shade(1), Idempotency_Key="k")
    assert assert_problem(same, 409, "request_running", "unknown")["retryable"] is True
    assert same.headers["retry-after"] == "1"
    assert_problem(post(gated, "cam", shade(2), Idempotency_Key="k"), 422, "key_reused")
    gate.open()
    expected = {"version": 1, "committed": True, "durability": "everysec"}
    assert first.result().json()["state"] == {**expected, "status": "cold", "replayed": "none"}
    again = post(gated, "cam", shade(1), Idempotency_Key="k").json()
    assert again["state"] == {**expected, "status": "warm", "replayed": "stored"}
    assert again["predictions"] == first.result().json()["predictions"]


def test_a_key_is_no_hindrance_for_a_batch_that_changes_nothing(gated, gate, pool, post):
    first = pool.submit(post, gated, "cam", shade(1), Idempotency_Key="k")
    gate.wait_for_a_step()
    look = pool.submit(post, gated, "cam", shade(1), "?adapt=false", Idempotency_Key="k")
    gated.await_waiting(2)
    gate.open()
    assert first.result().status_code == look.result().status_code == 200
    assert look.result().json()["state"]["committed"] is False


def test_the_service_lives_and_is_measured_while_a_step_takes_long(gated, gate, pool, post):
    first = pool.submit(post, gated, "cam", shade(1))
    gate.wait_for_a_step()
    assert gated.http.get("/v2/health/live").status_code == 200
    assert gated.http.get("/v2/health/ready").json() == {"ready": True, "live": True, "reason": None, "failing": []}
    assert gated.metric("acclimate_waiting") == 1
    gate.open()
    assert first.result().status_code == 200


def test_a_client_that_is_deleted_while_its_batch_computes_does_not_come_back(gated, make_replica, gate, pool, post):
    """By way of another replica: within one, the delete waits for its turn."""
    gate.shut = False
    other = make_replica(adapter="gated", redis_url=gated.service.settings.redis_url)
    assert post(gated, "cam", shade(1)).status_code == 200
    gate.shut = True
    batch = pool.submit(post, gated, "cam", shade(2))
    gate.wait_for_a_step()
    assert other.http.delete("/clients/cam").status_code == 204
    gate.open()
    # Its life was known from memory alone, so the batch is taken as one that came after the delete.
    answer = batch.result().json()
    assert (answer["state"]["version"], answer["state"]["status"]) == (1, "cold")
    assert len(answer["signals"]["seen"]) == 1


def test_a_client_deleted_since_redis_was_asked_is_409(gated, make_replica, gate, pool, post, assert_problem):
    gate.shut = False
    other = make_replica(adapter="gated", redis_url=gated.service.settings.redis_url, cache_bytes=0)
    assert post(gated, "cam", shade(1)).status_code == 200
    gate.shut = True
    batch = pool.submit(post, other, "cam", shade(2))
    gate.wait_for_a_step()
    assert gated.http.delete("/clients/cam").status_code == 204
    gate.open()
    assert assert_problem(batch.result(), 409, "client_deleted")["retryable"] is False
    assert gated.http.get("/clients/cam").status_code == 404
