"""Work in the background: it has no part in the deadline of the request that began it."""

import asyncio
import logging
import math

import pytest

from acclimate_service.state.errors import StoreUnavailable
from acclimate_service.state.redis.wire import DEADLINE
from acclimate_service.state.tasks import Tasks


async def deadline() -> float:
    return DEADLINE.get()


async def test_work_that_nobody_waits_for_has_not_the_deadline_of_whoever_began_it() -> None:
    tasks = Tasks()
    token = DEADLINE.set(1.0)
    try:
        assert await tasks.start(deadline()) == math.inf
        assert await tasks.start(deadline(), awaited=True) == 1.0
    finally:
        DEADLINE.reset(token)
        await tasks.aclose()


async def test_a_failure_that_nobody_waits_for_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        raise StoreUnavailable("the disk is full")

    tasks = Tasks()
    with caplog.at_level(logging.WARNING):
        await asyncio.wait([tasks.start(failing())])
        await asyncio.sleep(0)
    assert "failing failed in the background" in caplog.text
    assert "the disk is full" in caplog.text
