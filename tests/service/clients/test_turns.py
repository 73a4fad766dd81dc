import asyncio

import pytest

from acclimate_service.clients.sessions import Claims, Turns
from acclimate_service.state import KeyReused, Request, RequestRunning


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


async def test_a_waiter_that_gives_up_leaves_the_turn_to_the_next():
    turns = Turns()
    async with turns.hold("a"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), turns.hold("a"):
                pass
        waiting = asyncio.create_task(_enter(turns))
        await asyncio.sleep(0)
    assert await waiting
    assert len(turns) == 0


async def test_a_key_is_taken_while_somebody_holds_it_or_waits_for_it():
    turns = Turns()
    async with turns.hold("a"):
        assert "a" in turns
        assert "b" not in turns
    assert "a" not in turns


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


async def _enter(turns):
    async with turns.hold("a"):
        return True


def test_a_request_at_work_on_this_replica_is_turned_away():
    claims, request = Claims(), Request("0" * 32, "f" * 32)
    with claims.hold(request):
        with pytest.raises(RequestRunning), claims.hold(request):
            pass
        with pytest.raises(KeyReused), claims.hold(Request("0" * 32, "e" * 32)):
            pass
        with claims.hold(Request("1" * 32, "f" * 32)):
            pass
    with claims.hold(request):
        pass
