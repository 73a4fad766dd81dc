"""Evidence of all clients: a sum that no retry, delay or reset makes wrong."""

import asyncio
import random

import pytest

from acclimate_service.guard.pools import Pools, Share, Total
from acclimate_service.state import ClientScope, Limits

MODEL = "0" * 16
ATP, EM = '{"adapter":"atp"}', '{"adapter":"em"}'


@pytest.fixture
def pools(make_wire):
    return Pools(make_wire(), Limits(), MODEL, "default")


def share(*numbers, seq=1, life="a" * 16, born="b" * 16):
    return Share(life, seq, born, numbers)


async def test_shares_of_clients_are_summed_by_configuration(pools):
    one, two = ClientScope("one"), ClientScope("two")
    assert await pools.totals() == {}
    await pools.tell(one, ATP, share(1, 2))
    await pools.tell(two, ATP, share(10, 20))
    await pools.tell(two, EM, share(5, 5))
    assert await pools.totals() == {ATP: Total((11, 22), 2), EM: Total((5, 5), 1)}
    assert await pools.share(one, ATP) == share(1, 2)
    assert await pools.share(one, EM) is None


async def test_a_share_that_is_told_again_or_late_counts_once(pools):
    client, told = ClientScope("one"), [share(n, 2 * n, seq=n) for n in range(1, 30)]
    order = told * 3
    random.Random(1).shuffle(order)
    await asyncio.gather(*(pools.tell(client, ATP, each) for each in order))
    await pools.tell(client, ATP, told[-1])
    assert await pools.totals() == {ATP: Total((29, 58), 1)}


async def test_evidence_that_began_anew_adds_to_what_was_told_before(pools):
    client = ClientScope("one")
    await pools.tell(client, ATP, share(7, 7, seq=9))
    await pools.tell(client, ATP, share(1, 0, seq=11, born="c" * 16))
    assert await pools.totals() == {ATP: Total((8, 7), 1)}
    await pools.tell(client, ATP, share(8, 8, seq=10))
    assert await pools.totals() == {ATP: Total((8, 7), 1)}, "a late share of the record before is no news"
    await pools.tell(client, ATP, share(2, 2, seq=1, life="d" * 16))
    assert await pools.totals() == {ATP: Total((10, 9), 1)}, "a deleted client's evidence stays, its next life adds"


async def test_no_key_lives_for_ever_or_names_a_client(pools, admin):
    await pools.tell(ClientScope("secret-camera"), ATP, share(1, 1))
    keys = await admin.keys()
    assert len(keys) == 2
    for key in keys:
        assert await admin.pttl(key) > 0
        assert b"secret-camera" not in await admin.dump(key) + key


async def test_a_client_that_is_forgotten_leaves_its_counts_and_no_trace_of_itself(pools, admin):
    one, two = ClientScope("one"), ClientScope("two")
    await pools.forget(one)
    for client, configuration in ((one, ATP), (one, EM), (two, EM)):
        await pools.tell(client, configuration, share(3, 4))
    before = await pools.totals()
    await pools.forget(one)
    assert (await pools.share(one, ATP), await pools.share(one, EM)) == (None, None)
    assert await pools.share(two, EM) == share(3, 4)
    assert await pools.totals() == before
    assert len(await admin.keys()) == 2, "the totals, and the shares in EM of the other client"


async def test_names_of_clients_depend_on_the_secret(make_wire, admin):
    client, names = ClientScope("camera-7"), []
    for secret in ("", "one", "another"):
        pools = Pools(make_wire(), Limits(), MODEL, "default", secret)
        await pools.tell(client, ATP, share(1, 1))
        names = await admin.hkeys(pools._shares(ATP))
    assert len(set(names)) == 3
    assert client.digest().hex().encode() not in names
