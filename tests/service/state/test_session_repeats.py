"""Repeated requests get their first answer."""

import asyncio

import pytest
from checker.toy import LARGE, answer_after, batch_of
from redis.asyncio import Redis

from acclimate_service.state import KeyReused, OtherModel, RequestRunning


@pytest.mark.parametrize("size", [40, LARGE])
async def test_a_repeated_request_gets_its_first_answer_from_any_replica(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    first = await one.apply(b"1", key="k")
    await one.apply(b"2")
    for replica in (one, two):
        again = await replica.apply(b"1", key="k")
        assert (again.seq, again.answer, again.replayed) == (1, first.answer, "stored")
    assert (await one.head()).seq == 2


@pytest.mark.parametrize("size", [40, LARGE])
async def test_a_repeat_whose_reply_was_lost_takes_no_step(make_replica, size: int):
    replica = make_replica(size)
    await replica.apply(b"1", key="k")
    assert (await replica.apply(b"1", key="k")).seq == 1
    assert replica.machine.steps == 1


async def test_a_repeat_does_not_cost_the_state_in_memory(make_replica):
    replica = make_replica(LARGE)
    await replica.apply(b"1", key="k")
    await replica.apply(b"1", key="k")
    assert (await replica.apply(b"2")).status == "warm"


async def test_an_answer_that_was_never_stored_is_computed_again_and_then_stored(make_replica, admin: Redis):
    one = make_replica(LARGE, lease_ms=20)
    await one.apply(b"1", key="k")
    await one.apply(b"2")
    await one.settled()
    await asyncio.sleep(0.05)
    await admin.delete(one.client.answers, one.client.answer_times)
    replays = [await make_replica(LARGE).apply(b"1", key="k") for _ in range(2)]
    assert [replay.replayed for replay in replays] == ["recomputed", "stored"]
    assert {replay.answer for replay in replays} == {answer_after(b"1")}


async def test_the_last_entry_of_a_live_writer_is_its_own_to_answer(make_replica, admin: Redis):
    one, two = make_replica(LARGE), make_replica(LARGE)
    await one.apply(b"1", key="k")
    await one.settled()
    await admin.delete(one.client.answers, one.client.answer_times)
    with pytest.raises(RequestRunning) as running:
        await two.apply(b"1", key="k")
    assert running.value.committed == "unknown"
    assert 0 < running.value.retry_after_ms <= 3000


async def test_an_answer_whose_journal_a_reset_dropped_is_unavailable(make_replica, admin: Redis):
    replica = make_replica(LARGE)
    await replica.apply(b"1", key="k")
    await replica.settled()
    await admin.delete(replica.client.answers, replica.client.answer_times)
    await replica.session.reset(replica.request())
    again = await replica.apply(b"1", key="k")
    assert (again.seq, again.answer, again.replayed) == (1, None, "unavailable")
    assert (await replica.head()).seq == 2


async def test_a_repeat_for_another_model_gets_the_stored_answer_or_is_unknown(make_replica, admin: Redis):
    one, other = make_replica(LARGE), make_replica(LARGE, model="f" * 16)
    first = await one.apply(b"1", key="k")
    await one.settled()
    again = await other.apply(b"1", key="k")
    assert (again.answer, again.model) == (first.answer, one.model)
    await admin.delete(one.client.answers, one.client.answer_times)
    with pytest.raises(OtherModel) as refused:
        await other.apply(b"1", key="k")
    assert refused.value.committed == "unknown"


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("size", [40, LARGE])
async def test_a_key_with_another_content_is_refused(make_replica, size: int, warm: bool):
    replica = make_replica(size)
    await replica.apply(b"1", key="k")
    asked = replica if warm else make_replica(size)
    with pytest.raises(KeyReused):
        await asked.session.apply(asked.request("k", "e" * 32), batch_of(b"2"))
    assert (await replica.head()).seq == 1
