"""A client whose next batch comes to another replica, as under a balancer that does not keep clients where they are."""

from dataclasses import replace

import numpy as np
import pytest

from acclimate_service import opening
from acclimate_service.state.redis.announcements import HAND_OVER


@pytest.fixture
def pair(make_replica):
    """Two replicas on one Redis that compute alike, whose clients have states that are written by their batches."""
    first = make_replica(strict_replay=True)  # else each tries which memory layout is faster
    return first, make_replica(redis_url=first.service.settings.redis_url, strict_replay=True)


@pytest.fixture
def patience(monkeypatch):
    """Nobody takes a lease that is not given back, however busy the machine is."""
    limits = opening._limits
    patient = {"lease_ms": 60_000, "steal_after_ms": 25_000}
    monkeypatch.setattr(opening, "_limits", lambda settings: replace(limits(settings), **patient))


def opened(replica, lease):
    return replica.metric(f'acclimate_state_opens_total{{lease="{lease}"}}')


@pytest.mark.usefixtures("patience")
def test_an_idle_replica_hands_its_client_over_at_once(pair, stream):
    batches = stream(0, 6)
    with pair[0].sdk() as one, pair[1].sdk() as other:
        versions = [
            (one, other)[number % 2].predict("cam", images).state.version for number, images in enumerate(batches)
        ]
        assert versions == [1, 2, 3, 4, 5, 6]
        assert one.get("cam").state.version == 6
    assert opened(pair[0], "stolen") == opened(pair[1], "stolen") == 0
    assert (opened(pair[0], "free"), opened(pair[1], "free")) == (3, 3), "nobody waited for the lease to end"


@pytest.mark.usefixtures("patience")
def test_the_answers_are_those_of_one_replica(pair, make_replica, stream):
    batches = stream(0, 4)
    with pair[0].sdk() as one, pair[1].sdk() as other:
        moved = [(one, other)[number % 2].predict("cam", images) for number, images in enumerate(batches)]
        stayed = [one.predict("another-cam", images) for images in batches]
    for there, here in zip(moved, stayed, strict=True):
        np.testing.assert_array_equal(there.indices, here.indices)
        assert there.signals == here.signals


def test_a_client_at_work_is_not_handed_over_but_taken_after_a_while(pair, stream):
    batches = stream(0, 3)
    with pair[0].sdk() as one, pair[1].sdk() as other:
        one.predict("cam", batches[0])
        with pair[0].at_work("cam", pair[0].service.sessions):
            assert other.predict("cam", batches[1]).state.version == 2
            assert pair[0].service.sessions._sessions["cam"].memory.held.seq == 1
        assert opened(pair[1], "stolen") == 1
        assert one.predict("cam", batches[2]).state.version == 3
    assert opened(pair[0], "stolen") == 0


@pytest.mark.usefixtures("patience")
def test_what_nobody_should_have_said_disturbs_no_hand_over(pair, stream):
    batches = stream(0, 4)
    with pair[0].sdk() as one, pair[1].sdk() as other:
        for number, images in enumerate(batches):
            for message in (b"nonsense", b"a/b", b"\xff/default/cam", b"0123456789abcdef/default/cam"):
                pair[0].redis.publish(HAND_OVER, message)
            (one, other)[number % 2].predict("cam", images)
    assert opened(pair[0], "stolen") == opened(pair[1], "stolen") == 0
