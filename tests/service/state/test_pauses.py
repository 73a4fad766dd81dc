"""A client whose batches are not folded in for a while: in order with all else, on every replica, exactly once."""

import pytest
from checker.toy import LARGE, PROBE, advance, answer_after, answer_of, batch_of, initial

from acclimate_service.state import Paused

SIZES = pytest.mark.parametrize("size", [40, LARGE], ids=["whole", "by journal"])


async def stop(replica, paused: bool, key: str | None = None):
    return await replica.session.apply(
        replica.request(key), lambda present: replica.machine.stop(present, paused=paused)
    )


async def fold(replica, payload: bytes, key: str | None = None):
    return await replica.session.apply(replica.request(key), batch_of(payload), while_paused=False)


@SIZES
async def test_no_replica_folds_a_batch_in_until_the_client_goes_on(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    await fold(one, b"1")
    assert (await stop(two, paused=True)).seq == 2
    for replica in (one, two, make_replica(size)):
        with pytest.raises(Paused) as refused:
            await fold(replica, b"2")
        assert refused.value.committed is False
        looked = await replica.session.look(batch_of(PROBE))
        assert (looked.seq, looked.paused, looked.answer) == (
            2,
            True,
            answer_of(advance(advance(initial("{}"), b"1"), PROBE)),
        )
    assert (await one.store.describe(one.client, one.model)).paused
    await stop(one, paused=False)
    applied = await fold(two, b"3")
    assert (applied.seq, applied.answer) == (4, answer_after(b"1", b"3"))
    assert not (await one.store.describe(one.client, one.model)).paused


@SIZES
async def test_a_batch_applied_before_gets_its_answer_and_one_refused_may_be_applied_later(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    first = await fold(one, b"1", key="before")
    await stop(one, paused=True, key="pause")
    for replica in (one, two):
        again = await fold(replica, b"1", key="before")
        assert (again.seq, again.answer) == (1, first.answer)
        with pytest.raises(Paused):
            await fold(replica, b"2", key="meanwhile")
    await stop(two, paused=False)
    assert (await stop(one, paused=True, key="pause")).replayed == "stored"
    assert (await fold(one, b"2", key="meanwhile")).answer == answer_after(b"1", b"2")


@SIZES
async def test_a_reset_a_change_of_the_state_and_other_work_leave_the_pause(make_replica, size: int):
    replica = make_replica(size)
    await fold(replica, b"1")
    await stop(replica, paused=True)
    await replica.session.reset(replica.request(), "other")
    await replica.rework(b"x")
    await replica.apply(b"labels")
    with pytest.raises(Paused):
        await fold(replica, b"2")
    await replica.session.reset(replica.request(), paused=False)
    assert (await fold(replica, b"3")).seq == 7


@SIZES
async def test_a_pause_ends_with_the_client(make_replica, size: int):
    replica = make_replica(size)
    await stop(replica, paused=True)
    await replica.session.delete()
    assert (await fold(replica, b"1")).answer == answer_after(b"1")


async def test_looks_at_a_paused_client_extend_its_life(make_replica, admin):
    replica = make_replica(state_ttl_ms=10_000)
    await stop(replica, paused=True)
    for key in await admin.keys("*:h"):
        await admin.pexpire(key, 4_000)
    await replica.session.look(batch_of(PROBE))
    assert (await replica.store.describe(replica.client, replica.model)).ttl_ms > 5_000
