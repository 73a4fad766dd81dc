"""What becomes of a batch whose step fails or whose caller goes away, and of clients that are reset or deleted."""

import asyncio
from dataclasses import replace

import pytest
from checker.toy import LARGE, PROBE, Toy, ToyFailure, answer_after, batch_of, failing_once

from acclimate_service.state import ClientDeleted, ClientUnknown, KeyUsedBeforeDelete, StepFailed

# Failing steps.


async def test_a_batch_that_nobody_waits_for_is_not_begun(make_replica):
    replica = make_replica(LARGE)
    await replica.apply(b"1")

    async def refuse() -> None:
        raise TimeoutError("too late")

    request = replace(replica.request(), admit=refuse)
    with pytest.raises(TimeoutError):
        await replica.session.apply(request, batch_of(b"2"))
    assert (await replica.apply(b"3")).status == "warm"
    assert await replica.seen() == (2, answer_after(b"1", b"3", PROBE))


@pytest.mark.parametrize("size", [40, LARGE])
async def test_a_step_that_fails_changes_nothing_and_may_be_tried_again(make_replica, size: int):
    replica = make_replica(machine=failing_once(size))
    with pytest.raises(StepFailed) as failed:
        await replica.apply(b"1", key="k")
    assert failed.value.committed is False
    assert isinstance(failed.value.__cause__, ToyFailure)
    applied = await replica.apply(b"1", key="k")
    assert (applied.seq, applied.replayed, applied.answer) == (1, "none", answer_after(b"1"))


async def test_a_step_that_fails_after_its_entry_was_taken_over_is_unknown(make_replica):
    machine, two = Toy(lambda count: LARGE), make_replica(LARGE)
    one = make_replica(machine=machine)
    step = machine.step

    async def overtaken(state, batch, start):
        await step(state, batch, start)
        await two.apply(b"2")
        raise ToyFailure

    machine.step = overtaken
    with pytest.raises(StepFailed) as failed:
        await one.apply(b"1", key="k")
    assert failed.value.committed == "unknown"
    machine.step = step
    assert (await one.apply(b"1", key="k")).answer == answer_after(b"1")


async def test_a_caller_who_goes_away_leaves_an_entry_that_is_applied(make_replica):
    machine, begun = Toy(lambda count: LARGE), asyncio.Event()
    replica = make_replica(machine=machine)
    step = machine.step

    async def endless(state, batch, start):
        await step(state, batch, start)
        begun.set()
        await asyncio.Event().wait()

    machine.step = endless
    caller = asyncio.create_task(replica.apply(b"1", key="k"))
    await begun.wait()
    for _ in range(100):
        head = await replica.head()
        if head and head.seq:
            break
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    machine.step = step
    assert (await replica.apply(b"2")).answer == answer_after(b"1", b"2")
    assert (await replica.apply(b"1", key="k")).answer == answer_after(b"1")


# Reset, configuration, deletion.


@pytest.mark.parametrize("size", [40, LARGE])
async def test_a_reset_starts_over_at_the_next_version(make_replica, size: int):
    replica = make_replica(size)
    await replica.apply(b"1")
    reset = await replica.session.reset(replica.request("r"))
    assert (reset.seq, reset.status, reset.answer) == (2, "reset", None)
    again = await replica.session.reset(replica.request("r"))
    assert (again.seq, again.replayed) == (2, "stored")
    applied = await replica.apply(b"2")
    assert (applied.seq, applied.status, applied.answer) == (3, "reset", answer_after(b"2"))


@pytest.mark.parametrize("size", [40, LARGE])
async def test_a_configuration_holds_for_all_replicas(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    await one.apply(b"1")
    await two.session.reset(two.request(), '{"rate":2}')
    for number, replica in enumerate((one, two), start=1):
        payloads = (b"2", b"3")[:number]
        assert (await replica.apply(payloads[-1])).answer == answer_after(*payloads, config='{"rate":2}')


async def test_there_is_no_reset_of_an_unknown_client(make_replica):
    replica = make_replica()
    with pytest.raises(ClientUnknown) as unknown:
        await replica.session.reset(replica.request())
    assert unknown.value.committed is False


async def test_a_reset_that_found_nothing_may_still_land_if_its_copy_is_on_the_way(make_replica, link):
    replica, here = make_replica(url=link.url), make_replica()
    await make_replica(model="f" * 16).apply(b"life")
    request = replica.request()
    link.fault("hold", request.rid)  # the reset's first copy: the load before it carries no key
    with pytest.raises(ClientUnknown) as unknown:
        await replica.session.reset(request)
    assert unknown.value.committed == "unknown"
    assert (await here.apply(b"1")).seq == 1


@pytest.mark.parametrize("size", [40, LARGE])
async def test_a_deleted_client_begins_anew(make_replica, size: int):
    one, two = make_replica(size), make_replica(size)
    first = await one.apply(b"1", key="k")
    assert await two.session.delete()
    assert not await two.session.delete()
    applied = await one.apply(b"2")
    assert (applied.seq, applied.answer) == (1, answer_after(b"2"))
    assert applied.life != first.life
    with pytest.raises(KeyUsedBeforeDelete):
        await two.apply(b"1", key="k")


@pytest.mark.parametrize("size", [40, LARGE])
async def test_a_delete_under_a_running_request_ends_it(make_replica, size: int):
    machine, two = Toy(lambda count: size), make_replica(size)
    await two.apply(b"0")
    await two.session.evict()
    one, step = make_replica(machine=machine), machine.step

    async def deleted(state, batch, start):
        async def begin() -> None:
            await two.session.delete()
            await start()

        return await step(state, batch, begin)

    machine.step = deleted
    with pytest.raises(ClientDeleted) as ended:
        await one.apply(b"1")
    assert ended.value.committed is False
    assert (await two.head()) is None


@pytest.mark.parametrize("size", [40, LARGE], ids=["small", "large"])
async def test_what_was_meant_for_a_life_that_ended_begins_no_other(make_replica, size: int):
    replica = make_replica(size)
    life = (await replica.apply(b"1")).life
    late = replace(replica.request(), life=life)
    assert (await replica.session.apply(late, batch_of(b"2"))).seq == 2
    await replica.session.delete()
    for begun in (False, True):  # there is no client, and then one that began anew and is in memory
        if begun:
            await replica.apply(b"1")
        before = await replica.head()
        for session in (replica.session, make_replica(size).session):
            with pytest.raises(ClientDeleted) as refused:
                await session.apply(replace(replica.request(), life=life), batch_of(b"3"))
            assert refused.value.committed is False
        assert await replica.head() == before
