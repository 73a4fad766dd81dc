"""Evidence of all clients: a sum that no retry, delay, reset, deletion or expiry makes wrong, and no client fills."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from acclimate_service.guard import pools as guard_pools
from acclimate_service.guard.evidence import WEIGHT, Counts
from acclimate_service.guard.fleet import Fleet
from acclimate_service.guard.policy import EVERY, Decision
from acclimate_service.guard.pools import MOST_CLIENTS, MOST_CONFIGURATIONS, Pools, Share
from acclimate_service.metrics import Background
from acclimate_service.state import ClientScope, Limits

MODEL = "0123456789abcdef"
ATP, EM = '{"adapter":"atp"}', '{"adapter":"em"}'
NONE = Counts()


@pytest.fixture
def make_pools(make_wire):
    return lambda secret="": Pools(Counts, make_wire(), Limits(), MODEL, "default", secret)


@pytest.fixture
def pools(make_pools, monkeypatch):
    """Places are looked for as often as they are needed."""
    monkeypatch.setattr(guard_pools, "SEARCH_MS", 0)
    return make_pools()


def rows(wins=0, losses=0, both=0, neither=0):
    return Counts(wins, losses, wins + losses + both + neither, both + losses, both + wins)


def share(wins=0, losses=0, both=0, neither=0, seq=1, life="a" * 16, born="b" * 16):
    return Share(life, seq, born, rows(wins, losses, both, neither))


async def fields_of(admin, key):
    return [field for field in await admin.hkeys(key) if not field.startswith(b"@")]


async def sums(pools):
    return {name: (sum(clients, NONE), len(clients)) for name, clients in (await pools.counted()).items()}


async def test_a_share_of_before_asked_rows_were_told_apart_counts_on(pools, admin):
    one = ClientScope("one")
    await pools.tell(one, ATP, share(3, 2, 1, 4))
    (key,) = await admin.keys("*:e")
    (field,) = [each for each in await fields_of(admin, key) if b"|" in each]
    parts = (await admin.hget(key, field)).split(b"|")
    older = b"|".join([*parts[:4], *parts[4:8], *parts[14:18]])
    await admin.hset(key, field, older)
    assert await pools.share(one, ATP) == share(3, 2, 1, 4)
    assert await sums(pools) == {ATP: (rows(3, 2, 1, 4), 1)}
    asked = Counts.of(1, 2, 2, asked=True)
    await pools.tell(one, ATP, Share("a" * 16, 2, "b" * 16, rows(3, 2, 1, 4) + asked))
    assert await sums(pools) == {ATP: (rows(3, 2, 1, 4) + asked, 1)}


async def test_shares_of_clients_are_summed_by_configuration(pools):
    one, two = ClientScope("one"), ClientScope("two")
    assert await sums(pools) == {}
    await pools.tell(one, ATP, share(1, 2, 3, 4))
    await pools.tell(two, ATP, share(6, 5))
    await pools.tell(two, EM, share(5, 5))
    assert await sums(pools) == {ATP: (rows(7, 7, 3, 4), 2), EM: (rows(5, 5), 1)}
    assert await pools.share(one, ATP) == share(1, 2, 3, 4)
    assert await pools.share(one, EM) is None


async def test_a_share_that_is_told_again_or_late_counts_once(pools):
    client, told = ClientScope("one"), [share(n, 2 * n, seq=n) for n in range(1, 10)]
    order = told * 9
    random.Random(1).shuffle(order)
    await asyncio.gather(*(pools.tell(client, ATP, each) for each in order))
    await pools.tell(client, ATP, told[-1])
    assert await sums(pools) == {ATP: (rows(9, 18), 1)}


async def test_evidence_that_began_again_adds_to_what_was_told_before(pools):
    client = ClientScope("one")
    await pools.tell(client, ATP, share(7, 7, seq=9))
    await pools.tell(client, ATP, share(1, 0, seq=11, born="c" * 16))
    assert await sums(pools) == {ATP: (rows(8, 7), 1)}
    await pools.tell(client, ATP, share(8, 8, seq=10))
    assert await sums(pools) == {ATP: (rows(8, 7), 1)}, "a late share of the record before is no news"
    known = await pools.share(client, ATP)
    assert await pools.tell(client, ATP, share(2, 2, seq=1, life="d" * 16), known.life)
    assert await sums(pools) == {ATP: (rows(10, 9), 1)}, "the life after an expiry adds to the one before"


async def test_a_share_goes_back_to_no_earlier_life(pools):
    client, later = ClientScope("one"), share(2, 2, seq=1, life="d" * 16)
    assert await pools.tell(client, ATP, later)
    for over in ("", "e" * 16):
        assert not await pools.tell(client, ATP, share(1, 1, seq=9), over), "it was told what came before"
    assert await pools.tell(client, ATP, later)
    assert await sums(pools) == {ATP: (rows(2, 2), 1)}


async def test_nothing_enters_before_a_label(pools, admin):
    await pools.tell(ClientScope("one"), ATP, share())
    assert await admin.keys() == []


async def test_shares_and_sums_are_one_key_that_expires_as_a_whole(pools, admin):
    for number in range(11):
        await pools.tell(ClientScope(f"c-{number}"), ATP, share(losses=20, seq=number))
    await pools.tell(ClientScope("other"), EM, share(1))
    (key,) = await admin.keys()
    assert 0 < await admin.pttl(key) <= 4 * Limits().state_ttl_ms
    await admin.pexpire(key, 1)
    while await admin.exists(key):  # noqa: ASYNC110 - Redis tells nobody
        await asyncio.sleep(0)
    await pools.tell(ClientScope("other"), EM, share(2, seq=2))
    for number in range(11):
        await pools.tell(ClientScope(f"c-{number}"), ATP, share(losses=20, seq=number + 1))
    assert await sums(pools) == {ATP: (rows(losses=220), 11), EM: (rows(2), 1)}


@pytest.mark.parametrize("told", [WEIGHT - 1, WEIGHT, WEIGHT + 1, 1536])
async def test_a_client_counts_with_a_bounded_number_of_rows(pools, told):
    client = ClientScope("liar")
    await pools.tell(client, ATP, share(losses=told))
    assert await sums(pools) == {ATP: (rows(losses=min(told, WEIGHT)), 1)}
    assert (await pools.share(client, ATP)).counts == rows(losses=told), "its own evidence is whole"
    await pools.tell(client, ATP, share(wins=5, losses=told, seq=2))
    await pools.tell(client, ATP, share(losses=9, seq=3, born="c" * 16))
    ((counted,),) = (await pools.counted()).values()
    assert counted.labelled == WEIGHT


async def test_which_rows_count_is_drawn_by_lot_where_more_come_at_once(pools):
    for number in range(100):
        await pools.tell(ClientScope(f"c-{number}"), ATP, share(40, 30, 20, 10))
    clients = (await pools.counted())[ATP]
    assert {each.labelled for each in clients} == {WEIGHT}
    assert len({each.wins for each in clients}) > 5
    drawn, expected = sum(clients, NONE), 100 * WEIGHT
    assert abs(drawn.wins - 0.4 * expected) < 150
    assert abs(drawn.losses - 0.3 * expected) < 150
    assert abs(drawn.labelled - drawn.wins - drawn.adapted_right + drawn.wins - 0.4 * expected) < 150


async def test_a_configuration_has_so_many_clients_and_the_first_ones_stay(pools, monkeypatch):
    assert MOST_CLIENTS == 256
    monkeypatch.setattr(guard_pools, "MOST_CLIENTS", 3)
    for number in range(4):
        await pools.tell(ClientScope(f"c-{number}"), ATP, share(1))
    assert await sums(pools) == {ATP: (rows(3), 3)}
    assert await pools.share(ClientScope("c-3"), ATP) is None
    await pools.tell(ClientScope("c-0"), ATP, share(2, seq=2))
    assert await sums(pools) == {ATP: (rows(4), 3)}
    await pools.forget(ClientScope("c-1"))
    await pools.tell(ClientScope("c-3"), ATP, share(1))
    assert await sums(pools) == {ATP: (rows(4), 3)}


async def test_a_share_that_nobody_extended_gives_its_place_away(pools, admin, monkeypatch):
    monkeypatch.setattr(guard_pools, "MOST_CLIENTS", 2)
    for name in ("one", "two"):
        await pools.tell(ClientScope(name), ATP, share(1))
    (key,) = await admin.keys()
    field = next(field for field in await admin.hkeys(key) if pools._name(ClientScope("one")).encode() in field)
    parts = (await admin.hget(key, field)).split(b"|")
    await admin.hset(key, field, b"|".join([*parts[:3], b"1", *parts[4:]]))
    await pools.tell(ClientScope("three"), ATP, share(5))
    assert await sums(pools) == {ATP: (rows(6), 2)}
    assert await pools.share(ClientScope("one"), ATP) is None


async def test_of_so_many_configurations_the_one_with_the_fewest_clients_gives_way(pools, admin, monkeypatch):
    assert MOST_CONFIGURATIONS == 16
    monkeypatch.setattr(guard_pools, "MOST_CONFIGURATIONS", 3)
    one, two = ClientScope("one"), ClientScope("two")
    for client in (one, two):
        await pools.tell(client, ATP, share(1))
    for number in range(9):
        await pools.tell(two, f"setting {number}", share(1))
    found = await pools.counted()
    assert len(found) == 3
    assert {ATP, "setting 8"} < set(found), "one client's whims leave the fleet alone"
    (key,) = await admin.keys()
    assert len(await fields_of(admin, key)) == 3 + 4


async def test_who_has_no_place_does_not_make_redis_look_for_one_each_time(pools, admin, monkeypatch):
    monkeypatch.setattr(guard_pools, "MOST_CLIENTS", 1)
    monkeypatch.setattr(guard_pools, "SEARCH_MS", 60_000)
    await pools.tell(ClientScope("one"), ATP, share(1))
    before = (await admin.info("commandstats")).get("cmdstat_hgetall", {"calls": 0})["calls"]
    for number in range(9):
        await pools.tell(ClientScope(f"c-{number}"), ATP, share(1))
    assert (await admin.info("commandstats"))["cmdstat_hgetall"]["calls"] == before + 1
    await pools.forget(ClientScope("one"))
    await pools.tell(ClientScope("c-0"), ATP, share(1))
    assert await sums(pools) == {ATP: (rows(1), 1)}


async def test_no_key_lives_for_ever_or_names_a_client(pools, admin):
    await pools.tell(ClientScope("secret-camera"), ATP, share(1, 1))
    (key,) = await admin.keys()
    assert await admin.pttl(key) > 0
    assert b"secret-camera" not in await admin.dump(key) + key


async def test_a_client_that_is_forgotten_takes_its_rows_along(pools, admin):
    one, two = ClientScope("one"), ClientScope("two")
    await pools.forget(one)
    for client, configuration in ((one, ATP), (one, EM), (two, EM)):
        await pools.tell(client, configuration, share(3, 4))
    await pools.forget(one)
    assert (await pools.share(one, ATP), await pools.share(one, EM)) == (None, None)
    assert await sums(pools) == {EM: (rows(3, 4), 1)}
    (key,) = await admin.keys()
    assert len(await fields_of(admin, key)) == 2, "the other client's share, and the name of its configuration"
    await pools.forget(two)
    assert await admin.keys() == []


async def test_what_is_forgotten_of_one_life_spares_the_share_of_the_next(pools):
    client = ClientScope("one")
    await pools.tell(client, ATP, share(1, life="a" * 16))
    await pools.tell(client, ATP, share(2, life="d" * 16), "a" * 16)
    await pools.forget(client, "a" * 16)
    assert (await pools.share(client, ATP)).counts == rows(2)
    await pools.forget(client, "d" * 16)
    assert await pools.share(client, ATP) is None


async def test_after_a_reset_only_rows_count_that_are_told_from_then_on(pools):
    one, two = ClientScope("one"), ClientScope("two")
    await pools.tell(one, ATP, share(losses=500))
    await pools.tell(two, EM, share(3, 4, 5, 6))
    await pools.reset()
    assert await sums(pools) == {}
    await pools.tell(one, ATP, share(losses=500, seq=1))
    await pools.tell(one, ATP, share(wins=2, losses=501, seq=2))
    await pools.tell(two, EM, share(3, 4, 5, 7, seq=2))
    assert await sums(pools) == {ATP: (rows(2, 1), 1), EM: (rows(neither=1), 1)}


async def test_names_of_clients_depend_on_the_secret(make_pools, admin):
    client = ClientScope("camera-7")
    for secret in ("", "one", "another"):
        await make_pools(secret).tell(client, ATP, share(1, 1))
    (key,) = await admin.keys()
    fields = await fields_of(admin, key)
    assert len(fields) == 1 + 3
    assert client.digest.hex().encode() not in b" ".join(fields)


@pytest.fixture
def fleet(pools):
    return Fleet(pools, "follow-fleet", Background(CollectorRegistry()))


async def told_by(fleet, driver, life, counts, seq=1, born="b" * 16):
    await fleet.tell(driver.client, ATP, life=life, seq=seq, born=born, counts=counts)


async def life_of(driver):
    return (await driver.load()).basis.life


async def test_labels_of_a_client_that_is_deleted_meanwhile_say_nothing(fleet, pools, driver, monkeypatch):
    await driver.committed()
    life = await life_of(driver)
    await told_by(fleet, driver, life, rows(losses=3))
    assert await sums(pools) == {ATP: (rows(losses=3), 1)}
    await driver.store.delete(driver.client)
    await pools.forget(driver.client)
    await told_by(fleet, driver, life, rows(losses=4), seq=2)
    assert await sums(pools) == {}, "told after the client was forgotten"
    await driver.committed()
    life, tell = await life_of(driver), pools.tell

    async def tell_late(*args):
        await driver.store.delete(driver.client)
        await pools.forget(driver.client)
        return await tell(*args)

    monkeypatch.setattr(pools, "tell", tell_late)
    await told_by(fleet, driver, life, rows(losses=4))
    assert await sums(pools) == {}, "forgotten while it was being told"


async def test_late_labels_of_an_earlier_life_are_not_counted_in_the_next_one(fleet, pools, driver):
    await driver.committed()
    earlier = await life_of(driver)
    await driver.store.delete(driver.client)
    await pools.forget(driver.client)
    await driver.committed()
    now = await life_of(driver)
    for seq in (1, 2):
        await told_by(fleet, driver, now, rows(wins=seq), seq=seq)
        await told_by(fleet, driver, earlier, rows(losses=9), seq=7 + seq)
    assert await sums(pools) == {ATP: (rows(wins=2), 1)}


async def test_labels_that_the_next_life_overtakes_take_no_place_of_its_own(fleet, pools, driver, monkeypatch):
    await driver.committed()
    earlier, tell = await life_of(driver), pools.tell

    async def tell_late(*args):
        monkeypatch.setattr(pools, "tell", tell)
        await driver.store.delete(driver.client)
        await pools.forget(driver.client)
        await driver.committed()
        await told_by(fleet, driver, await life_of(driver), rows(wins=2))
        return await tell(*args)

    monkeypatch.setattr(pools, "tell", tell_late)
    await told_by(fleet, driver, earlier, rows(losses=4))
    await told_by(fleet, driver, await life_of(driver), rows(wins=3), seq=2)
    assert await sums(pools) == {ATP: (rows(wins=3), 1)}


async def test_the_fleet_follows_several_clients_that_agree_and_no_single_one(fleet, pools):
    for number in range(4):
        await pools.tell(ClientScope(f"liar-{number}"), ATP, share(losses=1536))
        await fleet.pooled()
        assert fleet.against() == {}
    await pools.tell(ClientScope("honest"), ATP, share(losses=12))
    await fleet.pooled()
    assert fleet.against() == {ATP: Decision("frozen", "fleet_harmful")}
    await pools.forget(ClientScope("liar-0"))
    await fleet.pooled()
    assert fleet.against() == {}
    await fleet.reset()
    assert fleet.heard() == {}
    await fleet.aclose()


@pytest.mark.parametrize(("policy", "against"), [("frozen", {EVERY: Decision("frozen", "policy")}), ("adapt", {})])
async def test_a_fixed_policy_holds_for_every_configuration_before_anything_was_heard(pools, policy, against):
    assert Fleet(pools, policy, Background(CollectorRegistry())).against() == against


async def test_evidence_that_cannot_be_read_is_said_with_its_cause_until_it_can(fleet, pools, admin, caplog):
    await admin.set(pools._pool, "of another kind")
    fleet.heard()
    while not fleet._background.failing:  # noqa: ASYNC110 - it is there for those who ask
        await asyncio.sleep(0)
    assert "evidence failed in the background" in caplog.text
    assert "WRONGTYPE" in str(fleet._background.failing["evidence"].error)
    await admin.delete(pools._pool)
    await fleet.pooled()
    assert not fleet._background.failing
    await fleet.aclose()
