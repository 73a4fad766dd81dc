"""What replicas tell each other: heard at once, and where it may have been missed, that is said."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from acclimate_service.state import Announcements, Wire
from acclimate_service.state.redis.announcements import DROP
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_service.state.redis.link import Link, Server, dial


class Replica:
    """What one replica heard, in order; `missed` for what it may not have heard."""

    def __init__(self, link: Link, quiet: float) -> None:
        self.heard: list[str] = []
        self.refuses = set[str]()
        self.failures: list[Exception] = []
        self.subscription = Announcements(
            link, self._note, lambda: self._note("missed"), self.failures.append, pause=0.02, quiet=quiet
        )
        self._something = asyncio.Event()
        self.subscription.start()

    def _note(self, what: str) -> None:
        if what in self.refuses:
            raise ValueError(what)
        self.heard.append(what)
        self._something.set()

    async def until(self, *heard: str) -> None:
        async with asyncio.timeout(5):
            while self.heard != list(heard):
                self._something.clear()
                await self._something.wait()


@pytest_asyncio.fixture
async def make_listener() -> AsyncIterator[Callable[..., Replica]]:
    replicas: list[Replica] = []

    def make(link: Link, quiet: float = 5.0) -> Replica:
        replicas.append(Replica(link, quiet))
        return replicas[-1]

    yield make
    for replica in replicas:
        await replica.subscription.aclose()


@pytest_asyncio.fixture
async def single(redis_server: EmbeddedRedis) -> AsyncIterator[Server]:
    link = Server(dial(redis_server.url))
    yield link
    await link.aclose()


async def test_every_replica_hears_what_one_publishes(single, make_listener):
    replicas = [make_listener(single) for _ in range(2)]
    for replica in replicas:
        await replica.until("missed")
    await Wire(single).publish(DROP, "default/cam-7")
    for replica in replicas:
        await replica.until("missed", "default/cam-7")


async def test_it_is_heard_on_all_nodes_of_a_cluster(cluster_link, make_listener):
    replicas = [make_listener(cluster_link) for _ in range(6)]
    for replica in replicas:
        await replica.until("missed")
    await Wire(cluster_link).publish(DROP, "default/cam-7")
    for replica in replicas:
        await replica.until("missed", "default/cam-7")


async def test_after_an_interruption_it_is_said_that_messages_may_be_missing(single, make_listener, admin: Redis):
    replica = make_listener(single)
    await replica.until("missed")
    await admin.client_kill_filter(_type="pubsub")
    await replica.until("missed", "missed")
    await Wire(single).publish(DROP, "default/cam-7")
    await replica.until("missed", "missed", "default/cam-7")


@pytest.mark.integration
async def test_it_begins_once_there_is_a_redis(tmp_path, make_listener):
    link = Server(dial(f"unix://{tmp_path}/redis.sock"))
    replica = make_listener(link)
    async with asyncio.timeout(5):
        while len(replica.failures) < 2:  # noqa: ASYNC110 - it is told, and nobody waits for it
            await asyncio.sleep(0.01)
    assert replica.heard == []
    async with EmbeddedRedis(tmp_path):
        await replica.until("missed")


async def test_a_quiet_subscription_is_kept_while_redis_answers(single, make_listener):
    replica = make_listener(single, quiet=0.03)
    await replica.until("missed")
    await asyncio.sleep(0.2)
    await Wire(single).publish(DROP, "default/cam-7")
    await replica.until("missed", "default/cam-7")


async def test_a_subscription_on_which_nobody_answers_is_made_anew(link, make_listener):
    fault = link.fault("stall", "PING")
    replica = make_listener(Server(dial(link.url)), quiet=0.05)
    await replica.until("missed", "missed")
    fault.released.set()


async def test_closing_leaves_no_connection(single, make_listener, admin: Redis):
    replica = make_listener(single)
    await replica.until("missed")
    assert await admin.publish(DROP, "default/cam-7") == 1
    await replica.subscription.aclose()
    await asyncio.sleep(0.05)
    assert await admin.publish(DROP, "default/cam-7") == 0


async def test_what_cannot_be_published_is_logged_and_nothing_else(tmp_path, caplog: pytest.LogCaptureFixture):
    await Wire(Server(dial(f"unix://{tmp_path}/absent.sock"))).publish(DROP, "default/cam-7")
    assert f"nothing was published on {DROP}" in caplog.text


async def test_what_no_replica_says_is_heard_without_harm(single, make_listener, admin: Redis):
    replica = make_listener(single)
    await replica.until("missed")
    await admin.publish(DROP, b"\xff\xfe")
    await Wire(single).publish(DROP, "default/cam-7")
    await replica.until("missed", "\ufffd\ufffd", "default/cam-7")


async def test_a_message_that_cannot_be_taken_ends_no_subscription(single, make_listener):
    replica = make_listener(single)
    await replica.until("missed")
    replica.refuses.add("nonsense")
    await Wire(single).publish(DROP, "nonsense")
    await replica.until("missed", "missed")
    await Wire(single).publish(DROP, "default/cam-7")
    await replica.until("missed", "missed", "default/cam-7")
    assert [repr(failure) for failure in replica.failures] == ["ValueError('nonsense')"]
