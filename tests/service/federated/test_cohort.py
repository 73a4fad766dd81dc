"""Federated rounds of Fed-ADE that the service runs among its clients."""

import asyncio
import time
from itertools import count

import numpy as np
import pytest
import torch

from acclimate_adapters import State, create, guarded_step
from acclimate_adapters.methods.fed_ade.rounds import aggregate, finish, initial_shared, local_update
from acclimate_client.errors import ClientUnknownError
from acclimate_service.federated.cohort import Round, RoundBusy
from acclimate_service.state import Contended, StateCorrupt

OPTIONS = {"layers": "all", "eta_min": 0.01, "eta_max": 0.1, "epochs": 1}


@pytest.fixture
def make_member(make_replica, anchored_store):
    """A service whose clients take part in rounds."""

    def make(**settings):
        return make_replica(
            **{"model_store": anchored_store, "adapter": "fed_ade", "adapter_options": OPTIONS, **settings}
        )

    return make


def a_round(replica, most=64):
    await_notes(replica)
    return replica.run(replica.service.rounds.run(most))


def await_notes(replica):
    """Activity is noted in the background."""
    deadline = time.monotonic() + 5
    while replica.service.rounds._tasks._running and time.monotonic() < deadline:
        time.sleep(0.005)


def cohorts(replica):
    return replica.service.rounds._cohorts


def cohort_keys(replica):
    return {key.rpartition(b"}:")[2].decode() for key in replica.redis.keys(f"acc:{{default/~{model_of(replica)}}}:*")}


def fill(replica, stream, clients, batches=1):
    with replica.sdk() as sdk:
        for number in range(clients):
            for images in stream(number % 8, batches, 6 + number % 3):
                sdk.predict(f"cam-{number}", images)


def by_hand(bundle, batches, rounds):
    """The states of clients after their batches and so many rounds (Algorithm 1), in process."""
    adapter, model = create("fed_ade", **OPTIONS), bundle.model
    states = []
    for stream in batches:
        state = adapter.init(model)
        for images in stream:
            state = guarded_step(adapter, model, state, bundle.prepare(images)).state
        states.append(state)
    shared = initial_shared(model)
    for r in range(rounds):
        updates = [local_update(adapter, model, state, shared, r) for state in states]
        shared = aggregate(shared, updates)
        states = [finish(adapter, model, update.state, shared, r) for update in updates]
    return states


def assert_close(state, expected):
    assert state.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.allclose(state.tensors[name], tensor, rtol=1e-4, atol=1e-6), name


def test_rounds_of_the_service_are_those_of_the_paper(make_member, anchored, stream):
    replica = make_member()
    fill(replica, stream, 5, batches=2)
    assert a_round(replica) == Round(1, 5)
    assert a_round(replica) == Round(2, 5)
    expected = by_hand(anchored.bundle, [stream(n % 8, 2, 6 + n % 3) for n in range(5)], rounds=2)
    with replica.sdk() as sdk:
        for number, state in enumerate(expected):
            assert sdk.get(f"cam-{number}").state.version == 4
            found = State.from_bytes(sdk.export_state(f"cam-{number}"))
            assert found.step == 2
            assert_close(found, state)


def test_the_next_batch_is_answered_with_the_layers_of_the_round(make_member, anchored, stream):
    replica = make_member()
    fill(replica, stream, 3)
    a_round(replica)
    states = by_hand(anchored.bundle, [stream(n, 1, 6 + n) for n in range(3)], rounds=1)
    (images,) = stream(5, 1)
    adapter, bundle = create("fed_ade", **OPTIONS), anchored.bundle
    with replica.sdk() as sdk:
        for number, state in enumerate(states):
            prediction = sdk.predict(f"cam-{number}", images, probabilities=True)
            step = guarded_step(adapter, bundle.model, state, bundle.prepare(images))
            assert np.allclose(prediction.probabilities, step.logits.double().softmax(-1), rtol=0, atol=1e-5)
            assert prediction.state.version == 3


def test_only_clients_that_can_take_part_do_and_none_is_brought_back(make_member, stream):
    replica = make_member()
    fill(replica, stream, 7)
    with replica.sdk() as sdk:
        sdk.pause("cam-6")
        sdk.delete("cam-0")
        sdk.reset("cam-1")
        sdk.configure("cam-2", "fed_ade", layers="head")
        sdk.predict("cam-2", stream(0, 1)[0])
        sdk.configure("cam-3", "em")
        versions = {n: sdk.get(f"cam-{n}").state.version for n in (1, 2, 3, 6)}
        assert a_round(replica) == Round(1, 2)
        with pytest.raises(ClientUnknownError):
            sdk.get("cam-0")
        assert {n: sdk.get(f"cam-{n}").state.version for n in (1, 2, 3, 6)} == versions
        assert {sdk.get(f"cam-{n}").state.version for n in (4, 5)} == {2}


def test_a_round_without_clients_changes_nothing(make_member, replica):
    assert a_round(make_member()) == Round(0, 0)
    assert a_round(replica) == Round(0, 0)


def test_a_round_takes_no_more_clients_than_it_may(make_member, stream):
    replica = make_member()
    fill(replica, stream, 6)
    assert a_round(replica, most=4) == Round(1, 4)
    with replica.sdk() as sdk:
        assert sorted(sdk.get(f"cam-{n}").state.version for n in range(6)) == [1, 1, 2, 2, 2, 2]


def test_batches_that_come_during_a_round_are_answered_and_nothing_is_lost(make_member, stream, pool):
    replica = make_member()
    other = make_member(redis_url=replica.service.settings.redis_url)
    fill(replica, stream, 6)
    await_notes(replica)

    def send(number):
        with other.sdk(max_retries=10) as sdk:
            for images in stream(number, 5, 6):
                sdk.predict(f"cam-{number}", images)

    calls = [pool.submit(send, number) for number in range(6)]
    done = replica.run(replica.service.rounds.run(64))
    for call in calls:
        call.result()
    assert done.version == 1
    with replica.sdk() as sdk:
        versions = [sdk.get(f"cam-{number}").state.version for number in range(6)]
        steps = [State.from_bytes(sdk.export_state(f"cam-{number}")).step for number in range(6)]
    assert steps == [6] * 6
    assert sum(versions) == 36 + done.clients


def test_one_replica_runs_a_round_at_a_time(make_member, stream):
    first = make_member()
    second = make_member(redis_url=first.service.settings.redis_url)
    fill(first, stream, 4)
    await_notes(first)
    running = asyncio.run_coroutine_threadsafe(first.service.rounds.run(64), first.loop)
    deadline = time.monotonic() + 5
    while "l" not in cohort_keys(first):
        assert time.monotonic() < deadline
    with pytest.raises(RoundBusy):
        second.run(second.service.rounds.run(64))
    assert running.result(30) == Round(1, 4)
    assert second.run(second.service.rounds.run(64)) == Round(2, 4)


def test_a_round_that_another_one_overtook_is_refused_and_leaves_the_other_ones_version(make_member):
    replica = make_member()
    store = cohorts(replica)
    basis = replica.run(store.load())
    replica.run(store.advance(basis, b"first", ["a"]))
    with pytest.raises(Contended):
        replica.run(store.advance(basis, b"late", ["b"]))
    standing = replica.run(store.load())
    assert (standing.version, standing.unfinished) == (1, ("a",))
    assert replica.run(store.read(standing.layers)) == b"first"


def test_a_version_keeps_the_one_before_until_all_have_finished(make_member):
    replica = make_member()
    store = cohorts(replica)
    first = replica.run(store.advance(replica.run(store.load()), b"one", ["a"]))
    replica.run(store.settle(first))
    second = replica.run(store.advance(replica.run(store.load()), b"two", ["a", "b"]))
    standing = replica.run(store.load())
    assert (standing.layers, standing.previous, standing.unfinished) == (second.layers, first.layers, ("a", "b"))
    assert 0 <= standing.age_ms < 10_000
    assert replica.run(store.read(standing.previous)) == b"one"
    replica.run(store.settle(first))  # a late one
    assert replica.run(store.load()).unfinished == ("a", "b")
    replica.run(store.settle(second))
    standing = replica.run(store.load())
    assert (standing.previous, standing.unfinished) == (None, ())
    assert len(cohort_keys(replica)) == 2
    with pytest.raises(Contended):
        replica.run(store.read(first.layers))


def test_layers_are_verified_and_everything_expires(make_member, stream):
    replica = make_member()
    fill(replica, stream, 2)
    a_round(replica)
    assert cohort_keys(replica) >= {"m", "c"}
    ttls = {
        key.rpartition(b"}:")[2]: replica.redis.pttl(key)
        for key in replica.redis.keys(f"acc:{{default/~{model_of(replica)}}}:*")
    }
    assert min(ttls.values()) > 0
    (layers,) = (key for key in replica.redis.keys("acc:{default/~*}:s:*"))
    assert ttls[b"c"] < replica.redis.pttl(layers)
    replica.redis.hset(layers, "0", replica.redis.hget(layers, "0")[:-1] + b"?")
    before = replica.keys("cam-0")
    with pytest.raises(StateCorrupt):
        a_round(replica)
    assert replica.keys("cam-0") == before


def test_the_index_of_active_clients_is_bounded(make_member):
    replica = make_member()
    store = cohorts(replica)

    async def note_many():
        for number in range(1100):
            await store.note(f"cam-{number}")
        return await store.active()

    active = replica.run(note_many())
    assert (len(active), active[0], active[-1]) == (1024, "cam-1099", "cam-76")


def test_replicas_run_rounds_by_themselves_one_per_interval(make_member, stream):
    first = make_member(round_interval_s=1)
    second = make_member(round_interval_s=1, redis_url=first.service.settings.redis_url)
    fill(first, stream, 2)
    began = time.monotonic()
    for _ in count():
        versions = [replica.run(cohorts(replica).load()).version for replica in (first, second)]
        if min(versions) >= 2:
            break
        assert time.monotonic() < began + 15
        time.sleep(0.05)
    assert max(versions) <= 2 + (time.monotonic() - began) / 0.9
    assert time.monotonic() - began > 0.8


def index(replica):
    return {client.decode() for client in replica.redis.zrange(f"acc:{{default/~{model_of(replica)}}}:m", 0, -1)}


def model_of(replica):
    return replica.service.bundle.model.content_hash


def test_a_deleted_client_is_in_no_index_any_more(make_member, stream):
    replica = make_member()
    fill(replica, stream, 2)
    with replica.sdk() as sdk:
        sdk.delete("cam-0")
    await_notes(replica)
    assert index(replica) == {"cam-1"}


def test_clients_whose_state_has_expired_are_in_no_round_and_leave_the_index(make_member, stream):
    replica = make_member()
    fill(replica, stream, 2)
    await_notes(replica)
    key, long_ago = f"acc:{{default/~{model_of(replica)}}}:m", time.time() - replica.service.settings.state_ttl_s - 60
    replica.redis.zadd(key, {"expired": 1000 * long_ago})
    assert set(replica.run(cohorts(replica).active())) == {"cam-0", "cam-1"}
    with replica.sdk() as sdk:
        sdk.predict("cam-0", stream(0, 2)[1])
    await_notes(replica)
    assert index(replica) == {"cam-0", "cam-1"}


def test_a_note_that_fails_is_logged_counted_and_shown_until_one_succeeds(make_member, stream, monkeypatch, caplog):
    replica = make_member()
    one, two = stream(0, 2)

    async def fail(_):
        raise StateCorrupt("the index is no index")

    with replica.sdk() as sdk:
        with monkeypatch.context() as patch:
            patch.setattr(cohorts(replica), "note", fail)
            sdk.predict("cam", one)
            await_notes(replica)
        assert replica.metric('acclimate_background_failures_total{task="cohort_note"}') == 1
        assert replica.metric('acclimate_background_failing{task="cohort_note"}') == 1
        assert "the index is no index" in caplog.text
        sdk.predict("cam", two)
        await_notes(replica)
    assert replica.metric('acclimate_background_failing{task="cohort_note"}') == 0
