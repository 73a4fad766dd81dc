"""A tenant has so many clients at a time; who is there stays, and who leaves makes room."""

import asyncio
from dataclasses import replace

import pytest

from acclimate_service.state import Limits
from acclimate_service.state.errors import TooManyClients
from acclimate_service.state.places import Places

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
        with pytest.raises(TooManyClients, match="there are 3 clients; delete some") as refused:
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


async def test_the_place_of_an_expired_client_is_free(make_client, admin):
    for number in range(MOST):
        await make_client(f"cam-{number}").apply(b"one")
    (key,) = await admin.keys("*~clients*")
    assert 0 < await admin.pttl(key) <= 2 * Limits().state_ttl_ms
    names = await admin.zrange(key, 0, -1)
    assert not any(b"cam" in name for name in names)
    await admin.zadd(key, {names[0]: 1})
    assert (await make_client("new").apply(b"one")).seq == 1


async def test_a_place_is_extended_before_it_expires_and_not_with_every_batch(make_client, admin):
    client = make_client("cam")
    await client.apply(b"one")
    (key,) = await admin.keys("*~clients*")
    (name,) = await admin.zrange(key, 0, -1)
    await admin.zadd(key, {name: 2**50})
    await client.apply(b"two")
    assert await admin.zscore(key, name) == 2**50
    client.now += Limits().state_ttl_ms / 2000
    await client.apply(b"three")
    assert await admin.zscore(key, name) < 2**50
