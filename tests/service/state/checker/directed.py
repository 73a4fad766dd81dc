"""Histories too rare to wait for. Each tells what is wrong, and does so only without the safeguard it is for."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from checker.faults import Faults, FaultyPool
from checker.history import CONFIG, LIMITS, MODELS, SIZES
from checker.lab import Lab, Report, open_lab
from checker.profile import Profile
from checker.toy import PROBE, Toy, ToyState, advance, answer_after, answer_of, batch_of, initial, rework
from redis.exceptions import RedisError

from acclimate_service.guard.evidence import Counts
from acclimate_service.guard.fleet import Fleet
from acclimate_service.guard.pools import Pools
from acclimate_service.state import (
    Change,
    ClientScope,
    Context,
    Limits,
    Policy,
    Request,
    Session,
    StateError,
    StateStore,
    Wire,
    random_rid,
)
from acclimate_service.state.errors import StateCorrupt
from acclimate_service.state.outcomes import Attempt, Committed
from acclimate_service.state.records import Basis
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_service.state.tasks import Logged

MODEL = MODELS[0]
NEVER_MS = 3_600_000


class Planned(Faults):
    """Faults in a given order for each script, then none."""

    def __init__(self, **plan: list[str]) -> None:
        super().__init__(delay=(0.15, 0.15))
        self._plan = plan

    def draw(self, dice: random.Random, script: str) -> str:
        return self._plan[script].pop(0) if self._plan.get(script) else ""


class Bench:
    """One client, and as many replicas as are asked for."""

    def __init__(self, lab: Lab, profile: Profile) -> None:
        self.lab = lab
        self.client = ClientScope(f"d{lab.serial()}")
        self._mutated = lab.mutated(profile)

    def store(self, faults: Faults, limits: Limits) -> StateStore:
        pool = FaultyPool(self.lab.pool, faults, random.Random(0), lambda: None, self._mutated)
        return StateStore(Wire(pool, resend=1, jitter_ms=1), limits)  # type: ignore[arg-type]

    def session(
        self, size: str = "small", faults: Faults | None = None, model: str = MODEL, **other: int
    ) -> Session[ToyState]:
        limits = Limits(**{**LIMITS, **other})
        return self.session_of(self.store(faults or Planned(), limits), size, model, limits)

    def session_of(self, store: StateStore, size: str, model: str, limits: Limits) -> Session[ToyState]:
        return Session(Context(store, limits, self.client, model, Toy(SIZES[size]), Policy(CONFIG)))

    @asynccontextmanager
    async def lost(self) -> AsyncIterator[None]:
        """Redis loses what the block changes."""
        admin = self.lab.admin
        keys = await admin.keys(f"acc:{{default/{self.client.client}}}*")
        saved = [(key, await admin.dump(key), await admin.pttl(key)) for key in keys]
        yield
        for key, value, ttl in saved:
            await admin.restore(key, ttl, value, replace=True)


def fresh() -> Request:
    return Request(random_rid(), "f" * 32)


async def rolled_back_by_two_writes(lab: Lab, profile: Profile) -> list[str]:
    """cx 4: a state of a history that Redis lost is continued, once the numbers are equal again."""
    bench = Bench(lab, profile)
    one, two = bench.session(), bench.session()
    for payload in (b"1", b"2", b"3"):
        await one.apply(fresh(), batch_of(payload))
    async with bench.lost():
        for payload in (b"lost 4", b"lost 5"):
            await one.apply(fresh(), batch_of(payload))
    for payload in (b"4", b"5"):
        await two.apply(fresh(), batch_of(payload))
    applied = await one.apply(fresh(), batch_of(b"6"))
    merged = applied.answer != answer_after(b"1", b"2", b"3", b"4", b"5", b"6", config=CONFIG)
    return ["two histories were merged"] if merged else []


async def snapshot_of_a_lost_history(lab: Lab, profile: Profile) -> list[str]:
    """cx 9: a snapshot of a history that Redis lost becomes the base of the one that came in its place."""
    bench = Bench(lab, profile)
    session, store = bench.session("large", snapshot_idle_ms=NEVER_MS), bench.store(Planned(), Limits(**LIMITS))
    await session.apply(fresh(), batch_of(b"1"))
    await session.hand_over()
    async with bench.lost():
        await session.apply(fresh(), batch_of(b"lost 2"))
        held = session.memory.held
        assert held is not None
        state = await Toy(SIZES["large"]).serialise(held.state)
    await session.apply(fresh(), batch_of(b"2"))  # under the fence of the one that was lost
    uploaded = await store.journal.upload(bench.client, MODEL, held.basis, "toy", state)
    assert isinstance(uploaded, tuple)
    await store.journal.flip(bench.client, MODEL, held.basis, held.track.fence, *uploaded)
    look = await bench.session("large").look(batch_of(PROBE))
    merged = look.answer != answer_after(b"1", b"2", PROBE, config=CONFIG)
    return ["two histories were merged"] if merged else []


async def batch_on_a_state_that_was_replaced(lab: Lab, profile: Profile) -> list[str]:
    """cx 2: whoever writes the journal appends to a state that another replica has replaced."""
    bench = Bench(lab, profile)
    writer, other = (bench.session("large", snapshot_idle_ms=NEVER_MS) for _ in range(2))
    await writer.apply(fresh(), batch_of(b"1"))
    await other.apply(fresh(), partial(Toy(SIZES["large"]).rework, content=b"replaced"))
    applied = await writer.apply(fresh(), batch_of(b"2"))
    try:
        seen = await bench.session("large").look(batch_of(PROBE))
    except StateCorrupt as error:
        return [str(error)]
    expected = advance(rework(advance(initial(CONFIG), b"1"), b"replaced"), b"2")
    right = (applied.answer, seen.answer) == (answer_of(expected), answer_of(advance(expected, PROBE)))
    return [] if right else ["a batch was answered from a state that had been replaced"]


async def listed_of_a_later_life(lab: Lab, profile: Profile) -> list[str]:
    """A read mixes two lives, whose entries have the same numbers: the client begins anew before they are listed."""
    return await _read_meanwhile(lab, profile, "contents")


async def fetched_of_a_later_life(lab: Lab, profile: Profile) -> list[str]:
    """The same after they were listed, and before they are read."""
    return await _read_meanwhile(lab, profile, "fetch")


async def _read_meanwhile(lab: Lab, profile: Profile, late: str) -> list[str]:
    bench, limits = Bench(lab, profile), Limits(**{**LIMITS, "snapshot_idle_ms": NEVER_MS})
    writer, store = bench.session("large", snapshot_idle_ms=NEVER_MS), bench.store(Planned(), limits)
    lives = {}
    read = getattr(store.entries, late)

    async def live(*payloads: bytes) -> None:
        for payload in payloads:
            applied = await writer.apply(fresh(), batch_of(payload))
        lives[applied.life] = answer_after(*payloads, config=CONFIG)

    async def read_late(*args: Any) -> Any:
        if len(lives) == 1:
            await writer.delete()
            await live(b"3", b"4")
        return await read(*args)

    await live(b"1", b"2")
    setattr(store.entries, late, read_late)
    present = await bench.session_of(store, "large", MODEL, limits).present()
    mixed = answer_of(present.state) != lives[present.life]
    return ["two lives were mixed"] if mixed else []


async def head_extended_alone(lab: Lab, profile: Profile) -> list[str]:
    """cx 14: a snapshot expires under a live head."""
    bench = Bench(lab, profile)
    session = bench.session("large")
    await session.apply(fresh(), batch_of(b"1"))
    await session.evict()
    for key in await lab.admin.keys(f"acc:{{default/{bench.client.client}}}*"):
        await lab.admin.pexpire(key, LIMITS["state_ttl_ms"] // 4)
    loaded = await bench.store(Planned(), Limits(**LIMITS)).load(bench.client, MODEL)
    assert loaded.head is not None
    assert loaded.head.snapshot is not None
    head = await lab.admin.pttl(bench.client.head(MODEL))
    snapshot = await lab.admin.pttl(bench.client.snapshot(MODEL, loaded.head.sid))
    return [f"the head lives {head} ms, its snapshot {snapshot} ms"] if head > snapshot + 1000 else []


async def admitted_before_a_delete(lab: Lab, profile: Profile) -> list[str]:
    """cx 15: a request that was admitted before a DELETE brings the client back."""
    bench = Bench(lab, profile)
    store = bench.store(Planned(), Limits(**LIMITS))
    await bench.session().apply(fresh(), batch_of(b"1"))
    await store.delete(bench.client)
    attempt, change = Attempt(random_rid(), "f" * 32), Change("", b"late", b"")
    late = await store.commit(bench.client, MODEL, Basis(), attempt, change, adapter="toy")
    return ["a deleted client came back"] if isinstance(late, Committed) else []


async def refused_but_a_copy_is_on_its_way(lab: Lab, profile: Profile) -> list[str]:
    """cx 16: "not committed" is said while a delayed copy may land."""
    bench, faults = Bench(lab, profile), Planned(commit=["delayed"])
    session, said = bench.session(faults=faults), None
    await lab.admin.config_set("maxmemory", "1")
    try:
        await session.apply(fresh(), batch_of(b"1"))
    except StateError as error:
        said = error.committed
    finally:
        await lab.admin.config_set("maxmemory", "0")
    await asyncio.wait(set(faults.detached))
    landed = (await bench.session().look(batch_of(PROBE))).seq == 1
    assert landed
    return ["what was called not committed is stored"] if said is False else []


async def nothing_to_reset_but_a_copy_is_on_its_way(lab: Lab, profile: Profile) -> list[str]:
    """The same with a reset that found no state, and whose delayed copy finds the state of a later request."""
    bench, faults = Bench(lab, profile), Planned(reset=["delayed"])
    session, said = bench.session(faults=faults), None
    await bench.session(model=MODELS[1]).apply(fresh(), batch_of(b"life"))
    try:
        await session.reset(fresh())
    except StateError as error:
        said = error.committed
    await bench.session().apply(fresh(), batch_of(b"1"))
    await asyncio.wait(set(faults.detached))
    landed = (await bench.session().look(batch_of(PROBE))).seq == 2
    assert landed
    return ["what was called not committed is stored"] if said is False else []


class Telling:
    """One client's labels, which replicas tell, and what comes between one exchange of it and the next."""

    def __init__(self, lab: Lab, profile: Profile) -> None:
        self.bench = Bench(lab, profile)
        wire = self.bench.store(Planned(), Limits())._wire
        self.pools = Pools(Counts, wire, Limits(), MODEL, self.bench.client.tenant)

    async def begin(self) -> str:
        """A life of the client, in which it has told nothing yet."""
        return (await self.bench.session().apply(fresh(), batch_of(b"1"))).life

    async def tell(self, life: str, wins: int) -> None:
        told = {"life": life, "seq": wins, "born": life, "counts": Counts(wins, labelled=wins, adapted_right=wins)}
        await Fleet(self.pools, "adapt", Logged()).tell(self.bench.client, CONFIG, **told)

    async def end(self) -> None:
        """Another replica deletes the client."""
        await self.bench.session().delete()
        await self.pools.forget(self.bench.client)

    async def next_life(self) -> None:
        await self.end()
        await self.tell(await self.begin(), 7)

    async def overtaken(self, exchange: str, *, after: bool, meanwhile: Callable[[], Awaitable[None]]) -> int:
        """Tell labels while this happens before or after an exchange; wins of the client that are counted then."""
        late, plain = await self.begin(), getattr(self.pools, exchange)

        async def interrupted(*args: Any) -> Any:
            delattr(self.pools, exchange)
            done = await plain(*args) if after else None
            await meanwhile()
            return done if after else await plain(*args)

        setattr(self.pools, exchange, interrupted)
        await self.tell(late, 3)
        share = await self.pools.share(self.bench.client, CONFIG)
        return share.counts.wins if share else 0


async def told_just_after_a_delete(lab: Lab, profile: Profile) -> list[str]:
    """A replica that has asked for the life of a client tells its labels once another one has deleted it."""
    telling = Telling(lab, profile)
    counted = await telling.overtaken("tell", after=False, meanwhile=telling.end)
    return [f"{counted} rows of nobody count"] if counted else []


async def told_into_the_next_life(lab: Lab, profile: Profile) -> list[str]:
    """The same, when the client has begun again and told labels of its next life."""
    return await _spared(Telling(lab, profile), "tell", after=False)


async def asked_for_in_the_next_life(lab: Lab, profile: Profile) -> list[str]:
    """The same, when it does so as soon as its life was asked for."""
    return await _spared(Telling(lab, profile), "life", after=True)


async def forgotten_in_the_next_life(lab: Lab, profile: Profile) -> list[str]:
    """What was told too late is taken back when the client has told labels of its next life."""
    return await _spared(Telling(lab, profile), "tell", after=True)


async def _spared(telling: Telling, exchange: str, *, after: bool) -> list[str]:
    counted = await telling.overtaken(exchange, after=after, meanwhile=telling.next_life)
    return [] if counted == 7 else [f"{counted} rows of the next life count, and 7 were told"]


async def killed_server(directory: Path, seeds: range, *, durable: bool = True, kills: int = 3) -> Report:
    """cx 22, I1: Redis is killed under running histories; without an append-only file it loses what it acknowledged."""
    async with EmbeddedRedis(directory, appendfsync="always") as server, open_lab(server.url) as lab:
        lab.calm.clear()
        running = asyncio.create_task(lab.run(seeds, at_once=len(seeds)))
        for _ in range(kills):
            if not durable:
                await lab.admin.config_set("appendonly", "no")
            await _until(lab.acknowledged + 20, lab)
            killed = server.pid
            assert killed is not None
            os.kill(killed, 9)
            await _up_again(lab, killed, server)
        lab.calm.set()
        return await running


async def _until(acknowledged: int, lab: Lab) -> None:
    """Wait until so many requests have been acknowledged, or all callers are through."""
    for _ in range(300):
        if lab.acknowledged >= acknowledged:
            return
        await asyncio.sleep(0.01)


async def _up_again(lab: Lab, killed: int, server: EmbeddedRedis) -> None:
    for _ in range(1000):
        with suppress(RedisError, OSError):
            if server.pid != killed and await lab.admin.ping():
                return
        await asyncio.sleep(0.01)


SCENARIOS = (
    rolled_back_by_two_writes,
    batch_on_a_state_that_was_replaced,
    listed_of_a_later_life,
    fetched_of_a_later_life,
    snapshot_of_a_lost_history,
    head_extended_alone,
    admitted_before_a_delete,
    refused_but_a_copy_is_on_its_way,
    nothing_to_reset_but_a_copy_is_on_its_way,
    told_just_after_a_delete,
    told_into_the_next_life,
    asked_for_in_the_next_life,
    forgotten_in_the_next_life,
)
