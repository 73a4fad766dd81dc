"""A client that is configured again and again: nothing grows by it, and its batches take no longer."""

import time
from statistics import median

import pytest

from acclimate_client import LabelledRow

PASSING = (b"i", b"x", b"a", b"y")  # what remembers requests: it is bounded by their number and their time


def sizes(replica):
    keys = [key for key in replica.redis.keys("acc:*") if key.rpartition(b":")[2] not in PASSING]
    return {key: replica.redis.memory_usage(key, samples=0) for key in keys}


def configure_often(sdk, times):
    """Each time it is another one than before."""
    for number in range(times):
        assert sdk.configure("cam", "atp", mode=("batch", "online")[number % 2]).changed


def labelled_batch(sdk, images):
    done = sdk.predict("cam", images)
    sdk.feedback("cam", [LabelledRow(done.request_id, 0, done.indices[0])])


def test_neither_equal_nor_changing_configurations_leave_anything_that_grows(make_replica, stream):
    replica, (images,) = make_replica(keep_snapshots=0, inline_max=10**8), stream(0, 1)
    with replica.sdk() as sdk:
        found = []
        for times in (2, 40, 41):
            configure_often(sdk, times)
            labelled_batch(sdk, images)
            replica.keys("cam")
            found.append(sizes(replica))
        assert set(found[1]) == set(found[2])
        assert sum(found[2].values()) <= 1.1 * sum(found[1].values())
        version = sdk.get("cam").state.version
        for _ in range(50):
            assert not sdk.configure("cam", "atp", mode="batch").changed
        assert sizes(replica) == found[2]
        assert sdk.get("cam").state.version == version


@pytest.mark.slow
def test_3000_configurations_make_no_batch_slower(make_replica, stream):
    replica, batches = make_replica(), stream(0, 60)

    def took(sdk):
        seconds = []
        for images in batches:
            began = time.monotonic()
            sdk.predict("cam", images)
            seconds.append(time.monotonic() - began)
        return median(seconds), max(seconds)

    with replica.sdk() as sdk:
        configure_often(sdk, 2)
        took(sdk)
        before = took(sdk)
        configure_often(sdk, 3000)
        after = took(sdk)
    print(f"median and worst of 60 batches: {before} before, {after} after (s)")
    assert after[0] <= 1.25 * before[0]
