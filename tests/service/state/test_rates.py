"""An owner of clients sends so many images in a minute, to all replicas together; what was sent comes back evenly."""

import pytest

from acclimate_service.state import RateExceeded
from acclimate_service.state.rates import WINDOW_S, Rates

QUOTA = 10
KEY = "acc:{default/one/~rate}:q"


@pytest.fixture
def rates(make_wire):
    return Rates(make_wire(), "default", QUOTA)


async def test_the_whole_quota_may_be_sent_at_once_and_not_one_image_more(rates):
    await rates.take("one", 4)
    await rates.take("one", QUOTA - 4)
    for _ in range(2):  # what is refused counts for nothing
        with pytest.raises(RateExceeded, match="1 images are more than the 0 that are left of 10 in 60 s") as refused:
            await rates.take("one", 1)
        assert 0 < refused.value.wait_s <= WINDOW_S / QUOTA
        assert refused.value.committed is False


async def test_replicas_count_together_and_owners_apart(rates, make_wire):
    other = Rates(make_wire(), "default", QUOTA)
    await rates.take("one", QUOTA)
    with pytest.raises(RateExceeded):
        await other.take("one", 1)
    await other.take("two", QUOTA)
    await other.take("", QUOTA)
    with pytest.raises(RateExceeded):
        await rates.take("", 1)


async def test_what_was_sent_comes_back_evenly(rates, admin):
    await rates.take("one", QUOTA)
    await admin.set(KEY, float(await admin.get(KEY)) - 1000 * WINDOW_S / 2)  # half of it later
    with pytest.raises(RateExceeded) as refused:
        await rates.take("one", QUOTA // 2 + 1)
    assert refused.value.left == QUOTA // 2
    await rates.take("one", QUOTA // 2)


async def test_who_has_sent_nothing_may_send_more_than_the_quota_and_then_waits_for_all_of_it(rates, admin):
    await rates.take("one", 3 * QUOTA)
    with pytest.raises(RateExceeded) as refused:
        await rates.take("one", 1)
    assert 2 * WINDOW_S < refused.value.wait_s <= 3 * WINDOW_S
    assert refused.value.left == 0
    assert 2000 * WINDOW_S < await admin.pttl(KEY) <= 3000 * WINDOW_S


async def test_nothing_is_kept_of_who_has_sent_nothing_for_long(rates, admin):
    await rates.take("one", 1)
    assert 0 < await admin.pttl(KEY) <= 1000 * WINDOW_S / QUOTA
