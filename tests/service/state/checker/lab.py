"""Runs histories by the hundred on one Redis, several at a time, each on a client of its own."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha1
from itertools import pairwise

from checker.history import LIMITS, History
from checker.profile import Profile
from checker.verdict import judge
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster

from acclimate_service.state import ClientScope, Link, Point, connect
from acclimate_service.state.redis import scripts
from acclimate_service.state.redis.cluster import Cluster

ALL = {each.name: each for each in vars(scripts).values() if isinstance(each, scripts.Script)}
AGE = """
local spared = {}
for _, key in ipairs(KEYS) do spared[key] = true end
for _, key in ipairs(redis.call('KEYS', ARGV[2])) do
  local left = redis.call('PTTL', key) - tonumber(ARGV[1])
  if not spared[key] then
    if left > 0 then redis.call('PEXPIRE', key, left) else redis.call('DEL', key) end
  end
end
"""
"""Names are looked up in the script: a key that is written meanwhile grows as old as the others, or not at all."""
PATIENCE = 900.0  # seconds for one history; far more than any needs


@dataclass
class Report:
    """What a run did, and what was wrong: by seed."""

    histories: int = 0
    operations: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    violations: dict[int, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        injected = ", ".join(f"{count} {name}" for name, count in sorted(self.injected.items()))
        return f"{self.histories} histories, {self.operations} operations, {len(self.violations)} violated; {injected}"


class Lab:
    """One Redis, or one cluster. Histories do not come to their end before `calm` is set, as it is unless somebody
    troubles Redis.

    Args:
        pool: the link that all replicas share.
        admin: a plain client of the same Redis.
    """

    def __init__(self, pool: Link, admin: Redis | RedisCluster) -> None:
        self.pool = pool
        self.admin = admin
        self._serial = itertools.count()
        self.acknowledged = 0
        self.calm = asyncio.Event()
        self.calm.set()

    def serial(self) -> int:
        return next(self._serial)

    async def load_scripts(self, profile: Profile) -> None:
        for text in (*(script.text for script in ALL.values()), *_mutants(profile).values()):
            await self.admin.script_load(text)

    def mutated(self, profile: Profile) -> Mapping[str, str]:
        return {ALL[name].sha: sha1(text.encode()).hexdigest() for name, text in _mutants(profile).items()}

    async def run(
        self, seeds: Iterable[int], profile: Profile | None = None, *, at_once: int = 24, until_violated: bool = False
    ) -> Report:
        """Run the histories of these seeds, and judge them.

        Args:
            seeds: which.
            profile: what they are like.
            at_once: how many run at a time.
            until_violated: stop at the first that is wrong.
        """
        profile = profile or Profile()
        await self.load_scripts(profile)
        report, queue = Report(), iter(seeds)
        with patched(profile):
            await asyncio.gather(*(self._worker(queue, profile, report, until_violated) for _ in range(at_once)))
        return report

    async def _worker(self, queue: Iterator[int], profile: Profile, report: Report, until_violated: bool) -> None:
        for seed in queue:
            if until_violated and report.violations:
                return
            history, problems = await self.run_one(seed, profile)
            report.histories += 1
            report.operations += len(history.ops) + len(history.deletions)
            report.injected += history.faults.injected
            if problems:
                report.violations[seed] = problems

    async def run_one(self, seed: int, profile: Profile) -> tuple[History, list[str]]:
        history = History(seed, profile, self)
        try:
            async with asyncio.timeout(PATIENCE):
                ending = await history.run()
        except Exception as error:  # an end that cannot be read is as wrong as one that reads wrong
            return history, [f"the history did not end: {error!r}"]
        return history, judge(history, ending)

    async def inspect(self, history: History) -> tuple[str, list[str]]:
        """The present life of the client, empty if it was deleted, and what is wrong with its keys (I7, I8, I9)."""
        client, admin = history.client, self.admin
        keys = await self._keys(client)
        lives = {key: await admin.pttl(key) for key in keys}
        problems = [f"{key} never expires" for key, life in lives.items() if life == -1]
        registry = {name.decode(): value.decode() for name, value in (await admin.hgetall(client.registry)).items()}
        lasting = {key for key, life in lives.items() if life > LIMITS["upload_ttl_ms"]}
        known = {client.snapshot(name[2:], sid) for name, sid in registry.items() if name.startswith("m:")}
        known |= {client.snapshot(value[:16], name[2:]) for name, value in registry.items() if name.startswith("u:")}
        problems += [f"a DELETE would not find {key}" for key in keys if ":s:" in key and key not in known]
        if not registry or "gone" in registry:
            allowed = {client.registry, client.markers, client.marker_times}
            problems += [f"{key} outlived its client" for key in lasting - allowed]
            return "", problems
        for model in (name[2:] for name in registry if name.startswith("m:")):
            problems += await self._inspect_scope(history, model, lasting, lives)
        return registry["life"], problems

    async def _inspect_scope(
        self, history: History, model: str, lasting: set[str], lives: Mapping[str, int]
    ) -> list[str]:
        client, problems = history.client, list[str]()
        fields = await self.admin.hgetall(client.head(model))
        head = {name.decode(): value.decode("latin-1") for name, value in fields.items()}
        if not head:
            return [f"the head of {model} is gone"]
        seq, base = int(head["seq"]), int(head["base"])
        journal = await self.admin.hgetall(client.journal(model))
        expected = {f"{version}{suffix}".encode() for version in range(base + 1, seq + 1) for suffix in ("", "m")}
        if base > seq or set(journal) != expected:
            problems.append(f"base {base}, version {seq}, but the journal has {sorted(journal)}")
        sizes = [len(entry) for name, entry in journal.items() if not name.endswith(b"m")]
        if (int(head["jn"]), int(head["jb"])) != (len(sizes), sum(sizes)):
            problems.append(f"the head counts {head['jn']} entries, {head['jb']} bytes; there are {sizes}")
        if len(sizes) > history.replicas[0].limits.journal_entries:
            problems.append(f"the journal has {len(sizes)} entries")
        snapshots = {key for key in lasting if f":{model}:s:" in key}
        live = {client.snapshot(model, head["snap"])} if head["snap"] else set()
        if snapshots != live:
            problems.append(f"snapshots {snapshots}, of which {live} is live")
        noted = [Point.decode(each).version for each in await self.admin.lrange(client.timeline(model), 0, -1)]
        if any(later <= earlier for earlier, later in pairwise([0, *noted, seq + 1])):
            problems.append(f"version {seq}, but the timeline has {noted}")
        parts = [key for key in (client.registry, client.journal(model), *live) if key in lives]
        if any(lives[key] <= lives[client.head(model)] for key in parts):
            problems.append("a part dies before its head")
        return problems

    async def age(self, client: ClientScope, ms: float, *, everything: bool = False) -> None:
        """Let time pass for all keys of a client, or all but those that remember requests."""
        requests = (client.markers, client.marker_times, client.answers, client.answer_times)
        spared = (client.registry[:-1],) if everything else requests  # one at least, for a cluster to know the node
        await self.admin.eval(AGE, len(spared), *spared, int(ms), _pattern(client))

    async def left(self, client: ClientScope, allowed: set[str]) -> list[str]:
        """What there is of a client in the key space that should not be."""
        return [f"{key} is left" for key in await self._keys(client) if key.rpartition(":")[2] not in allowed]

    async def _keys(self, client: ClientScope) -> list[str]:
        return [key.decode() async for key in self.admin.scan_iter(match=_pattern(client), count=5000)]

    async def aclose(self) -> None:
        await self.pool.aclose()
        await self.admin.aclose()


@asynccontextmanager
async def open_lab(url: str) -> AsyncIterator[Lab]:
    link = await connect(url, max_connections=256, connect_timeout=10, reply_timeout=30)
    if isinstance(link, Cluster):
        admin = RedisCluster.from_url(url)
    else:
        admin = Redis.from_pool(BlockingConnectionPool.from_url(url, max_connections=32, timeout=30))
    lab = Lab(link, admin)
    try:
        yield lab
    finally:
        await lab.aclose()


def _pattern(client: ClientScope) -> str:
    return client.registry[:-1].replace("[", "\\[") + "*"


def _mutants(profile: Profile) -> dict[str, str]:
    texts: dict[str, str] = {}
    for edit in profile.edits:
        text = texts.get(edit.script, ALL[edit.script].text)
        assert edit.old in text, f"{edit.script}.lua has no {edit.old!r}"
        texts[edit.script] = text.replace(edit.old, edit.new)
    return texts


@contextmanager
def patched(profile: Profile) -> Iterator[None]:
    saved = [replace(patch, value=vars(patch.owner)[patch.name]) for patch in profile.patches]
    try:
        for patch in profile.patches:
            setattr(patch.owner, patch.name, patch.value)
        yield
    finally:
        for patch in saved:
            setattr(patch.owner, patch.name, patch.value)
