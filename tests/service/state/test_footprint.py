"""What a client is said to take of Redis's memory is what Redis counts of its keys."""

import pytest

from acclimate_service.state import Listing, Policy
from acclimate_service.state.footprint import footprint


async def counted(admin, client="cam-7"):
    """Bytes of every key of a client but its lease."""
    keys = [key for key in await admin.keys(f"acc:{{default/{client}}}:*") if not key.endswith(b":l")]
    return sum([await admin.memory_usage(key, samples=0) for key in keys])


@pytest.mark.parametrize("size", [40, 400, 3000], ids=["in its head", "by journal", "in chunks"])
async def test_it_is_the_sum_over_all_keys(make_replica, admin, size):
    replica = make_replica(size, policy=Policy("{}", keep=2, timeline=True), keep_every_ms=1)
    assert await replica.store.footprint(replica.client, replica.model) == 0
    for number in range(4):
        await replica.apply(b"batch %d" % number, key=f"key-{number}")
        await replica.rework(b"%d" % number)
        await replica.settled()
        taken = await replica.store.footprint(replica.client, replica.model)
        assert taken == await counted(admin)
    assert taken > size * 3  # the states that are kept count, too


async def test_it_says_the_same_in_a_list(make_replica, make_wire, admin):
    replica = make_replica(3000)
    await replica.rework(b"whole")
    listing = Listing(make_wire(), "default", replica.model)
    (listed,) = await listing.describe([replica.client])
    assert await listing.footprint(listed) == await counted(admin)


async def test_a_snapshot_that_took_the_place_of_another_is_found(make_replica, make_wire, admin):
    replica = make_replica(3000)
    await replica.rework(b"one")
    before = (await replica.head()).sid
    await replica.rework(b"two")
    assert (await replica.head()).sid not in ("", before)
    assert await footprint(make_wire(), replica.client, replica.model, before) == await counted(admin)


async def test_a_cluster_counts_it_too(make_replica, cluster_link):
    replica = make_replica(3000, link=cluster_link)
    await replica.rework(b"whole")
    assert await replica.store.footprint(replica.client, replica.model) > 3000
