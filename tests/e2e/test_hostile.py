"""No caller stops another: eight attackers at once, beside a client that asks for five batches a second."""

import json
import time

import pytest
from hostile.attackers import ATTACKS
from hostile.run import SETTINGS, attacked, resident_mb, send_batches, warm

SECONDS = 60
NOISE_S = 0.25
"""What the slowest of some fifty batches may take on two busy cores, whoever attacks."""
MUTE = ("readers_that_never_read", "unfinished_uploads")
"""Attackers that read no reply."""
LEAST = 10
"""Replies that an attacker has in a minute at least, but for those: one that hardly comes to attack proves nothing."""


@pytest.fixture
def service(serve):
    """A service that has answered for a while: its memory is that of one at work."""
    started = serve(**SETTINGS)
    warm(started.url)
    return started


def attacks(told):
    return sum(told["replies"].values())


def come_back(service, mb: float, seconds: float) -> float:
    """Memory in MB once it is at most `mb`, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while (now := resident_mb(service.pid)) > mb and time.monotonic() < deadline:
        time.sleep(0.5)
    return now


@pytest.mark.slow
@pytest.mark.xfail(
    reason="on two cores that do nothing else p99 is 96 ms beside all eight, 5.8 times that of the client alone; "
    "54 ms, 3.3 times, where they attack another service and share but the machine",
    strict=False,
)
def test_eight_attackers_at_once_harm_no_client(service, serve, tmp_path, record_property):
    """It is said, too, what it costs that they attack another service, which shares nothing but the machine."""
    before = resident_mb(service.pid)
    alone = send_batches(service.url, "victim", 20)
    other = serve(**SETTINGS, data_dir=tmp_path / "other")
    with attacked(other.url, list(ATTACKS)):
        floor = send_batches(service.url, "victim", 20)
    other.close()
    with attacked(service.url, list(ATTACKS)) as told:
        beside = send_batches(service.url, "victim", SECONDS)
        most = resident_mb(service.pid)
    after = come_back(service, 1.1 * before, 60)
    figures = {
        "p99 alone (ms)": 1000 * alone.p99,
        "p99 beside (ms)": 1000 * beside.p99,
        "p99 while they attack another service (ms)": 1000 * floor.p99,
        "times alone, times that": [beside.p99 / alone.p99, beside.p99 / floor.p99],
        "refused": beside.refused,
        "disturbed": beside.disturbed,
        "memory before, at the end, after (MB)": [before, most, after],
        "attackers": told,
    }
    record_property("figures", json.dumps(figures))
    print(json.dumps(figures, indent=1))
    assert service.running
    assert not beside.refused
    assert not beside.disturbed
    assert [wrong for each in told.values() for wrong in each["wrong"]] == []
    assert {name: each["replies"] for name, each in told.items() if name not in MUTE and attacks(each) < LEAST} == {}
    assert beside.p99 <= 3 * alone.p99
    assert after <= 1.1 * before


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attacker_alone_harms_no_client(service, name):
    alone = send_batches(service.url, "victim", 10)
    before = resident_mb(service.pid)
    with attacked(service.url, [name]) as told:
        beside = send_batches(service.url, "victim", 15)
    after = come_back(service, 1.1 * before, 30)
    print(json.dumps({"p99 alone": alone.p99, "beside": beside.p99, "MB": [before, after], **told}))
    assert not beside.refused
    assert not beside.disturbed
    assert told[name]["wrong"] == []
    assert beside.p99 <= max(3 * alone.p99, NOISE_S)
    assert after <= 1.1 * before
