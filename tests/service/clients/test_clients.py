"""What a client's life looks like from outside."""

import time

import numpy as np
import pytest

from acclimate_adapters.compression import coding
from acclimate_client.errors import ClientUnknownError, KeyReusedError, KeyUsedBeforeDeleteError
from acclimate_service.state import StateStore


def close(answers, expected):
    return all(np.allclose(a, e, rtol=0, atol=1e-5) for a, e in zip(answers, expected, strict=True))


@pytest.fixture
def sdk(replica):
    with replica.sdk() as client:
        yield client


@pytest.mark.parametrize("adapter", ["atp", "fedcal", "none"])
def test_answers_are_those_of_an_uninterrupted_run_and_survive_a_restart(make_replica, serial, stream, adapter):
    batches = stream(1, 8)
    expected = serial.probabilities(adapter, batches)
    answers, statuses = [], []
    first = make_replica(adapter=adapter)
    with first.sdk() as sdk:
        for images in batches[:5]:
            prediction = sdk.predict("cam", images, probabilities=True)
            answers.append(prediction.probabilities)
            statuses.append(prediction.state.status)
    kept = first.keys("cam")
    second = make_replica(adapter=adapter, redis_url=first.service.settings.redis_url)
    assert second.keys("cam") == kept
    with second.sdk() as sdk:
        for images in batches[5:]:
            prediction = sdk.predict("cam", images, probabilities=True)
            answers.append(prediction.probabilities)
            statuses.append(prediction.state.status)
        assert sdk.get("cam").state.version == len(batches)
    assert close(answers, expected)
    assert statuses == ["cold", *["warm"] * 4, "restored", "warm", "warm"]


@pytest.mark.parametrize(("adapter", "pieces"), [("atp", 1), ("none", 0), ("fedcal", 0)])
def test_large_states_are_stored_in_chunks_and_small_ones_in_their_head(make_replica, stream, adapter, pieces):
    replica = make_replica(adapter=adapter, journal=False)
    with replica.sdk() as sdk:
        for images in stream(0, 3):
            sdk.predict("cam", images)
        size = sdk.get("cam").state.base_bytes
    assert (size > replica.service.settings.inline_max) is (pieces > 0)
    assert len([key for key in replica.keys("cam") if b":s:" in key]) == pieces
    assert all(replica.redis.pttl(key) > 0 for key in replica.keys("cam"))


def test_an_evicted_state_is_read_again_and_nothing_is_lost(make_replica, serial, stream):
    replica = make_replica(cache_bytes=500_000)  # one state of 378 kB
    clients = {f"cam-{number}": stream(number, 4) for number in range(3)}
    answers = {name: [] for name in clients}
    with replica.sdk() as sdk:
        for turn in range(4):
            for name, batches in clients.items():
                prediction = sdk.predict(name, batches[turn], probabilities=True)
                answers[name].append(prediction.probabilities)
                assert prediction.state.status == ("restored" if turn else "cold")
    assert replica.metric('acclimate_state_loads_total{tier="redis"}') == 9
    deadline = time.monotonic() + 5
    while replica.metric("acclimate_state_cache_bytes") > 500_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 0 < replica.metric("acclimate_state_cache_bytes") <= 500_000
    for name, batches in clients.items():
        assert close(answers[name], serial.probabilities("atp", batches))


def test_two_replicas_that_take_turns_answer_like_one(make_replica, serial, stream):
    first = make_replica()
    second = make_replica(redis_url=first.service.settings.redis_url)
    batches = stream(2, 10)
    answers = []
    with first.sdk() as one, second.sdk() as two:
        for number, images in enumerate(batches):
            prediction = (one, two)[number % 2].predict("cam", images, probabilities=True)
            answers.append(prediction.probabilities)
            assert prediction.state.version == number + 1
    assert close(answers, serial.probabilities("atp", batches))


def test_a_replica_with_an_old_state_in_memory_neither_answers_from_it_nor_refuses_the_client(
    make_replica, serial, stream
):
    first = make_replica()
    second = make_replica(redis_url=first.service.settings.redis_url)
    batches = stream(3, 4)
    with first.sdk() as one, second.sdk() as two:
        two.predict("cam", batches[0])
        one.predict("cam", batches[1])
        look = two.predict("cam", batches[2], adapt=False, probabilities=True)
        assert look.state.version == 2
        assert close([look.probabilities], serial.probabilities("atp", batches[:3])[2:])
        one.delete("cam")
        look = two.predict("cam", batches[2], adapt=False)
        assert (look.state.version, look.state.status) == (0, "cold")
        anew = two.predict("cam", batches[3], probabilities=True)
        assert (anew.state.version, anew.state.status) == (1, "cold")
        assert close([anew.probabilities], serial.probabilities("atp", batches[3:]))


def test_a_delete_elsewhere_does_not_refuse_the_next_batch_of_a_replica_that_remembers(make_replica, stream):
    first = make_replica()
    second = make_replica(redis_url=first.service.settings.redis_url)
    batches = stream(3, 2)
    with first.sdk() as one, second.sdk() as two:
        two.predict("cam", batches[0])
        one.delete("cam")
        anew = two.predict("cam", batches[1])
        assert (anew.state.version, anew.state.status) == (1, "cold")


def test_a_batch_without_adaptation_changes_nothing(replica, sdk, serial, stream):
    batches = stream(4, 3)
    sdk.predict("look", batches[0])
    before = replica.keys("look")
    look = sdk.predict("look", batches[1], adapt=False, probabilities=True)
    assert (look.state.committed, look.state.version) == (False, 1)
    assert replica.keys("look") == before
    kept = sdk.predict("look", batches[1], probabilities=True)
    assert close([look.probabilities, kept.probabilities], serial.probabilities("atp", batches[:2])[1:] * 2)


def test_a_look_at_an_unknown_client_does_not_begin_it(replica, sdk, stream):
    look = sdk.predict("never", stream(0, 1)[0], adapt=False)
    assert (look.state.version, look.state.status, look.state.committed) == (0, "cold", False)
    assert replica.keys("never") == {}
    with pytest.raises(ClientUnknownError):
        sdk.get("never")


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_chosen_is_noted_by_the_change_itself(replica, sdk, stream, monkeypatch, begun):
    async def crash(*noted):
        raise AssertionError("the note is a command of its own, before which a replica may end")

    monkeypatch.setattr(StateStore, "note_choice", crash)
    client = f"chooses-{begun}"
    if begun:
        sdk.predict(client, stream(0, 1)[0])
    for _ in range(2):
        sdk.configure(client, "em", idempotency_key="k")
        assert chosen(replica, client) == replica.redis.hget(head_of(replica, client), "cfg")


def test_what_a_client_has_already_is_noted_as_chosen_if_it_is_what_was_asked_for(replica, sdk, stream):
    sdk.predict("has-it", stream(0, 1)[0])
    assert chosen(replica, "has-it") is None
    replica.http.put("/clients/has-it", json={"adaptation": "paused"})
    assert chosen(replica, "has-it") is None
    assert not sdk.configure("has-it", "atp").changed
    assert chosen(replica, "has-it") == replica.redis.hget(head_of(replica, "has-it"), "cfg")
    sdk.reset("has-it")
    assert chosen(replica, "has-it") is not None
    sdk.delete("has-it")
    assert chosen(replica, "has-it") is None


def chosen(replica, client):
    return replica.redis.hget(f"acc:{{default/{client}}}:r", "chosen")


def head_of(replica, client):
    return f"acc:{{default/{client}}}:{replica.service.bundle.model.content_hash}:h"


def test_a_repeat_gets_the_first_answer_and_another_body_is_refused(sdk, stream):
    one, two, three = stream(0, 3)
    first = sdk.predict("repeat", one, idempotency_key="a", probabilities=True)
    sdk.predict("repeat", two)
    again = sdk.predict("repeat", one, idempotency_key="a", probabilities=True)
    assert (again.state.version, again.state.replayed) == (1, "stored")
    assert np.array_equal(again.probabilities, first.probabilities)
    with pytest.raises(KeyReusedError):
        sdk.predict("repeat", three, idempotency_key="a", probabilities=True)
    with pytest.raises(KeyReusedError):
        sdk.predict("repeat", one, idempotency_key="a", probabilities=False)
    with pytest.raises(KeyReusedError):
        sdk.reset("repeat", idempotency_key="a")
    assert sdk.get("repeat").state.version == 2


def test_the_same_key_is_another_one_for_another_client(sdk, stream):
    one, two = stream(0, 2)
    sdk.predict("mine", one, idempotency_key="shared")
    assert sdk.predict("yours", two, idempotency_key="shared").state.replayed == "none"


def test_a_repeat_whose_answer_is_gone_says_so_and_is_not_applied_again(replica, sdk, stream):
    (images,) = stream(0, 1)
    sdk.configure("gone", "fedcal")
    sdk.predict("gone", images, idempotency_key="a")
    forget_answers(replica, "gone")
    again = sdk.predict("gone", images, idempotency_key="a")
    assert (again.state.version, again.state.replayed, again.adapter) == (2, "unavailable", "fedcal")
    assert again.labels == ()
    assert sdk.get("gone").state.version == 2


def test_an_answer_that_is_gone_is_computed_again_while_its_batch_is_in_the_journal(replica, sdk, stream):
    (images,) = stream(0, 1)
    first = sdk.predict("again", images, probabilities=True, idempotency_key="a")
    forget_answers(replica, "again")
    again = sdk.predict("again", images, probabilities=True, idempotency_key="a")
    assert (again.state.version, again.state.replayed, again.adapter) == (1, "recomputed", "atp")
    assert close([again.probabilities], [first.probabilities])
    assert sdk.get("again").state.version == 1


def forget_answers(replica, client):
    """As the cap on their bytes would. The answers of a journal are stored just after the reply."""
    deadline = time.monotonic() + 5
    while not replica.redis.delete(f"acc:{{default/{client}}}:a", f"acc:{{default/{client}}}:y"):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_concurrent_repeats_apply_once_and_agree(replica, pool, stream):
    (images,) = stream(0, 1)
    with replica.sdk(max_retries=200, _sleep=lambda _: time.sleep(0.02)) as sdk:
        calls = [pool.submit(sdk.predict, "crowd", images, idempotency_key="a") for _ in range(8)]
        answers = [call.result() for call in calls]
        assert {answer.state.version for answer in answers} == {1}
        assert len({tuple(answer.confidence) for answer in answers}) == 1
        replayed = sorted(answer.state.replayed for answer in answers)
        assert replayed[0] == "none"
        assert set(replayed[1:]) <= {"stored", "recomputed"}  # whoever asks before the answer is stored has it computed
        assert sdk.get("crowd").state.version == 1


def test_a_reset_goes_back_to_the_global_model_and_counts_on(sdk, serial, stream):
    batches = stream(5, 3)
    for images in batches[:2]:
        sdk.predict("fresh", images)
    reset = sdk.reset("fresh", idempotency_key="r")
    assert (reset.state.version, reset.state.status, reset.adapter) == (3, "reset", "atp")
    assert sdk.get("fresh").state.status == "reset"
    anew = sdk.predict("fresh", batches[2], probabilities=True)
    assert (anew.state.version, anew.state.status) == (4, "reset")
    assert close([anew.probabilities], serial.probabilities("atp", batches[2:]))
    repeat = sdk.reset("fresh", idempotency_key="r")
    assert (repeat.state.version, repeat.state.replayed) == (3, "stored")
    assert sdk.get("fresh").state.version == 4


def test_a_deleted_client_is_gone_and_begins_cold(replica, sdk, serial, stream):
    batches = stream(6, 3)
    sdk.predict("left", batches[0], idempotency_key="before")
    sdk.delete("left")
    with pytest.raises(ClientUnknownError):
        sdk.get("left")
    assert {key.rpartition(b":")[2] for key in replica.keys("left")} == {b"r", b"i", b"x"}
    with pytest.raises(KeyUsedBeforeDeleteError):
        sdk.predict("left", batches[0], idempotency_key="before")
    anew = sdk.predict("left", batches[1], probabilities=True)
    assert (anew.state.version, anew.state.status) == (1, "cold")
    assert close([anew.probabilities], serial.probabilities("atp", batches[1:2]))
    with pytest.raises(KeyUsedBeforeDeleteError):
        sdk.predict("left", batches[0], idempotency_key="before")
    assert sdk.get("left").state.version == 1


def test_delete_is_idempotent(replica, sdk):
    assert replica.http.delete("/clients/nobody").status_code == 204
    assert replica.http.delete("/clients/nobody").status_code == 204


def test_a_client_keeps_its_adapter_when_the_default_changes(make_replica, stream):
    one, two = stream(0, 2)
    first = make_replica(adapter="none")
    with first.sdk() as sdk:
        sdk.predict("cam", one)
    second = make_replica(adapter="atp", redis_url=first.service.settings.redis_url)
    with second.sdk() as sdk:
        assert sdk.get("cam").adapter == "none"
        assert sdk.predict("cam", two).adapter == "none"
        assert sdk.predict("new", two).adapter == "atp"


@pytest.mark.parametrize("journal", [True, False], ids=["an entry of its journal", "a chunk of its snapshot"])
def test_a_damaged_state_is_never_replaced_by_a_fresh_one(make_replica, post, stream, assert_problem, journal):
    replica = make_replica(journal=journal, cache_bytes=0 if not journal else 10**9)
    images = stream(0, 1)[0][:, 0]
    assert post(replica, "hurt", images).status_code == 200
    place, field = (b":j", "1") if journal else (b":s:", "0")
    (key,) = (key for key in replica.keys("hurt") if place in key)
    content = replica.redis.hget(key, field)
    replica.redis.hset(key, field, content[:-1] + bytes([content[-1] ^ 1]))
    replica.loop.call_soon_threadsafe(replica.service.sessions.drop, "hurt")
    for _ in range(2):
        assert_problem(post(replica, "hurt", images), 503, "state_corrupt")
    assert replica.http.post("/clients/hurt/reset").status_code == 200
    assert post(replica, "hurt", images).json()["state"]["status"] == "reset"


def test_a_state_that_a_newer_release_wrote_is_refused_and_kept_for_it(
    make_replica, post, stream, assert_problem, monkeypatch
):
    images = stream(0, 1)[0][:, 0]
    with monkeypatch.context() as newer:
        newer.setattr(coding, "_FORM", "coded.9:")
        replica = make_replica(cache_bytes=0, adapter="balanced", state_budget=0.5)
        assert post(replica, "cam", images).json()["state"]["version"] == 1
    refused = post(replica, "cam", images)
    assert_problem(refused, 503, "state_corrupt")
    assert "coded.9:balanced" in refused.json()["detail"]
    assert "if a newer release wrote it, a replica of that one goes on" in refused.json()["detail"]
    monkeypatch.setattr(coding, "_FORM", "coded.9:")
    assert post(replica, "cam", images).json()["state"]["version"] == 2


@pytest.mark.parametrize("adapter", ["atp", "fedcal"])
def test_bytes_are_those_that_redis_counts(make_replica, stream, adapter):
    replica = make_replica(adapter=adapter)
    with replica.sdk() as sdk:
        for number, images in enumerate(stream(0, 3)):
            sdk.predict("cam", images, idempotency_key=f"{number}")
        counted = sum(replica.redis.memory_usage(key, samples=0) for key in replica.keys("cam"))
        assert sdk.get("cam").state.bytes == sdk.clients().clients[0].bytes == counted > 2000
