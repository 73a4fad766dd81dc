"""A client that is configured again and again: what is stored of it is bounded, and the same again adds nothing."""

import pytest

from acclimate_client import LabelledRow

TIMES = [100, pytest.param(3000, marks=pytest.mark.slow)]
REQUESTS = (b"i", b"x", b"a", b"y")  # what remembers requests: it is bounded by their number and their time
OF_REPLICAS = (b"acc:{default/~replicas}", b"acc:{default/~models}", b"acc:{default/~probe")
"""What replicas say of themselves, every few seconds."""
TIMELINE = b"t"  # each change is a point of it, and they are thinned out


def stored(replica):
    """Of each key: how many fields or members it has, and how many bytes it takes."""
    redis = replica.redis
    count = {b"hash": redis.hlen, b"zset": redis.zcard, b"list": redis.llen, b"string": redis.strlen}
    ours = [key for key in replica.redis.keys("acc:*") if not key.startswith(OF_REPLICAS)]
    keys = [key for key in ours if not key.endswith(b":l")]  # leases end by themselves
    return {key: (count[replica.redis.type(key)](key), replica.redis.memory_usage(key, samples=0)) for key in keys}


def without_requests(found):
    return {key: sizes for key, sizes in found.items() if key.rpartition(b":")[2] not in (*REQUESTS, TIMELINE)}


def labelled_batch(sdk, images):
    done = sdk.predict("cam", images)
    sdk.feedback("cam", [LabelledRow(done.request_id, 0, done.indices[0])])


@pytest.fixture
def labelled(make_replica, stream):
    """A client with an adapter of its choice, a batch and a label."""
    replica = make_replica(keep_snapshots=0, inline_max=10**8, ask_budget=0)  # questions come by lots
    (images,) = stream(0, 1)
    with replica.sdk() as sdk:
        sdk.configure("cam", "atp", mode="online")
        labelled_batch(sdk, images)
    return replica, images


@pytest.mark.parametrize("times", TIMES)
def test_what_is_configured_as_it_is_adds_nothing_at_all(labelled, times):
    """No version, no row, no request that is remembered, and not a byte of any key is another one."""
    replica, _ = labelled
    before = replica.keys("cam"), stored(replica)
    version = replica.http.get("/clients/cam").json()["state"]["version"]
    with replica.sdk() as sdk:
        for _ in range(times):
            assert not sdk.configure("cam", "atp", mode="online").changed
    assert (replica.keys("cam"), stored(replica)) == before
    assert replica.http.get("/clients/cam").json()["state"]["version"] == version


@pytest.mark.parametrize("times", TIMES)
def test_what_is_configured_anew_each_time_leaves_no_more_than_a_few_times_did(labelled, times):
    replica, images = labelled
    found = []
    with replica.sdk() as sdk:
        for often in (2, times):
            for number in range(often):  # each time it is another one than before
                assert sdk.configure("cam", "atp", mode=("batch", "online")[number % 2]).changed
            labelled_batch(sdk, images)
            replica.keys("cam")
            found.append(stored(replica))
    few, many = map(without_requests, found)
    assert {key: fields for key, (fields, _) in many.items()} == {key: fields for key, (fields, _) in few.items()}
    assert sum(size for _, size in many.values()) <= 1.1 * sum(size for _, size in few.values())
    requests = {key.rpartition(b":")[2]: fields for key, (fields, _) in found[1].items()}
    assert requests[TIMELINE] <= 400, "as of a timeline of any length"
    assert requests[b"i"] == requests[b"x"] == times + 9, "each is remembered once, for its time"
    assert requests[b"a"] == requests[b"y"] <= 9, "and has no answer of its own"
