"""A tenant has so many clients at a time; who is there stays, and who leaves makes room."""

import asyncio
from dataclasses import replace

import pytest

from acclimate_service.state import Limits
from acclimate_service.state.errors import TooManyBytes, TooManyClients
from acclimate_service.state.places import Places, Usage
from acclimate_service.state.writer import _BEGINNING

MOST = 3


@pytest.fixture
def places(make_wire):
    return Places(make_wire(), Limits(), tenant="default", most=MOST)


@pytest.fixture
def make_client(make_replica, places):
    """A session of a client that is counted; `size` decides how its state is kept."""

    def make(name, size=40):
        client = make_replica(size, client=name)
        counted = replace(client.session._context, places=places)
        client.session.__init__(counted)
        return client

    return make


@pytest.mark.parametrize("size", [40, 400], ids=["whole", "by journal"])
async def test_the_last_client_begins_and_the_next_one_does_not(make_client, admin, size):
    clients = [make_client(f"cam-{number}", size) for number in range(MOST + 1)]
    for client in clients[:MOST]:
        await client.apply(b"one")
    for _ in range(2):
        with pytest.raises(TooManyClients, match=r"3 clients, which is the most \(ACCLIMATE_MAX_CLIENTS\)") as refused:
            await clients[MOST].apply(b"one")
        assert refused.value.committed is False
    assert await admin.keys("acc:{default/cam-3}:*") == []
    for client in clients[:MOST]:
        assert (await client.apply(b"two")).seq == 2
    await clients[0].session.delete()
    assert (await clients[MOST].apply(b"one")).seq == 1
    with pytest.raises(TooManyClients):
        await clients[0].apply(b"one")


async def test_whole_states_are_refused_alike(make_client):
    for number in range(MOST):
        await make_client(f"cam-{number}").rework(b"x")
    with pytest.raises(TooManyClients):
        await make_client("cam-9").rework(b"x")


async def test_of_many_that_begin_at_once_as_many_do_as_there_are_places(make_client):
    clients = [make_client(f"cam-{number}") for number in range(20)]
    outcomes = await asyncio.gather(*(client.apply(b"one") for client in clients), return_exceptions=True)
    assert sum(isinstance(each, TooManyClients) for each in outcomes) == 20 - MOST
    assert sum(not isinstance(each, Exception) for each in outcomes) == MOST


async def test_a_client_that_is_there_already_is_counted_and_never_refused(make_client, make_replica):
    early = [make_replica(client=f"early-{number}") for number in range(MOST + 1)]
    for each in early:
        await each.apply(b"one")
    for number in range(MOST + 1):
        assert (await make_client(f"early-{number}").apply(b"two")).seq == 2
    with pytest.raises(TooManyClients):
        await make_client("new").apply(b"one")


async def taken(admin):
    """Bytes that are counted, of each client and of all."""
    (key,) = await admin.keys("*~clients}:b")
    return {name: int(nbytes) for name, nbytes in (await admin.hgetall(key)).items()}


async def grown(client, admin):
    """A client after its second change, with which its bytes are counted as Redis counts them."""
    await client.rework(b"x")
    before = await client.store.footprint(client.client, client.model)
    await client.rework(b"y")
    return before


async def test_bytes_are_those_that_redis_counts_and_go_with_their_clients(make_client, places, admin):
    clients = [make_client(f"cam-{number}", 40 * (number + 1)) for number in range(MOST)]
    sizes = [await grown(each, admin) for each in clients]
    found = await taken(admin)
    assert sorted(sizes) == sorted(nbytes for name, nbytes in found.items() if name)
    assert found[b""] == sum(sizes)
    assert await places.usage("") == Usage(clients=MOST, most_clients=MOST, nbytes=sum(sizes), most_bytes=None)
    await clients[0].session.delete()
    assert (await places.usage("")).nbytes == sum(sizes[1:])
    (key,) = await admin.keys("*~clients}:n")
    (last,) = (name for name, nbytes in found.items() if name and nbytes == sizes[2])
    await admin.zadd(key, {last: 1})  # its time is over
    assert await places.usage("") == Usage(clients=1, most_clients=MOST, nbytes=sizes[1], most_bytes=None)


async def test_a_client_that_grew_is_counted_anew_and_one_that_did_not_is_not(make_client, admin):
    client = make_client("cam", 40)
    await grown(client, admin)
    await client.apply(b"z")
    counted = await taken(admin)
    await client.apply(b"z")
    assert await taken(admin) == counted
    for _ in range(40):
        await client.apply(b"batch")
    now = await client.store.footprint(client.client, client.model)
    assert now - (await taken(admin))[b""] <= max(Limits().uncounted_bytes, now / 4)


async def test_a_reset_gives_bytes_back(make_client, admin):
    client = make_client("cam", 3000)
    await grown(client, admin)
    before = (await taken(admin))[b""]
    client.machine.size_of = lambda count: 40
    await client.session.reset(client.request(None))
    await client.rework(b"small")
    assert (await taken(admin))[b""] < before - 2000


async def test_beyond_their_bytes_no_client_begins_or_grows_and_the_others_go_on(make_client, places, admin):
    one, two = make_client("one", 400), make_client("two", 400)
    for client in (one, two):
        for payload in (b"one", b"two"):
            await client.apply(payload)
    total = (await places.usage("")).nbytes
    places._most_bytes = most = total + _BEGINNING + 300
    with pytest.raises(TooManyBytes, match=rf"take {total:,} bytes of {most:,} \(ACCLIMATE_TENANT_BYTES\)") as no:
        await make_client("three", 301).apply(b"one")
    assert (no.value.committed, no.value.left) == (False, _BEGINNING + 300)
    assert await admin.keys("acc:{default/three}:*") == []
    assert (await make_client("three", 300).apply(b"one")).seq == 1
    outcomes = [await asyncio.gather(two.apply(b"batch"), return_exceptions=True) for _ in range(100)]
    assert [type(each) for (each,) in outcomes[-10:]] == [TooManyBytes] * 10
    assert (await places.usage("")).nbytes <= most
    for _ in range(3):
        await one.apply(b"same")
    before = await places.usage("")
    await two.session.delete()
    after = await places.usage("")
    assert (after.clients, after.nbytes < before.nbytes) == (before.clients - 1, True)


async def test_the_place_of_an_expired_client_is_free(make_client, admin):
    for number in range(MOST):
        await make_client(f"cam-{number}").apply(b"one")
    (key,) = await admin.keys("*~clients}:n")
    assert 0 < await admin.pttl(key) <= 2 * Limits().state_ttl_ms
    names = await admin.zrange(key, 0, -1)
    assert not any(b"cam" in name for name in names)
    await admin.zadd(key, {names[0]: 1})
    assert (await make_client("new").apply(b"one")).seq == 1


async def test_a_place_is_extended_before_it_expires_and_not_with_every_batch(make_client, admin):
    client = make_client("cam")
    for payload in (b"one", b"counted"):
        await client.apply(payload)
    (key,) = await admin.keys("*~clients}:n")
    (name,) = await admin.zrange(key, 0, -1)
    await admin.zadd(key, {name: 2**50})
    await client.apply(b"two")
    assert await admin.zscore(key, name) == 2**50
    client.now += Limits().state_ttl_ms / 2000
    await client.apply(b"three")
    assert await admin.zscore(key, name) < 2**50
