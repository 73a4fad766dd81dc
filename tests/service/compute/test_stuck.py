"""A device that is stuck is seen by whoever asks whether the replica is ready."""

import time


def test_a_replica_whose_device_is_stuck_is_not_ready_until_it_goes_on(make_replica, gate, pool, post, shade):
    gate.shut = False
    replica = make_replica(adapter="gated", request_timeout_ms=1000)
    gate.shut = True
    held = pool.submit(post, replica, "cam", shade(0))
    gate.wait_for_a_step()
    assert replica.http.get("/v2/health/ready").status_code == 200, "a step may take a while"
    time.sleep(1.1)
    reply = replica.http.get("/v2/health/ready")
    assert reply.status_code == 503
    assert reply.json()["reason"] == "cpu has been at one piece of work for more than 1 s"
    assert replica.http.get("/v2/health/live").status_code == 200
    gate.open()
    assert held.result().status_code == 200
    assert replica.http.get("/v2/health/ready").status_code == 200
