"""The same promises on a Redis Cluster: slots move, masters are replaced, and nothing is hidden."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import pytest_asyncio
from checker.directed import Planned
from checker.faults import FaultyPool
from checker.lab import Lab, open_lab
from checker.toy import PROBE, answer_after
from redis_cluster import Move, RedisCluster, Server

from acclimate_service.federated.cohorts import Cohorts
from acclimate_service.state import (
    Change,
    ClientScope,
    Limits,
    StateStore,
    StoreUnavailable,
    Wire,
    check,
    connect,
    random_rid,
)
from acclimate_service.state.errors import StoreUnfit
from acclimate_service.state.outcomes import Attempt, Committed
from acclimate_service.state.records import Basis
from acclimate_service.state.redis.checks import Durability, inspect
from acclimate_service.state.redis.cluster import Cluster
from acclimate_service.state.redis.link import Server as SingleServer

MODEL = "0123456789abcdef"
FEW = 60
MANY = 500


@pytest_asyncio.fixture
async def lab(cluster: RedisCluster) -> AsyncIterator[Lab]:
    async with open_lab(cluster.url) as lab:
        yield lab


@contextmanager
def moving(cluster: RedisCluster, key: str) -> Iterator[Move]:
    """A slot on its way until the block ends."""
    step = cluster.move(key)
    step.begin()
    try:
        yield step
    finally:
        step.carry()
        step.end()


def errors(server: Server, code: str) -> int:
    """How often a node has said so."""
    found = server.client.info("errorstats").get(f"errorstat_{code}", {"count": 0})
    return int(found["count"])


# Finding the way.


async def test_a_url_says_by_itself_whether_it_is_one_server_or_a_cluster(cluster, redis_server):
    for url, kind in ((cluster.url, Cluster), (redis_server.url, SingleServer)):
        link = await connect(url)
        assert isinstance(link, kind)
        await link.aclose()


async def test_a_cluster_is_not_reached_by_a_unix_socket(cluster):
    with pytest.raises(ValueError, match="reached by redis://"):
        await connect(f"unix://{cluster.servers[0].directory}/redis.sock")


async def test_a_cluster_whose_slots_nobody_serves_is_refused(cluster):
    master = cluster.masters[0]
    lonely = Server(cluster.servers[0].directory.parent / "lonely", master.port - 1)
    try:
        with pytest.raises(StoreUnavailable, match="slots nobody serves"):
            await connect(f"redis://127.0.0.1:{lonely.port}")
    finally:
        lonely.close()


async def test_clients_are_spread_over_all_masters_and_found_again_by_another_replica(
    cluster, make_driver, make_cluster_link
):
    one, two = await make_cluster_link(), await make_cluster_link()
    for number in range(30):
        await make_driver(client=f"c{number}", link=one).committed(state=b"of %d" % number)
    assert all(size > 0 for size in cluster.sizes())
    for number in range(30):
        assert await make_driver(client=f"c{number}", link=two).state() == b"of %d" % number


async def test_a_session_keeps_large_states_on_a_cluster_too(cluster_link, make_replica):
    one = make_replica(1000, link=cluster_link)
    payloads = [b"%d" % number for number in range(8)]
    for payload in payloads:
        await one.apply(payload)
    await one.session.evict()
    two = make_replica(1000, link=cluster_link)
    applied = await two.apply(b"last")
    assert (applied.seq, applied.answer) == (9, answer_after(*payloads, b"last"))
    assert await one.session.delete()
    assert (await two.apply(b"anew")).seq == 1


async def test_a_cohort_lives_on_the_master_of_its_own_slot(cluster_link):
    cohorts = Cohorts(Wire(cluster_link), Limits(), MODEL, "default")
    await cohorts.advance(await cohorts.load(), b"layers", ["cam-7"])
    cohort = await cohorts.load()
    assert cohort.version == 1
    assert await cohorts.read(cohort.layers) == b"layers"


# Start-up checks.


async def test_the_facts_of_a_cluster_are_those_of_its_worst_master(cluster, cluster_link):
    wire, worst = Wire(cluster_link), cluster.masters[1]
    worst.client.config_set("appendfsync", "no")
    try:
        facts = await inspect(wire)
    finally:
        worst.client.config_set("appendfsync", "everysec")
    assert (facts.cluster, facts.masters, facts.replicas, facts.role) == (True, 3, 1, "master")
    assert facts.durability == Durability.NONE
    assert (await inspect(wire)).durability == Durability.EVERYSEC


async def test_a_cluster_with_one_master_that_evicts_is_refused_by_its_name(cluster, cluster_link):
    wire, bad = Wire(cluster_link), cluster.masters[2]
    bad.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreUnfit, match=f"of master 127.0.0.1:{bad.port}, its maxmemory-policy") as unfit:
            await check(wire)
    finally:
        bad.client.config_set("maxmemory-policy", "noeviction")
    assert len(unfit.value.problems) == 1
    assert await check(wire) == await inspect(wire)


# Slots that move.


async def test_a_script_follows_its_slot_and_the_way_is_learned(cluster, cluster_link, make_driver):
    driver = make_driver(link=cluster_link)
    await driver.committed(state=b"s1")
    step = cluster.move(driver.client.registry)
    for part in (step.begin, step.carry, step.end):
        part()
    before = errors(step.source, "MOVED")
    assert (await driver.committed(state=b"s2")).seq == 2
    assert await driver.state() == b"s2"
    assert errors(step.source, "MOVED") == before + 1


async def test_a_script_of_one_key_is_asked_where_its_slot_is_going(cluster, cluster_link):
    cohorts = Cohorts(Wire(cluster_link), Limits(), MODEL, "default")
    key = f"acc:{{default/~{MODEL}}}:l"
    with moving(cluster, key) as step:
        step.target.client.script_flush()  # so that it is asked twice: EVALSHA, then EVAL
        assert await cohorts.lease("me") is None
        assert step.target.client.execute_command("CLUSTER", "COUNTKEYSINSLOT", step.slot) == 1
        assert errors(step.source, "ASK") > 0
    assert await cohorts.lease("you") is not None


async def test_a_script_of_several_keys_waits_until_its_slot_has_arrived(cluster, cluster_link, make_driver):
    driver = make_driver(link=cluster_link)
    first = await driver.committed(state=b"s1")
    with moving(cluster, driver.client.registry) as step:
        waiting = asyncio.create_task(driver.commit(first.basis, state=b"s2"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert errors(step.target, "TRYAGAIN") + errors(step.source, "TRYAGAIN") > 0
    outcome = await waiting
    assert isinstance(outcome, Committed)
    assert (outcome.seq, outcome.duplicate) == (2, False)


async def test_without_patience_a_slot_on_its_way_is_a_refusal_that_changed_nothing(
    cluster, make_cluster_link, make_driver
):
    driver = make_driver(link=await make_cluster_link(patience=0.01), resend=1)
    with moving(cluster, driver.client.registry), pytest.raises(StoreUnavailable, match="at present") as refused:
        await driver.commit(Basis())
    assert refused.value.committed is False
    assert (await driver.load()).head is None


async def test_a_refusal_on_the_way_says_nothing_of_a_copy_without_reply(cluster, cluster_link):
    client = ClientScope("cam-7")
    faults = Planned(commit=["delayed"])
    pool = FaultyPool(cluster_link, faults, random.Random(0), lambda: None, {})
    store = StateStore(Wire(pool), Limits())
    with moving(cluster, client.registry), pytest.raises(StoreUnavailable) as refused:
        await store.commit(
            client, MODEL, Basis(), Attempt(random_rid(), "f" * 32), Change("", b"state", b""), adapter="toy"
        )
    assert refused.value.committed == "unknown"
    await asyncio.wait(set(faults.detached))


async def test_batches_are_applied_once_while_their_slot_moves_to_and_fro(cluster, cluster_link, make_replica):
    replicas = [make_replica(1000, link=cluster_link), make_replica(link=cluster_link)]
    stop, payloads, applied = asyncio.Event(), list[bytes](), asyncio.Queue[int]()

    async def apply_all() -> None:
        while not stop.is_set():
            payloads.append(b"%d" % len(payloads))
            batch = await replicas[len(payloads) // 5 % 2].apply(payloads[-1])
            assert (batch.seq, batch.answer) == (len(payloads), answer_after(*payloads))
            applied.put_nowait(batch.seq)

    applying = asyncio.create_task(apply_all())
    for _ in range(4):
        step = cluster.move(replicas[0].client.registry)
        for part in (step.begin, step.carry, step.end):
            await asyncio.to_thread(part)
            await asyncio.sleep(0.03)
        for _ in range(5):
            await asyncio.wait_for(applied.get(), 10)
    stop.set()
    await applying
    assert len(payloads) >= 20
    assert await replicas[0].seen() == (len(payloads), answer_after(*payloads, PROBE))


async def test_histories_full_of_faults_break_no_promise_on_a_cluster(lab: Lab):
    report = await lab.run(range(50_000, 50_000 + FEW))
    assert not report.violations, report
    assert report.histories == FEW


@pytest.mark.slow
async def test_hundreds_of_histories_break_no_promise_on_a_cluster(lab: Lab):
    report = await lab.run(range(51_000, 51_000 + MANY))
    print(report)
    assert not report.violations, report
