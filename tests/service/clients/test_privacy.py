"""What of a client's images is to be found in Redis, and what is left after it was deleted."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from acclimate_client import LabelledRow
from acclimate_service.compute.lineage import Version, known_versions
from acclimate_service.guard.pools import Pools
from acclimate_service.state import ClientScope, StoreUnavailable


def everything(redis):
    """All bytes of all values of all keys."""
    found = []
    for key in redis.scan_iter(count=1000):
        kind = redis.type(key)
        if kind == b"string":
            found.append(redis.get(key))
        elif kind == b"hash":
            found += [piece for pair in redis.hgetall(key).items() for piece in pair]
        elif kind == b"zset":
            found += redis.zrange(key, 0, -1)
        elif kind == b"list":
            found += redis.lrange(key, 0, -1)
        else:
            pytest.fail(f"{key} is a {kind}, which this scan does not know")
    return b"\n".join(found)


def shreds(batches, size=16):
    """Pieces of the images that are long and varied enough to be found by no accident."""
    rows = (images.tobytes() for images in batches)
    pieces = (row[start : start + size] for row in rows for start in range(0, len(row) - size, size))
    return {piece for piece in pieces if len(set(piece)) > size // 2}


@pytest.mark.parametrize("adapter", ["atp", "fedcal", "fedthe", "t3a"])
def test_without_a_journal_no_piece_of_an_image_is_ever_in_redis(make_replica, stream, adapter):
    replica, batches = make_replica(journal=False, adapter=adapter), stream(0, 4)
    pieces = shreds(batches)
    assert len(pieces) > 500
    with replica.sdk() as sdk:
        for images in batches:
            sdk.predict("cam", images)
            content = everything(replica.redis)
            assert len(content) > 1000
            assert not [piece for piece in pieces if piece in content]


def test_with_a_journal_the_scan_finds_the_images_so_it_would_have_found_them(make_replica, stream):
    replica, batches = make_replica(), stream(0, 4)
    with replica.sdk() as sdk:
        for images in batches:
            sdk.predict("cam", images)
    content = everything(replica.redis)
    pieces = shreds(batches)
    assert len([piece for piece in pieces if piece in content]) == len(pieces)


def test_after_a_delete_only_hashes_are_left(make_replica, stream):
    replica, batches = make_replica(), stream(0, 3)
    with replica.sdk() as sdk:
        for number, images in enumerate(batches):
            sdk.predict("cam", images, idempotency_key=f"secret-key-{number}")
        sdk.delete("cam")
    names = {key.rpartition(b"}:")[2] for key in replica.redis.keys("*cam*")}
    assert names == {b"r", b"i", b"x"}, "a tombstone, and the markers with their times"
    content = everything(replica.redis)
    assert not [piece for piece in shreds(batches) if piece in content]
    assert b"secret-key" not in content
    for marker in replica.redis.hvals("acc:{default/cam}:i"):
        fingerprint, model, version, tag, life = marker.decode().split("|")
        assert all(int(part, 16) >= 0 for part in (fingerprint, model, tag, life))
        assert int(version) <= len(batches)
    assert all(replica.redis.pttl(key) > 0 for key in replica.redis.keys("*cam*"))


def test_floats_leave_no_trace_either(make_replica):
    replica = make_replica(journal=False)
    images = np.random.default_rng(0).random((10, 28, 28), np.float32)
    with replica.sdk() as sdk:
        sdk.predict("cam", images)
    content = everything(replica.redis)
    assert not [piece for piece in shreds([images]) if piece in content]


def test_after_a_delete_nobody_can_tell_what_a_client_told(make_replica, stream):
    replica, (images,) = make_replica(secret="salt"), stream(0, 1)
    with replica.sdk() as sdk:
        prediction = sdk.predict("cam", images)
        sdk.feedback("cam", [LabelledRow(prediction.request_id, row, 1) for row in range(10)])
        (pool,) = replica.redis.keys("*:e")
        assert ClientScope("cam").digest.hex().encode() not in b" ".join(replica.redis.hkeys(pool))
        sdk.delete("cam")
        assert replica.redis.keys("*:e") == []
        assert not sdk.evidence("fashion-cnn").adapters, "what it told goes with it"


def test_labels_on_their_way_while_another_replica_deletes_their_client_leave_no_share(
    make_replica, stream, monkeypatch
):
    replica, (images,) = make_replica(), stream(0, 1)
    other = make_replica(redis_url=replica.service.settings.redis_url)
    tell = Pools.tell

    async def late(*told):
        assert (await asyncio.to_thread(other.http.delete, "/clients/cam")).status_code == 204
        return await tell(*told)

    monkeypatch.setattr(Pools, "tell", late)
    with replica.sdk() as sdk:
        prediction = sdk.predict("cam", images)
        sdk.feedback("cam", [LabelledRow(prediction.request_id, row, 1) for row in range(10)])
    assert replica.http.get("/clients/cam").status_code == 404
    assert replica.redis.keys("*:e") == []


def test_a_delete_of_which_a_rest_is_left_does_not_say_that_nothing_was_changed(make_replica, stream, assert_problem):
    replica, (images,) = make_replica(), stream(0, 1)
    pool = f"acc:{{default/~{replica.service.bundle.model.content_hash}}}:e"
    with replica.sdk() as sdk:
        sdk.predict("cam", images)
        replica.redis.set(pool, "what no script can read")
        assert_problem(replica.http.delete("/clients/cam"), 503, "store_unavailable", committed="unknown")
        assert replica.http.get("/clients/cam").status_code == 404
        replica.redis.delete(pool)
        assert replica.http.delete("/clients/cam").status_code == 204


def test_versions_of_the_model_forget_a_client_at_the_same_time_and_one_that_fails_keeps_none_from_it(
    make_replica, stream, monkeypatch, assert_problem
):
    replica, (images,) = make_replica(), stream(0, 1)
    wire, forget, pools = replica.service.wire, Pools.forget, set()
    (place,) = replica.run(known_versions(wire, "default"))
    older = Version(replace(place.version.identity, content="0" * 16), "{}")
    replica.run(known_versions(wire, "default", older))
    all_of_them = asyncio.Barrier(4)  # two versions; of each what is told of clients and of arms

    async def together(pool, client, life=""):
        pools.add(pool._pool)
        async with asyncio.timeout(20), all_of_them:
            if pool._pool == min(pools - {told}):
                raise StoreUnavailable("of this one")
        await forget(pool, client, life)

    with replica.sdk() as sdk:
        prediction = sdk.predict("cam", images)
        sdk.feedback("cam", [LabelledRow(prediction.request_id, row, 1) for row in range(10)])
        told = replica.redis.keys("*:e")[0].decode()
        monkeypatch.setattr(Pools, "forget", together)
        assert_problem(replica.http.delete("/clients/cam"), 503, "store_unavailable", committed="unknown")
    assert len(pools) == 4
    assert replica.redis.keys("*:e") == []
