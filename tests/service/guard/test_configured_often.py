"""A client that is configured again and again: nothing grows by it, and its batches take no longer."""

import time
from contextlib import ExitStack
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
    """Beside another service that has seen two, batch by batch: whatever else the machine does slows down both."""
    took, batches = ([], []), stream(0, 101)
    with ExitStack() as stack:
        sdks = [stack.enter_context(make_replica().sdk()) for _ in took]
        for sdk, times in zip(sdks, (2, 3000), strict=True):
            configure_often(sdk, times)
            sdk.predict("cam", batches[0])
        for images in batches[1:]:
            for sdk, seconds in zip(sdks, took, strict=True):
                began = time.monotonic()
                sdk.predict("cam", images)
                seconds.append(time.monotonic() - began)
    few, many = map(median, took)
    print(f"median of 100 batches: {1000 * few:.1f} ms after 2 configurations, {1000 * many:.1f} ms after 3000")
    assert many <= 1.25 * few
