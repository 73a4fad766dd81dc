import asyncio

import pytest

from acclimate_service.turns import Expired, Turns


async def test_turns_of_one_key_come_one_at_a_time_in_order():
    turns, log = Turns(), []

    async def take(number):
        async with turns.hold("a"):
            log.append(number)
            await asyncio.sleep(0)
            log.append(number)

    await asyncio.gather(*(take(number) for number in range(5)))
    assert log == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


async def test_turns_of_different_keys_do_not_wait_for_each_other():
    turns = Turns()
    async with turns.hold("a"), asyncio.timeout(1), turns.hold("b"):
        assert len(turns) == 2


async def test_a_key_nobody_wants_takes_no_memory():
    turns = Turns()
    async with turns.hold("a"):
        pass
    with pytest.raises(ZeroDivisionError):
        async with turns.hold("b"):
            raise ZeroDivisionError
    assert len(turns) == 0


async def test_a_turn_that_does_not_come_in_time_expires_and_the_next_is_served():
    turns = Turns()
    async with turns.hold("a"):
        with pytest.raises(Expired):
            async with turns.hold("a", patience=0.01):
                pass
        waiting = asyncio.create_task(_enter(turns))
        await asyncio.sleep(0)
    assert await waiting
    assert len(turns) == 0


async def test_a_free_turn_is_given_to_the_most_impatient():
    async with Turns().hold("a", patience=0.0):
        pass


async def test_a_waiter_that_is_cancelled_leaves_the_queue():
    turns = Turns()
    async with turns.hold("a"):
        gone, waiting = (asyncio.create_task(_enter(turns)) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
    assert await waiting
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert len(turns) == 0


async def test_a_timeout_inside_the_turn_is_not_taken_for_an_expired_wait():
    with pytest.raises(TimeoutError):
        async with Turns().hold("a", patience=10):
            raise TimeoutError


async def _enter(turns):
    async with turns.hold("a"):
        return True
