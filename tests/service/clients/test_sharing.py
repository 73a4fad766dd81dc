"""What waits for the thread that runs torch is answered together; nobody's answer, deadline or turn depends on it."""

import time

import numpy as np
import pytest

from acclimate_service.compute.worker import MOST_ROWS

CLIENTS = 8


@pytest.fixture
def busy(make_replica, gate, pool, post, shade):
    """A service whose thread is held up by a step of the client `gatekeeper`; `gate.open()` lets it go."""

    def make(**settings):
        gate.shut = False
        replica = make_replica(**settings)
        with replica.sdk() as sdk:
            sdk.configure("gatekeeper", "gated")
        gate.shut = True
        held = pool.submit(post, replica, "gatekeeper", shade(0))
        gate.wait_for_a_step()
        return replica, held

    return make


def queue_up(replica, pool, post, number, batches, **headers):
    """Send a batch of each client, and wait until all are in the queue."""
    replies = [pool.submit(post, replica, f"cam-{i}", images, "?probabilities=true") for i, images in batches]
    replica.await_waiting(number)
    time.sleep(0.1)  # from the reading of the body to the queue
    return replies


def shared(replica):
    """Batches answered so far, and steps that took them."""
    return replica.metric("acclimate_step_batches_sum"), replica.metric("acclimate_step_batches_count")


@pytest.mark.parametrize("adapter", ["fedcal", "balanced"])
def test_eight_clients_that_wait_are_answered_in_one_pass_each_as_alone(
    adapter, busy, gate, pool, post, serial, stream
):
    replica, held = busy(adapter=adapter)
    batches = [(i, stream(i, 1)[0]) for i in range(CLIENTS)]
    before = shared(replica)
    replies = queue_up(replica, pool, post, 1 + CLIENTS, batches)
    gate.open()
    answers = [reply.result().json() for reply in replies]
    assert held.result().status_code == 200
    assert [answer["state"]["version"] for answer in answers] == [1] * CLIENTS
    for (_, images), answer in zip(batches, answers, strict=True):
        expected = serial.probabilities(adapter, [images])[0]
        np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-5)
    assert np.subtract(shared(replica), before).tolist() == [1 + CLIENTS, 2]
    assert replica.metric("acclimate_step_rows_sum") >= 80


def test_clients_that_stream_at_the_same_time_are_each_answered_as_alone(make_replica, pool, post, serial, stream):
    replica = make_replica(adapter="fedcal")

    def follow(i):
        batches = stream(i, 12)
        return [post(replica, f"cam-{i}", images, "?probabilities=true").json() for images in batches]

    streams = [pool.submit(follow, i) for i in range(CLIENTS)]
    for i, answers in enumerate(each.result() for each in streams):
        expected = serial.probabilities("fedcal", stream(i, 12))
        assert [answer["state"]["version"] for answer in answers] == list(range(1, 13))
        np.testing.assert_allclose([answer["probabilities"] for answer in answers], expected, atol=1e-5)
    batches, steps = shared(replica)
    assert steps < batches, "no two batches were answered together"


def test_a_batch_whose_deadline_passes_in_the_queue_leaves_the_others_to_themselves(
    busy, gate, pool, post, serial, stream, assert_problem
):
    replica, _ = busy(adapter="fedcal")
    batches = [(i, stream(i, 1)[0]) for i in range(3)]
    replies = queue_up(replica, pool, post, 4, batches)
    late = post(replica, "late", stream(4, 1)[0], X_Request_Timeout_Ms="80")
    assert_problem(late, 504, "deadline_exceeded")
    before = shared(replica)
    gate.open()
    for (_, images), reply in zip(batches, replies, strict=True):
        expected = serial.probabilities("fedcal", [images])[0]
        np.testing.assert_allclose(reply.result().json()["probabilities"], expected, atol=1e-5)
    assert np.subtract(shared(replica), before).tolist() == [4, 2], "the late batch was computed"
    assert replica.http.get("/clients/late").status_code == 404


def test_more_rows_than_may_come_together_are_answered_in_turns(busy, gate, pool, post, stream):
    replica, _ = busy(adapter="fedcal")
    before = shared(replica)
    batches = [(i, stream(i, 1, size=MOST_ROWS // 2)[0]) for i in range(3)]
    replies = queue_up(replica, pool, post, 4, batches)
    gate.open()
    assert [reply.result().status_code for reply in replies] == [200] * 3
    assert np.subtract(shared(replica), before).tolist() == [4, 3]


def test_states_that_a_journal_may_have_to_compute_again_are_computed_alone(busy, gate, pool, post, stream):
    replica, _ = busy(adapter="t3a", inline_max=1024)
    before = shared(replica)
    replies = queue_up(replica, pool, post, 4, [(i, stream(i, 1)[0]) for i in range(3)])
    gate.open()
    assert [reply.result().status_code for reply in replies] == [200] * 3
    assert np.subtract(shared(replica), before).tolist() == [4, 4]


def test_a_client_with_many_batches_does_not_delay_one_with_a_single_one(busy, gate, pool, post, stream):
    """Two at the most come before it: one of the flood, and what was at work."""
    replica, _ = busy(adapter="atp")  # which nobody shares
    order = []

    def note(name):
        return lambda _: order.append(name)

    for number in range(8):
        pool.submit(post, replica, "flood", stream(0, 1)[0]).add_done_callback(note("flood"))
        replica.await_waiting(2 + number)
    time.sleep(0.1)
    single = pool.submit(post, replica, "single", stream(1, 1)[0])
    single.add_done_callback(note("single"))
    replica.await_waiting(10)
    time.sleep(0.1)
    gate.open()
    assert single.result().status_code == 200
    assert order.index("single") <= 2, order


def test_more_images_than_may_wait_are_refused_and_the_rest_is_served(busy, gate, pool, post, stream, assert_problem):
    replica, held = busy(adapter="fedcal", max_waiting_rows=20)
    first = pool.submit(post, replica, "cam", stream(0, 1, size=9)[0])
    replica.await_waiting(2)
    time.sleep(0.1)
    full = assert_problem(post(replica, "other", stream(1, 1, size=11)[0]), 429, "too_many_requests")
    assert full["detail"].startswith("10 images are waiting already, which leaves no room for 11 more")
    own = assert_problem(post(replica, "cam", stream(0, 1, size=2)[0]), 429, "too_many_requests")
    assert own["detail"].startswith("9 images of this client are waiting already, and room for 10 is kept")
    second = pool.submit(post, replica, "other", stream(1, 1)[0])
    replica.await_waiting(3)
    gate.open()
    assert {reply.result().status_code for reply in (held, first, second)} == {200}
    assert post(replica, "large", stream(2, 1, size=50)[0]).status_code == 200, "it met nobody"
