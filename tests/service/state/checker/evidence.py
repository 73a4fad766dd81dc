"""Evidence pools under faults: what clients' labels say is told late, twice, by any replica, beside deletes and expiry.

Each history has a pool of its own. What must hold in the end: a row counts once at most, and does if that was
acknowledged; a deleted client has no share; how many shares there are is what is counted of them.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import orjson
from checker.faults import Faults, FaultyPool
from checker.lab import Lab, patched
from checker.profile import Profile

from acclimate_service.guard.evidence import WEIGHT, Counts
from acclimate_service.guard.fleet import Fleet
from acclimate_service.guard.pools import Pools
from acclimate_service.guard.pools import _digest as digest_of
from acclimate_service.state import Change, ClientScope, Limits, StateError, StateStore, Wire
from acclimate_service.state.outcomes import Attempt, Committed, Deleted
from acclimate_service.state.records import Basis
from acclimate_service.state.redis.keys import new_id, random_rid

MODEL = "0" * 15 + "e"
CONFIGURATIONS = ("one", "two")
NOT_HERE = ("crash before", "crash after", "cancelled", "delayed")
"""Faults of sessions, and a command that lands after all that were sent later: a pool lies on another server than the
lives of its clients, so that nothing could tell it from one in time."""
HISTORY = 4
"""Parts of a share before its numbers: of each kind of rows that was told, then of each that counts."""
KINDS = 4
"""Those that are told here, the first ones."""
Rows: TypeAlias = list[int]
Record: TypeAlias = tuple[str, str, str]
"""Configuration, life, and when it was born."""


class Told(NamedTuple):
    """What somebody told, or will tell again."""

    configuration: str
    life: str
    seq: int
    born: str
    rows: tuple[int, ...]


class Unheard:
    """Remembers that telling failed."""

    failure: Exception | None = None

    def failed(self, task: str, error: Exception) -> None:
        self.failure = error

    def succeeded(self, task: str) -> None:
        """It is told in the end alone."""


@dataclass
class Client:
    """One client, and what was told of it.

    Args:
        scope: which.
        life: the present one; empty while it has none.
        seq, configuration, born, rows: of its present record.
        told: all of it, of all lives.
        possible: rows of each record that may count, by kind.
        sure: rows of each record that do, if no more do than the weight of a client.
        under_way: how many are being told, by life.
    """

    scope: ClientScope
    life: str = ""
    seq: int = 0
    configuration: str = CONFIGURATIONS[0]
    born: str = ""
    rows: Rows = field(default_factory=lambda: [0] * KINDS)
    told: list[Told] = field(default_factory=list)
    possible: dict[Record, Rows] = field(default_factory=dict)
    sure: dict[Record, Rows] = field(default_factory=dict)
    under_way: Counter[str] = field(default_factory=Counter)

    def begin_record(self) -> None:
        self.born, self.rows = new_id(), [0] * KINDS

    def forget(self, life: str, under_way: int) -> None:
        """What was acknowledged of this life by now is to be gone; what is still on its way may count in the next."""
        self.sure.clear()
        if not under_way:
            for record in [record for record in self.possible if record[1] == life]:
                del self.possible[record]

    def of(self, records: Mapping[Record, Rows], configuration: str) -> Rows:
        found = [rows for record, rows in records.items() if record[0] == configuration]
        return [sum(each[kind] for each in found) for kind in range(KINDS)]


class Evidence:
    """One history of evidence."""

    def __init__(self, seed: int, profile: Profile, lab: Lab) -> None:
        self._rng = random.Random(f"evidence {seed}")
        self._lab = lab
        tenant = f"e{seed}-{lab.serial()}"
        rates = {name: rate for name, rate in profile.rates.items() if name not in NOT_HERE}
        self._faults = Faults({**dict.fromkeys(NOT_HERE, 0.0), **rates})
        limits = Limits()
        self._store = StateStore(Wire(lab.pool), limits)
        self._plain = Pools(Counts, Wire(lab.pool), limits, MODEL, tenant)
        if profile.edits:
            self._plain = self._pools(profile, limits, tenant, Faults(active=False))
        self._replicas = [self._pools(profile, limits, tenant, self._faults) for _ in range(3)]
        self._clients = [Client(ClientScope(f"c{number}", tenant)) for number in range(3)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch = 0  # what was told in an earlier one may be gone

    def _pools(self, profile: Profile, limits: Limits, tenant: str, faults: Faults) -> Pools[Counts]:
        dice = random.Random(self._rng.random())
        link = FaultyPool(self._lab.pool, faults, dice, lambda: None, self._lab.mutated(profile))
        return Pools(Counts, Wire(link, resend=self._rng.choice((0, 1, 2)), jitter_ms=2), limits, MODEL, tenant)  # type: ignore[arg-type]

    async def run(self) -> list[str]:
        """Everything that is wrong in the end."""
        await asyncio.gather(*(self._live(client) for client in self._clients))
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self._faults.active = False
        for client in self._clients:
            if client.life and sum(client.rows):
                await self._label(client, self._plain)
            for told in sorted(client.told[:-1], key=lambda told: told.life != client.life):
                await self._tell(client, told, self._plain)
        found = [problem for client in self._clients for problem in await self._wrong(client)]
        return found + await self._uncounted()

    # What happens to a client.

    async def _live(self, client: Client) -> None:
        actions: dict[Callable[[Client], Awaitable[None]], int] = {
            self._label: 10,
            self._hurry: 6,
            self._restart: 2,
            self._configure: 2,
            self._late: 4,
            self._delete: 3,
            self._expire: 1,
            self._let_the_pool_expire: 1,
        }
        for _ in range(self._rng.randint(8, 20)):
            if not client.life:
                await self._begin(client)
            [action] = self._rng.choices(list(actions), list(actions.values()))
            await action(client)

    async def _begin(self, client: Client) -> None:
        basis = (await self._store.load(client.scope, MODEL)).basis
        attempt, change = Attempt(random_rid(), ""), Change("", b"state", b"")
        done = await self._store.commit(client.scope, MODEL, basis or Basis(), attempt, change, adapter="toy")
        assert isinstance(done, Committed)
        client.life, client.seq = done.life, 0
        client.begin_record()

    async def _label(self, client: Client, pools: Pools | None = None) -> None:
        for _ in range(self._rng.choice((1, 1, 2, 3, WEIGHT))):
            client.rows[self._rng.randrange(KINDS)] += 1
        await self._tell(client, self._next(client), pools)

    async def _hurry(self, client: Client) -> None:
        """Its labels are still being told when the next thing happens to it."""
        client.rows[self._rng.randrange(KINDS)] += 1
        self._start(self._tell(client, self._next(client)))

    async def _restart(self, client: Client) -> None:
        client.begin_record()
        await self._tell(client, self._next(client))

    async def _configure(self, client: Client) -> None:
        client.configuration = self._rng.choice(CONFIGURATIONS)
        await self._restart(client)

    async def _late(self, client: Client) -> None:
        if client.told:
            self._start(self._tell(client, self._rng.choice(client.told)))

    async def _delete(self, client: Client) -> None:
        life = client.life
        assert isinstance(await self._store.delete(client.scope), Deleted)
        client.life, begun = "", client.under_way[life]
        pools = self._rng.choice(self._replicas)
        for _ in range(20):  # its caller is told that it may have come to nothing, and asks again
            try:
                await pools.forget(client.scope)
                break
            except StateError:
                pools = self._plain
        client.forget(life, begun)

    async def _expire(self, client: Client) -> None:
        """Of its keys nothing is left, and nobody has deleted it: what it told still counts."""
        await self._lab.age(client.scope, 10 * Limits().state_ttl_ms, everything=True)
        client.life = ""

    async def _let_the_pool_expire(self, client: Client) -> None:
        await self._lab.admin.delete(self._plain._pool)
        self._epoch += 1
        for each in self._clients:
            each.sure.clear()

    # What is told of it.

    def _next(self, client: Client) -> Told:
        client.seq += 1
        told = Told(client.configuration, client.life, client.seq, client.born, tuple(client.rows))
        client.told.append(told)
        client.possible[told.configuration, told.life, told.born] = list(told.rows)
        return told

    async def _tell(self, client: Client, told: Told, pools: Pools | None = None) -> None:
        heard, epoch = Unheard(), self._epoch
        fleet = Fleet(pools or self._rng.choice(self._replicas), "follow-fleet", heard)  # type: ignore[arg-type]
        counts = _counts(told.rows)
        client.under_way[told.life] += 1
        try:
            await fleet.tell(
                client.scope, told.configuration, life=told.life, seq=told.seq, born=told.born, counts=counts
            )
        except StateError as error:  # without a safeguard
            heard.failed("evidence", error)
        finally:
            client.under_way[told.life] -= 1
        if told.life != client.life:  # overtaken by the next life, whose share it may have taken along
            self._epoch += 1
            client.sure.clear()
        record = (told.configuration, told.life, told.born)
        current = (client.configuration, client.life, client.born)
        if heard.failure is None and epoch == self._epoch and record == current:
            client.sure[record] = list(map(max, told.rows, client.sure.get(record, [0] * KINDS)))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What must hold in the end.

    async def _wrong(self, client: Client) -> list[str]:
        problems, name = list[str](), self._plain._name(client.scope)
        fields = await self._lab.admin.hgetall(self._plain._pool)
        shares = {field.decode(): share.decode() for field, share in fields.items() if field.endswith(name.encode())}
        for configuration in CONFIGURATIONS:
            share = next((shares[field] for field in shares if field.startswith(digest_of(configuration))), None)
            possible = client.of(client.possible, configuration)
            sure = sum(client.of(client.sure, configuration))
            numbers = share.split("|")[HISTORY:] if share else ["0"] * 2 * KINDS
            counted = list(map(int, numbers[len(numbers) // 2 :]))[:KINDS]
            if share and not sum(possible):
                problems.append(f"{client.scope.client} has a share of {configuration}, and nothing that counts")
            if any(map(int.__gt__, counted, possible)) or sum(counted) > WEIGHT:
                problems.append(f"{client.scope.client} counts with {counted} rows of {possible}")
            if sum(counted) < min(WEIGHT, sure):
                problems.append(f"{client.scope.client} counts with {counted} rows, and {sure} were acknowledged")
        if client.life and sum(client.rows):
            known = await self._plain.share(client.scope, client.configuration)
            if known is None or known.counts != _counts(client.rows):
                problems.append(f"{client.scope.client} has told {client.rows}, and {known} is known")
        return problems

    async def _uncounted(self) -> list[str]:
        """Shares and what is counted of them live together."""
        admin, pool = self._lab.admin, self._plain._pool
        fields = [field.decode() for field in await admin.hkeys(pool)]
        shares = defaultdict[str, int](int)
        for name in fields:
            digest, bar, _ = name.partition("|")
            shares[digest] += bool(bar)
        sizes = orjson.loads(await admin.hget(pool, "@sizes") or b"{}")
        texts = {name for name in fields if "|" not in name and not name.startswith("@")}
        problems = [] if sizes == {each: shares[each] for each in texts} else [f"{sizes} are counted of {fields}"]
        return problems + ([f"{pool} never expires"] if await admin.pttl(pool) == -1 else [])


def _counts(rows: Iterable[int]) -> Counts:
    wins, losses, both, neither = rows
    return Counts(wins, losses, wins + losses + both + neither, both + losses, both + wins)


async def run(
    lab: Lab, seeds: Iterable[int], profile: Profile | None = None, *, at_once: int = 12
) -> dict[int, list[str]]:
    """Run the histories of these seeds; what was wrong, by seed, up to the first that is."""
    profile = profile or Profile()
    await lab.load_scripts(profile)
    queue, found = iter(seeds), dict[int, list[str]]()

    async def work() -> None:
        for seed in queue:
            if found:
                return
            try:
                problems = await Evidence(seed, profile, lab).run()
            except Exception as error:  # what cannot be read is as wrong as what reads wrong
                problems = [f"the history did not end: {error!r}"]
            if problems:
                found[seed] = problems

    with patched(profile):
        await asyncio.gather(*(work() for _ in range(at_once)))
    return found
