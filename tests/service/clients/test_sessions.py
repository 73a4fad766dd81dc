"""The states in memory: bounded by bytes, kept while in use, let go without a loss."""

import asyncio
import gc
import threading
import time
from contextlib import AsyncExitStack

import numpy as np
import pytest

from acclimate_service.clients.requests import ClientRequest
from acclimate_service.compute.client_state import ClientState
from acclimate_service.state import ClientScope, random_rid

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


def test_a_client_at_work_stays_in_memory(make_replica, gate, pool, post, shade):
    gate.shut = False
    replica = make_replica(adapter="gated", cache_bytes=SMALL)
    gate.shut = True
    image = shade(0)
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


async def present():
    return False


def wanted(client):
    rid = random_rid()
    deadline = time.monotonic() + 60
    return ClientRequest(client=ClientScope(client), rid=rid, fingerprint=rid, deadline=deadline, gone=present)


def test_clients_who_are_kept_by_their_requests_do_not_keep_others_from_leaving(make_replica, post):
    replica = make_replica(adapter="none", cache_bytes=5 * SMALL)
    image, sessions, held = np.zeros((1, 28, 28), np.uint8), replica.service.sessions, AsyncExitStack()

    async def come_back():
        leaving = list(sessions._leaving)
        for client in leaving:
            await held.enter_async_context(sessions.turn(wanted(client)))
        sessions._evicting.release()
        return leaving

    sessions._evicting = asyncio.Semaphore(0)  # one place for those who leave, once it is given
    for number in range(14):
        post(replica, f"new-{number}", image, X_Request_Timeout_Ms="300")
    assert sessions._leaving
    back = replica.run(come_back())
    for later in range(10):
        assert post(replica, f"later-{later}", image, X_Request_Timeout_Ms="5000").status_code == 200
    assert set(back) <= set(sessions._sessions), "whoever is at work stays"
    replica.run(held.aclose())
    assert settled(replica).nbytes <= 5 * SMALL


def alive():
    """Bytes of all states of `atp` in this process, whoever holds them."""
    gc.collect()
    states = [each for each in gc.get_objects() if type(each) is ClientState and each.state.adapter == "atp"]
    return sum(each.state.nbytes for each in states)


def test_states_that_wait_to_be_written_count_in_the_budget(make_replica, stream):
    budget, before = 3_000_000, alive()
    replica, stalled = make_replica(adapter="atp", cache_bytes=budget), threading.Event()
    machine = replica.service.engine._machine
    machine._background.submit(stalled.wait)
    batches = [np.concatenate([images] * 20)[:250] for images in stream(0, 4)]
    try:
        with replica.sdk() as sdk:
            for number in range(8):
                for images in batches:
                    sdk.predict(f"cam-{number}", images)
        settled(replica)
        one = 400_000
        assert machine.waiting, "a snapshot is due for each client, and none can be taken"
        assert alive() - before <= budget + 2 * one
    finally:
        stalled.set()


def test_candidates_live_within_the_same_budget(make_replica):
    budget = 8_000_000
    replica = make_replica(adapter="fedcal", candidates=("none", "em"), candidate_share=1.0, cache_bytes=budget)
    kept = [replica.service.sessions, *replica.service.challengers.sessions]
    assert len(kept) == 3
    assert sum(sessions._budget for sessions in kept) <= budget


def test_the_end_has_one_budget_for_the_states_of_clients_and_of_candidates(run_service, tmp_path, stream):
    settings = {"candidates": ("none", "em"), "candidate_share": 1.0, "drain_budget_s": 1.0}
    with run_service(data_dir=tmp_path, adapter="fedcal", **settings) as replica:
        with replica.sdk() as sdk:
            sdk.predict("cam", stream(0, 1)[0])
        deadline = time.monotonic() + 10
        while replica.service.challengers._waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        kept = [replica.service.sessions, *replica.service.challengers.sessions]
        assert sum(len(sessions) for sessions in kept) >= 3
        for sessions in kept:
            sessions._evicting = asyncio.Semaphore(0)  # nobody can be written away
        began = time.monotonic()
    assert time.monotonic() - began < 3.5, "two or more budgets, one after the other"
