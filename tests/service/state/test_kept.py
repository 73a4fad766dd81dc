"""Earlier states that are kept: which, how they are gone back to, and that they end with the client."""

import pytest
from checker.toy import LARGE, PROBE, Toy, advance, answer_after, answer_of, initial

from acclimate_service.state import Change, Policy, StateCorrupt, VersionUnknown
from acclimate_service.state.redis.keys import MOST_KEPT

SIZES = pytest.mark.parametrize("size", [40, LARGE], ids=["whole", "by journal"])
MINUTE = 60_000


@pytest.fixture
def make_keeper(make_replica, admin):
    """A replica that keeps states, and snapshots every batch."""

    def make(size: int = 40, machine: Toy | None = None, keep: int = 3, client: str = "cam-7", **limits: int):
        limits = {"keep_every_ms": 500, "snapshot_entries": 1, "lease_ms": 50, **limits}
        replica = make_replica(size, machine, client, policy=Policy("{}", keep=keep), **limits)
        replica.admin = admin
        return replica

    return make


async def kept(replica) -> list[int]:
    described = await replica.store.describe(replica.client, replica.model)
    return [each.seq for each in described.kept] if described else []


async def send(replica, *payloads: bytes, apart_ms: int = 1000) -> None:
    """Each is stored whole, and some time passes, before the next one comes."""
    for payload in payloads:
        await replica.apply(payload)
        await replica.session._snapshotter.finish()
        await pass_time(replica, apart_ms)


async def pass_time(replica, ms: int) -> None:
    """Let all that is stored of the client have been stored so much earlier."""
    admin, head, index = replica.admin, replica.client.head(replica.model), replica.client.kept(replica.model)[0]
    await admin.hincrby(head, "at", -ms)
    for slot, text in (await admin.hgetall(index)).items():
        seq, at, rest = text.split(b"|", 2)
        await admin.hset(index, slot, b"|".join((seq, b"%d" % (int(at) - ms), rest)))
    replica.now += ms / 1000


async def roll_back(replica, version: int = 0, key: str | None = None):
    async def change(present):
        earlier = await replica.session.earlier(version)
        return Change(earlier.config, earlier.state, answer_of(earlier.state), back=earlier.seq)

    return await replica.session.apply(replica.request(key), change)


@SIZES
async def test_a_client_goes_back_to_what_it_was_and_goes_on_from_there(make_keeper, size: int):
    replica = make_keeper(size)
    await send(replica, b"1", b"2", b"3")
    assert await kept(replica) == [2, 1]
    applied = await roll_back(replica)
    assert (applied.seq, applied.answer) == (4, answer_after(b"1", b"2"))
    for each in (replica, make_keeper(size)):
        assert await each.seen() == (4, answer_after(b"1", b"2", PROBE))
    assert await kept(replica) == [1]
    assert (await replica.apply(b"4")).answer == answer_after(b"1", b"2", b"4")


@SIZES
async def test_each_further_rollback_goes_further_back_until_nothing_is_kept(make_keeper, size: int):
    replica = make_keeper(size)
    await send(replica, b"1", b"2", b"3", b"4")
    assert await kept(replica) == [3, 2, 1]
    assert (await roll_back(replica)).answer == answer_after(b"1", b"2", b"3")
    assert (await roll_back(replica, 1)).answer == answer_after(b"1")
    assert await kept(replica) == []
    with pytest.raises(VersionUnknown, match="no earlier version of the client is kept; those that are: none"):
        await roll_back(replica)


@SIZES
async def test_what_is_no_longer_kept_leaves_nothing_behind(make_keeper, admin, size: int):
    replica = make_keeper(size)
    await send(replica, *(b"%d" % number for number in range(8)))
    slots = replica.client.kept(replica.model)[1:]
    assert len(await kept(replica)) == await admin.exists(*slots) == 3
    await roll_back(replica)
    assert len(await kept(replica)) == await admin.exists(*slots) == 2


async def test_a_state_is_kept_as_it_was_in_a_place_that_outlived_its_entry(make_keeper, admin):
    """What was there had more chunks; the index, which lives shorter than they, has forgotten them."""
    replica = make_keeper()
    slot = replica.client.kept(replica.model)[1]
    await replica.apply(b"1")
    await admin.hset(slot, mapping={"0": b"old", "1": b"older"})
    await pass_time(replica, 1000)
    await send(replica, b"2")
    assert await admin.hlen(slot) == 1
    assert (await roll_back(replica)).answer == answer_after(b"1")


@pytest.mark.parametrize("later", [40, LARGE], ids=["whole", "by journal"])
async def test_a_snapshot_that_is_lost_is_not_kept_and_stops_nothing(make_keeper, admin, later: int):
    """The replica has the state in memory, and goes on from there."""
    replica = make_keeper(machine=Toy(lambda count: LARGE if count < 2 else later))
    await send(replica, b"1")
    (snapshot,) = await admin.keys("*:s:*")
    await admin.delete(snapshot)
    await send(replica, b"2")
    assert await kept(replica) == []
    assert await replica.seen() == (2, answer_after(b"1", b"2", PROBE))
    assert await make_keeper(later).seen() == (2, answer_after(b"1", b"2", PROBE))


async def test_a_version_that_is_not_kept_is_refused_with_those_that_are(make_keeper):
    replica = make_keeper()
    await send(replica, b"1", b"2", b"3")
    with pytest.raises(VersionUnknown, match="version 3 of the client is not kept; those that are: 2, 1"):
        await roll_back(replica, 3)
    assert (await replica.head()).seq == 3


@SIZES
async def test_a_repeated_rollback_does_not_go_back_again(make_keeper, size: int):
    one, two = make_keeper(size), make_keeper(size)
    await send(one, b"1", b"2", b"3")
    first = await roll_back(one, key="k")
    await send(one, b"4")
    for replica in (one, two):
        again = await roll_back(replica, key="k")
        assert (again.seq, again.answer, again.replayed) == (4, first.answer, "stored")
    assert (await one.head()).seq == 5


@SIZES
async def test_a_state_comes_back_with_its_configuration(make_keeper, size: int):
    replica = make_keeper(size)
    await send(replica, b"1", b"2")
    await replica.session.reset(replica.request(), "other")
    await send(replica, b"3")
    await roll_back(replica, 1)
    assert (await replica.head()).config == "{}"
    await replica.session.reset(replica.request())
    assert await replica.seen() == (6, answer_of(advance(initial("{}"), PROBE)))


async def test_the_further_back_the_wider_apart(make_keeper):
    """As many minutes as versions."""
    replica, ages = make_keeper(keep_every_ms=MINUTE), list[list[int]]()
    for number in range(60):
        await send(replica, b"%d" % number, apart_ms=MINUTE)
        ages.append([number + 1 - version for version in await kept(replica)])
    assert all(len(each) <= 3 for each in ages)
    assert all(each[0] == 1 for each in ages[1:])
    assert all(2 <= each[1] <= 6 for each in ages[2:])
    assert all(5 <= each[2] <= 25 for each in ages[30:])
    assert max(each[2] for each in ages[30:]) >= 16


async def test_nothing_is_kept_before_its_time_and_nothing_at_all_where_nothing_is_to_be(make_keeper):
    early, never = make_keeper(keep_every_ms=MINUTE), make_keeper(keep=0, client="never")
    for replica in (early, never):
        await send(replica, b"1", b"2", b"3", b"4")
    assert await kept(early) == [1]
    assert await kept(never) == []


@pytest.mark.parametrize("keep", [1, MOST_KEPT])
async def test_as_many_are_kept_as_the_operator_says_and_fewer_once_he_says_fewer(make_keeper, keep: int):
    replica = make_keeper(keep=keep)
    await send(replica, *(b"%d" % number for number in range(12)))
    assert len(await kept(replica)) == keep
    fewer = make_keeper(keep=1)
    await send(fewer, b"a", b"b")
    assert len(await kept(fewer)) == 1


async def test_batches_that_keep_nothing_are_one_exchange_of_no_further_keys(make_keeper, monkeypatch):
    replica = make_keeper(keep_every_ms=MINUTE)
    await send(replica, b"1", b"2")
    sent, run = [], replica.store._wire.run
    monkeypatch.setattr(
        replica.store._wire,
        "run",
        lambda script, keys, args: sent.append((script.name, len(keys))) or run(script, keys, args),
    )
    await send(replica, b"3", b"4")
    assert sent == [("commit", 10), ("commit", 10)]


@SIZES
async def test_kept_states_end_with_the_client_and_live_no_longer_than_it(make_keeper, admin, size: int):
    replica = make_keeper(size, state_ttl_ms=10_000)
    await send(replica, b"1", b"2", b"3")
    index, *slots = replica.client.kept(replica.model)
    life = await admin.pttl(replica.client.head(replica.model))
    assert 0 < await admin.pttl(index) <= life
    lives = [await admin.pttl(slot) for slot in slots]
    assert [life > 0 for life in lives] == [True, True] + [False] * (MOST_KEPT - 2)
    await replica.session.delete()
    await admin.pexpire(replica.client.lease(replica.model), 1)
    left = {key.rpartition(b":")[2] for key in await admin.keys("acc:{default/cam-7}:*")}
    assert left <= {b"r", b"i", b"x", b"l"}
    assert (await replica.apply(b"4")).seq == 1
    assert await kept(replica) == []


@SIZES
async def test_a_damaged_state_is_not_gone_back_to(make_keeper, admin, size: int):
    replica = make_keeper(size)
    await send(replica, b"1", b"2", b"3")
    for slot in replica.client.kept(replica.model)[1:]:
        if await admin.exists(slot):
            await admin.hset(slot, "0", b"damaged")
    with pytest.raises(StateCorrupt):
        await roll_back(replica)
    assert (await replica.apply(b"4")).answer == answer_after(b"1", b"2", b"3", b"4")


async def test_a_state_that_outgrew_its_head_is_kept_as_it_was(make_keeper):
    replica = make_keeper(machine=Toy(lambda count: 40 if count < 3 else LARGE), keep=4)
    await send(replica, b"1", b"2", b"3", b"4", b"5")
    assert await kept(replica) == [4, 3, 2, 1]
    assert (await roll_back(replica, 4)).answer == answer_after(b"1", b"2", b"3", b"4")
    assert (await roll_back(replica, 2)).answer == answer_after(b"1", b"2")


async def test_a_value_of_another_type_is_said_and_goes_with_the_client(make_keeper, admin):
    replica = make_keeper()
    await send(replica, b"1", b"2")
    index, slot = replica.client.kept(replica.model)[:2]
    await admin.delete(index, slot)
    await admin.set(index, "x")
    await admin.set(slot, "x")
    await replica.session.delete()
    assert not await admin.exists(index, slot)


@SIZES
async def test_a_client_that_begins_anew_has_nothing_of_one_that_expired(make_keeper, admin, size: int):
    """Whose replicas had different lifetimes, so that the head went first."""
    replica = make_keeper(size)
    await send(replica, b"1", b"2", b"3")
    await admin.delete(replica.client.head(replica.model), replica.client.registry)
    again = make_keeper(size)
    assert (await again.apply(b"4")).seq == 1
    assert await kept(again) == []
    assert not await admin.exists(*again.client.kept(again.model))
