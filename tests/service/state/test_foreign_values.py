"""Values of another type under a client's names: that is said, and a DELETE removes them."""

import pytest

from acclimate_service.state import StateError
from acclimate_service.state.errors import ForeignValue

NAMES = ["registry", "markers", "marker_times", "answers", "answer_times", "head", "journal", "lease"]


def key_of(replica, name):
    found = getattr(replica.client, name)
    return found(replica.model) if callable(found) else found


@pytest.mark.parametrize("size", [40, 400], ids=["whole", "by journal"])
@pytest.mark.parametrize("known", [True, False], ids=["known client", "new client"])
@pytest.mark.parametrize("name", NAMES)
async def test_a_key_of_another_type_says_so_and_a_delete_removes_it(make_replica, admin, name, known, size):
    replica = make_replica(size)
    if known:
        await replica.apply(b"one", key="k")
    replica.session.drop()
    key = key_of(replica, name)
    await admin.delete(key)
    await admin.rpush(key, "a list")
    try:
        await replica.apply(b"two")
        refused = None
    except StateError as error:
        refused = error
    assert refused is None or isinstance(refused, ForeignValue), refused
    await replica.session.delete()
    kinds = {each: await admin.type(each) for each in await admin.keys()}
    assert b"list" not in kinds.values()
    assert not [each for each in kinds if b":h" in each or b":j" in each or b":s:" in each or b":l" in each]
    assert (await replica.apply(b"three")).seq == 1


async def test_without_its_registry_a_client_is_deleted_from_every_model(make_replica, admin):
    one, other = make_replica(400), make_replica(400, model="f" * 16)
    neighbour = make_replica(client="cam-77")
    for replica in (one, other, neighbour):
        await replica.apply(b"one")
    await admin.delete(one.client.registry)
    await admin.set(one.client.registry, "a string")
    one.session.drop()
    with pytest.raises(ForeignValue, match="WRONGTYPE"):
        await one.apply(b"two")
    await one.session.delete()
    left = [key for key in await admin.keys("acc:{default/cam-7}:*") if key.rpartition(b":")[2] not in (b"i", b"x")]
    assert left == []
    assert (await neighbour.apply(b"two")).seq == 2
    other.session.drop()
    assert (await other.apply(b"three")).seq == 1


async def test_in_a_cluster_too(cluster, cluster_link, make_replica):
    replica = make_replica(400, link=cluster_link)
    await replica.apply(b"one")
    server = cluster.master_of(replica.client.registry).client
    server.delete(replica.client.registry)
    server.set(replica.client.registry, "a string")
    await replica.session.delete()
    assert {key.rpartition(b":")[2] for key in server.keys("acc:{default/cam-7}:*")} <= {b"i", b"x"}
