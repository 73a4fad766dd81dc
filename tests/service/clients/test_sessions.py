"""The states in memory: bounded by bytes, kept while in use, let go without a loss."""

import time

import numpy as np
import pytest

SMALL = 20_000  # bytes that a session of `none` takes at most


def settled(replica):
    """Wait until nothing is being evicted."""
    sessions, deadline = replica.service.sessions, time.monotonic() + 10
    while sessions._leaving and time.monotonic() < deadline:
        time.sleep(0.005)
    return sessions


def test_one_shot_clients_do_not_fill_the_memory(make_replica, post):
    replica = make_replica(adapter="none", cache_bytes=20 * SMALL)
    image = np.zeros((1, 28, 28), np.uint8)
    for number in range(200):
        assert post(replica, f"one-shot-{number}", image).status_code == 200
        assert replica.service.sessions.nbytes <= 20 * SMALL + SMALL
    sessions = settled(replica)
    assert 5 < len(sessions) < 100
    assert sessions.nbytes <= 20 * SMALL
    assert replica.metric("acclimate_state_sessions") == len(sessions)
    assert replica.metric("acclimate_state_cache_bytes") == sessions.nbytes


def test_new_clients_wait_while_those_before_them_are_still_being_written_away(make_replica, post, assert_problem):
    replica = make_replica(adapter="none", cache_bytes=5 * SMALL)
    image, sessions = np.zeros((1, 28, 28), np.uint8), replica.service.sessions

    async def stall():
        for _ in range(2):
            await sessions._evicting.acquire()

    async def go_on():
        for _ in range(2):
            sessions._evicting.release()

    replica.run(stall())
    replies = [post(replica, f"new-{number}", image, X_Request_Timeout_Ms="300") for number in range(14)]
    assert [reply.status_code for reply in replies[:5]] == [200] * 5
    assert_problem(replies[-1], 504, "deadline_exceeded")
    assert sessions.nbytes <= 6 * SMALL
    assert post(replica, "new-0", image).status_code == 200, "a client in memory need not wait"
    replica.run(go_on())
    assert post(replica, "one-more", image).status_code == 200
    assert settled(replica).nbytes <= 5 * SMALL


def test_the_least_recently_used_goes_first(make_replica, stream):
    replica, images = make_replica(cache_bytes=900_000), stream(0, 1)[0]  # two states of 378 kB
    with replica.sdk() as sdk:
        for client in ("a", "b", "a", "c"):
            sdk.predict(client, images)
        settled(replica)
        statuses = {client: sdk.predict(client, images, adapt=False).state.status for client in ("a", "c", "b")}
    assert statuses == {"a": "warm", "c": "warm", "b": "restored"}


def test_what_is_evicted_has_a_snapshot_and_nothing_to_replay(make_replica, stream):
    replica = make_replica(cache_bytes=0)
    with replica.sdk() as sdk:
        for images in stream(0, 2):
            sdk.predict("cam", images)
            settled(replica)
        state = sdk.get("cam").state
    assert (state.version, state.base, state.journal_entries, state.owner) == (2, 2, 0, None)
    assert (state.tier, len(replica.service.sessions)) == ("redis", 0)
    assert replica.metric("acclimate_state_replayed_batches_total") == 0


def test_a_client_that_has_no_room_by_itself_pushes_nobody_out(make_replica, stream):
    replica, images = make_replica(cache_bytes=200_000), stream(0, 1)[0]
    with replica.sdk() as sdk:
        for number in range(4):
            sdk.configure(f"small-{number}", "none")
            sdk.predict(f"small-{number}", images)
        sdk.predict("large", images)
        settled(replica)
        assert replica.service.sessions.nbytes <= 200_000
        assert sdk.predict("small-0", images).state.status == "warm"
        assert sdk.get("large").state.tier == "redis"


def test_a_client_at_work_stays_in_memory(make_replica, gate, pool, post):
    gate.shut = False
    replica = make_replica(adapter="gated", cache_bytes=SMALL)
    gate.shut = True
    image = np.zeros((1, 28, 28), np.uint8)
    busy = pool.submit(post, replica, "busy", image)
    gate.wait_for_a_step()
    for number in range(5):
        assert replica.http.get(f"/clients/other-{number}/state").status_code == 404
    sessions = settled(replica)
    assert "busy" in sessions._sessions
    assert len(sessions) < 5
    gate.open()
    assert busy.result().json()["state"]["version"] == 1


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "seen by the next write"])
def test_a_delete_by_another_replica_is_obeyed(make_replica, stream, announced):
    first = make_replica()
    second = make_replica(redis_url=first.service.settings.redis_url)
    one, two = stream(0, 2)
    with first.sdk() as here, second.sdk() as there:
        here.predict("cam", one)
        there.delete("cam")
        if announced:
            deadline = time.monotonic() + 5
            while first.service.sessions.nbytes > 100_000 and time.monotonic() < deadline:
                time.sleep(0.01)
            session = first.service.sessions._sessions["cam"]
            assert session.nbytes == 0, "the state is in memory although its client was deleted"
        anew = here.predict("cam", two)
        assert (anew.state.version, anew.state.status) == (1, "cold")
