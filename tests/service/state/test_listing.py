"""Clients are listed step by step, on all servers of a cluster, and of one owner alone."""

import pytest
from redis.asyncio import Redis

from acclimate_service.state import Change, ClientScope, Listing, StaleCursor, StateStore
from acclimate_service.state.outcomes import Attempt
from acclimate_service.state.records import Basis
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_service.state.redis.keys import random_rid

ONE, TWO = "1" * 16, "2" * 16
CONFIG = '{"adapter":"atp","hyperparameters":{}}'


async def commit(store: StateStore, client: ClientScope, model: str = ONE) -> None:
    basis, attempt = (await store.load(client, model)).basis, Attempt(random_rid(), "f" * 32)
    assert isinstance(basis, Basis)
    await store.commit(client, model, basis, attempt, Change(CONFIG, b"state", b""), adapter="atp")


async def all_of(listing: Listing, owner: str = "", count: int = 7) -> list[str]:
    """Step by step, each from the text of the place before."""
    found, walk = list[str](), await listing.walk()
    while not walk.over:
        clients, walk = await listing.step(walk, owner, count)
        found += [each.client for each in clients]
        walk = walk if walk.over else await listing.walk(str(walk))
    return found


async def test_each_owners_clients_of_a_model_are_listed_apart(driver) -> None:
    names = [f"c{number}" for number in range(40)]
    for name in names:
        await commit(driver.store, ClientScope(name))
    for client in (ClientScope("one/a"), ClientScope("on/b"), ClientScope("c0", "default~other")):
        await commit(driver.store, client)
    await commit(driver.store, ClientScope("elsewhere"), TWO)
    wire = driver.store._wire
    assert sorted(set(await all_of(Listing(wire, "default", ONE)))) == sorted(names)
    assert await all_of(Listing(wire, "default", ONE), "one") == ["one/a"]
    assert await all_of(Listing(wire, "default", ONE), "o") == []
    assert await all_of(Listing(wire, "default~other", ONE)) == ["c0"]


async def test_a_client_says_when_it_changed_last(driver, make_replica, admin: Redis) -> None:
    """A batch in the journal and a reset are changes; a snapshot that is taken of them is none."""
    replica = make_replica(size=400)
    wire, client = driver.store._wire, replica.client
    listing = Listing(wire, client.tenant, replica.model)
    seen = []
    for change in (lambda: replica.apply(b"x"), lambda: replica.apply(b"y"), lambda: driver_reset(replica)):
        await change()
        (listed,) = await listing.describe([client])
        seconds, micros = await admin.time()
        assert -1 < 1000 * seconds + micros / 1000 - listed.changed_ms < 2000  # noted as a whole number
        seen.append(listed)
    assert [each.seq for each in seen] == [1, 2, 3]
    assert sorted(each.changed_ms for each in seen) == [each.changed_ms for each in seen]
    await admin.hset(client.head(replica.model), "at", "9" * 13)
    (listed,) = await listing.describe([client])
    assert listed.changed_ms == seen[-1].changed_ms
    await admin.hdel(client.head(replica.model), "on", "at")
    (listed,) = await listing.describe([client])
    assert listed.changed_ms is None


async def driver_reset(replica) -> None:
    await replica.session.reset(replica.request())


async def test_who_is_gone_is_not_described(driver) -> None:
    listing = Listing(driver.store._wire, "default", ONE)
    await commit(driver.store, ClientScope("there"))
    found = await listing.describe([ClientScope("gone"), ClientScope("there")])
    assert [(each.client.client, each.seq, each.config, each.paused) for each in found] == [("there", 1, CONFIG, False)]
    assert await listing.footprint(found[0]) > len(b"state")


@pytest.mark.parametrize("text", ["x", "0" * 16, "{mark}.1.0", "{mark}.-1.0", "{mark}.0.x", "0000000000000000.0.0"])
async def test_what_is_no_cursor_of_these_servers_is_refused(driver, text: str) -> None:
    listing = Listing(driver.store._wire, "default", ONE)
    mark = (await listing.walk()).mark
    with pytest.raises(StaleCursor, match="begin it again without a cursor"):
        await listing.walk(text.replace("{mark}", mark))


async def test_a_cursor_is_of_no_use_once_redis_was_started_again(tmp_path, make_wire) -> None:
    async with EmbeddedRedis(tmp_path) as server:
        before = str(await Listing(make_wire(server.url), "default", ONE).walk())
    async with EmbeddedRedis(tmp_path) as server:
        with pytest.raises(StaleCursor):
            await Listing(make_wire(server.url), "default", ONE).walk(before)


async def test_all_servers_of_a_cluster_are_walked_over(make_driver, cluster_link) -> None:
    driver = make_driver(link=cluster_link)
    names = [f"c{number}" for number in range(30)]
    for name in names:
        await commit(driver.store, ClientScope(name))
    listing = Listing(driver.store._wire, "default", ONE)
    assert len((await listing.walk()).servers) > 1
    assert sorted(set(await all_of(listing))) == sorted(names)
