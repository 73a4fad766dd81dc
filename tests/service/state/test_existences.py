"""A client's state lives while it is used, and what one existence of it left is gone with it."""

import asyncio

import pytest
import pytest_asyncio
from checker.toy import LARGE, PROBE, answer_after, batch_of
from redis.asyncio import Redis

from acclimate_service.state import Contended, StateError, StoreUnavailable
from acclimate_service.state.entries import Entries
from acclimate_service.state.journal import Journal

TTL = 60_000


async def age(admin: Redis, share: float) -> None:
    """Let a share of the state's life pass, for the keys that make it up."""
    for key in await admin.keys("acc:*"):
        if not key.endswith((b":i", b":x", b":a", b":y")):
            left = await admin.pttl(key) - share * TTL
            await (admin.pexpire(key, int(left)) if left > 0 else admin.delete(key))


@pytest_asyncio.fixture(params=["journal", "snapshot", "inline"])
async def seeded(request, make_replica):
    """A client whose state is where the parameter says, and how to make a replica for it."""
    size = 40 if request.param == "inline" else LARGE

    def make():
        return make_replica(size, state_ttl_ms=TTL, lease_ms=30)

    first = make()
    await first.apply(b"1")
    if request.param == "snapshot":
        await first.session.evict()
        assert (await first.head()).snapshot is not None
    await first.settled()
    await asyncio.sleep(0.03)  # its lease ends
    return make


@pytest.mark.parametrize("same", [True, False], ids=["by one replica", "by another one each time"])
async def test_a_client_that_is_only_read_keeps_its_state(seeded, admin: Redis, same: bool):
    reader = seeded()
    for _ in range(6):
        reader = reader if same else seeded()
        assert await reader.seen() == (1, answer_after(b"1", PROBE))
        reader.now += 0.45 * TTL / 1000
        await age(admin, 0.45)
    assert await reader.seen() == (1, answer_after(b"1", PROBE))


async def test_an_export_extends_a_life_as_well(seeded, admin: Redis):
    reader = seeded()
    for _ in range(6):
        assert (await reader.session.present()).seq == 1
        await age(admin, 0.45)


@pytest.mark.parametrize("way", ["whole", "by journal"])
async def test_what_an_earlier_existence_left_goes_when_the_next_begins(make_replica, admin: Redis, way: str):
    """Its head expires first, and for half as long again only the registry knows of its snapshot."""
    first = make_replica(LARGE, state_ttl_ms=TTL)
    await first.apply(b"1")
    await first.session.evict()
    [old] = await admin.keys("*:s:*")
    await age(admin, 1.1)
    assert await first.head() is None
    assert await admin.exists(old)
    second = make_replica(40 if way == "whole" else LARGE, state_ttl_ms=TTL)
    assert (await second.apply(b"2")).answer == answer_after(b"2")
    assert not await admin.exists(old)
    assert await second.session.delete()
    assert {key.rpartition(b":")[2] for key in await admin.keys("acc:*")} == {b"r", b"i", b"x"}
    for key in await admin.keys("acc:*"):
        assert await admin.pttl(key) > 0


async def test_what_expired_and_never_came_back_goes_with_a_delete(make_replica, admin: Redis):
    replica = make_replica(LARGE, state_ttl_ms=TTL)
    await replica.apply(b"1")
    await replica.session.evict()
    await age(admin, 1.1)
    assert await admin.keys("*:s:*")
    assert await replica.session.delete()
    assert {key.rpartition(b":")[2] for key in await admin.keys("acc:*")} == {b"r", b"i", b"x"}


async def test_a_read_does_not_mix_the_journals_of_two_existences(make_replica, monkeypatch):
    """The client is deleted, and begins again, between the two reads of a replica that opens nothing."""
    owner, reader = make_replica(LARGE), make_replica(LARGE)
    for payload in (b"1", b"2", b"3"):
        await owner.apply(payload)
    contents = Entries.contents

    async def after_a_new_beginning(self, *args):
        monkeypatch.setattr(Entries, "contents", contents)
        await owner.session.delete()
        for payload in (b"a", b"b", b"c"):
            await owner.apply(payload)
        return await contents(self, *args)

    monkeypatch.setattr(Entries, "contents", after_a_new_beginning)
    assert await reader.seen() == (3, answer_after(b"a", b"b", b"c", PROBE))


async def test_nor_their_entries(make_replica, monkeypatch):
    owner, reader = make_replica(LARGE), make_replica(LARGE)
    for payload in (b"1", b"2", b"3"):
        await owner.apply(payload)
    fetch = Entries.fetch

    async def after_a_new_beginning(self, *args):
        monkeypatch.setattr(Entries, "fetch", fetch)
        await owner.session.delete()
        for payload in (b"a", b"b", b"c"):
            await owner.apply(payload)
        return await fetch(self, *args)

    monkeypatch.setattr(Entries, "fetch", after_a_new_beginning)
    assert await reader.seen() == (3, answer_after(b"a", b"b", b"c", PROBE))


async def test_a_description_is_of_one_moment(make_replica, admin: Redis):
    replica = make_replica(LARGE)
    await replica.apply(b"1")
    before = (await admin.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert (await replica.store.describe(replica.client, replica.model)).seq == 1
    assert (await admin.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1


@pytest.mark.parametrize("answered", ["not to be read", "always elsewhere by then"])
async def test_a_repeat_that_was_found_applied_is_never_said_to_have_changed_nothing(
    make_replica, monkeypatch, answered: str
):
    owner = make_replica(LARGE, lease_ms=20, answer_max=1)
    await owner.apply(b"1", key="k")
    await owner.settled()
    await asyncio.sleep(0.03)  # its lease ends

    async def contents(*_):
        if answered == "not to be read":
            raise StoreUnavailable("Redis went away")

    monkeypatch.setattr(Entries, "contents", contents)
    if answered != "not to be read":
        monkeypatch.setattr("acclimate_service.state.replay.Replay._require_moved", contents)
    other = make_replica(LARGE, lease_ms=20)
    for ask in (lambda: other.apply(b"1", key="k"), lambda: other.session.known(other.request("k"))):
        with pytest.raises(StateError) as failed:
            await ask()
        assert failed.value.committed == "unknown"
        assert isinstance(failed.value, StoreUnavailable if answered == "not to be read" else Contended)
        assert other.session.knows(other.request("k").rid)


async def test_a_snapshot_that_fails_is_told_with_its_cause_which_a_full_journal_names(make_replica):
    replica = make_replica(LARGE, journal_entries=2, snapshot_entries=2)

    def no_disk() -> bool:
        raise OSError("no space left")

    replica.machine.refuses = no_disk
    for payload in (b"1", b"2"):
        await replica.apply(payload)
    with pytest.raises(StateError, match="snapshots of this client fail: OSError: no space left"):
        await replica.apply(b"3")
    assert "snapshot failed: OSError('no space left')" in replica.events
    assert "snapshot_failed" in replica.events


async def test_work_that_nobody_waits_for_does_not_fail_unheard(make_replica, monkeypatch):
    replica = make_replica(LARGE)

    async def answer(*_):
        raise StoreUnavailable("no answer is stored today")

    monkeypatch.setattr(Journal, "answer", answer)
    await replica.apply(b"1")
    await replica.settled()
    assert replica.events[-1] == "answers failed: StoreUnavailable('no answer is stored today')"


async def test_a_look_is_no_more_than_a_look(seeded, dump):
    reader = seeded()
    before = await dump()
    await reader.session.look(batch_of(b"look"))
    assert (await dump()).keys() == before.keys()
