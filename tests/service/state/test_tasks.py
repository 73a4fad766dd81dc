"""Work beside requests: it has no part in their deadlines, and is never silent when it fails."""

import asyncio
import logging
import math

import pytest

from acclimate_service.state.errors import StoreUnavailable
from acclimate_service.state.redis.wire import DEADLINE
from acclimate_service.state.tasks import Logged, Tasks


class Told:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def failed(self, task: str, error: Exception) -> None:
        self.events.append(f"{task}: {error}")

    def succeeded(self, task: str) -> None:
        self.events.append(task)


async def deadline() -> float:
    return DEADLINE.get()


async def failing() -> None:
    raise StoreUnavailable("the disk is full")


async def test_work_that_nobody_waits_for_has_not_the_deadline_of_whoever_began_it() -> None:
    tasks = Tasks(Logged())
    token = DEADLINE.set(1.0)
    try:
        assert await tasks.start("work", deadline()) == math.inf
        assert await tasks.begin(deadline()) == 1.0
    finally:
        DEADLINE.reset(token)
        await tasks.aclose()


async def test_how_work_went_that_nobody_waits_for_is_told_by_its_name() -> None:
    told = Told()
    tasks = Tasks(told)
    await asyncio.wait([tasks.start("fine", deadline()), tasks.start("broken", failing()), tasks.begin(failing())])
    given_up = tasks.start("given up", asyncio.sleep(60))
    await tasks.aclose()
    assert given_up.cancelled()
    assert sorted(told.events) == ["broken: the disk is full", "fine"]


async def test_where_nobody_watches_a_failure_is_logged_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks(Logged())
    with caplog.at_level(logging.WARNING):
        await asyncio.wait([tasks.start("work", failing())])
        await asyncio.sleep(0)
    assert "work failed in the background" in caplog.text
    assert "the disk is full" in caplog.text
