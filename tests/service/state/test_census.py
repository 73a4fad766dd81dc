"""Clients are counted by tenant and model scope, on all servers of a cluster."""

import math

import pytest
from redis.asyncio import Redis

from acclimate_service.state import Change, ClientScope, StateStore, Wire, clients_of_version, take_census
from acclimate_service.state.outcomes import Attempt
from acclimate_service.state.records import Basis
from acclimate_service.state.redis.keys import random_rid

ONE, TWO = "1" * 16, "2" * 16
VERSION = "a" * 16


async def fill(store: StateStore, *, clients: int = 3) -> None:
    """So many clients of one tenant have states of two models; of one more tenant, one client."""

    async def commit(client: ClientScope, model: str, version: str = "") -> None:
        basis, attempt = (await store.load(client, model)).basis, Attempt(random_rid(), "f" * 32)
        assert isinstance(basis, Basis)
        await store.commit(client, model, basis, attempt, Change("{}", b"state", b""), adapter="atp", version=version)

    for number in range(clients):
        await commit(ClientScope(f"c{number}"), ONE, VERSION if number else "")
        await commit(ClientScope(f"c{number}"), TWO)
    await commit(ClientScope("c0", "default~other"), ONE)


async def test_every_client_counts_once_in_each_scope(driver, admin: Redis) -> None:
    await fill(driver.store, clients=30)
    await admin.set("acc:{default/odd}:no-scope:h", "a foreign key")
    census = await take_census(driver.store._wire, math.inf)
    assert census.complete
    assert census.clients == {("default", ONE): 30, ("default", TWO): 30, ("default~other", ONE): 1}


async def test_what_is_not_counted_in_time_is_said(driver) -> None:
    await fill(driver.store)
    census = await take_census(driver.store._wire, 0)
    assert (census.complete, census.clients) == (False, {})


@pytest.mark.parametrize(("version", "clients"), [("", 2), (VERSION, 2), ("b" * 16, 0)])
async def test_the_version_that_made_a_state_last_is_told_apart(driver, version: str, clients: int) -> None:
    await fill(driver.store)
    wire: Wire = driver.store._wire
    assert await clients_of_version(wire, ("default", "default~other"), ONE, version) == clients
    assert await clients_of_version(wire, ("default~other",), ONE, version) == (version == "")


async def test_all_servers_of_a_cluster_are_asked(make_driver, cluster_link) -> None:
    driver = make_driver(link=cluster_link)
    await fill(driver.store, clients=12)
    census = await take_census(driver.store._wire, math.inf)
    assert census.clients == {("default", ONE): 12, ("default", TWO): 12, ("default~other", ONE): 1}
    assert await clients_of_version(driver.store._wire, ("default",), ONE, VERSION) == 11
