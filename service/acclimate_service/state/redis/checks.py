"""What a Redis must be before client state is entrusted to it; of a cluster, what each of its masters must be."""

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from acclimate_service.state.errors import StateError, StoreUnavailable, StoreUnfit
from acclimate_service.state.limits import Limits
from acclimate_service.state.redis.link import Target
from acclimate_service.state.redis.scripts import PROBE
from acclimate_service.state.redis.wire import Wire
from acclimate_service.state.tasks import Tasks, Watch

_OLDEST: Final = (6, 2)
_KEEPS_ALL: Final = "noeviction"
PROBE_S: Final = 1.0
"""Longest wait of a probe for Redis; orchestrators give probes little more."""
EVERY_S: Final = 0.1
"""For how long a change that was taken speaks for the next (s)."""
_PROBE_TTL_MS: Final = 60_000
_MOST_KEYS: Final = 1000
"""Names tried to find one that each master serves."""


class Durability(StrEnum):
    """What survives a crash of the host: everything acknowledged, all but about 2 s, or nothing that is promised."""

    ALWAYS = "always"
    EVERYSEC = "everysec"
    NONE = "none"
    UNKNOWN = "unknown"


_WORST_FIRST: Final = (Durability.NONE, Durability.UNKNOWN, Durability.EVERYSEC, Durability.ALWAYS)


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a Redis says about itself; of a cluster, the worst that any of its masters says.

    Args:
        version: as numbers.
        role: `master`, or what it is instead.
        aof_enabled: it has an append-only file.
        aof_healthy: the last write to it succeeded.
        maxmemory_policy: what it does when it is full.
        replicas: servers that follow it.
        cluster: it belongs to a cluster.
        durability: what survives a crash of its host.
        masters: servers that hold state.
        used_bytes, max_bytes: memory that all masters use, and that they may use; 0 for any.
    """

    version: tuple[int, ...]
    role: str
    aof_enabled: bool
    aof_healthy: bool
    maxmemory_policy: str
    replicas: int
    cluster: bool
    durability: Durability
    masters: int = 1
    used_bytes: int = 0
    max_bytes: int = 0


async def inspect(wire: Wire) -> StoreFacts:
    """Ask a Redis what it is. Works where CONFIG is forbidden: the durability is then `unknown`.

    Raises:
        StoreUnavailable: no reply.
    """
    return _worst([await _inspect(wire, master) for master in wire.masters])


async def _inspect(wire: Wire, master: Target) -> StoreFacts:
    info = _parse(await wire.read("INFO", at=master))
    aof_enabled = info.get("aof_enabled") == "1"
    return StoreFacts(
        version=tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", ""))),
        role=info.get("role", ""),
        aof_enabled=aof_enabled,
        aof_healthy=info.get("aof_last_write_status", "ok") == "ok",
        maxmemory_policy=info.get("maxmemory_policy", ""),
        replicas=int(info.get("connected_slaves", "0")),
        cluster=info.get("cluster_enabled") == "1",
        durability=await _durability(wire, master) if aof_enabled else Durability.NONE,
        used_bytes=int(info.get("used_memory", "0")),
        max_bytes=int(info.get("maxmemory", "0")),
    )


def problems(facts: StoreFacts) -> tuple[str, ...]:
    """Every reason why this Redis could lose state that was acknowledged."""
    version = ".".join(map(str, facts.version))
    verdicts = (
        (facts.version >= _OLDEST, f"its version is {version or 'unknown'}; accepted is 6.2 or later"),
        (facts.role == "master", f"its role is {facts.role!r}; accepted is a master"),
        (facts.aof_enabled, "it has no append-only file; set `appendonly yes`"),
        (facts.aof_healthy, "its last write to the append-only file failed; look at its log and disk"),
        (
            facts.maxmemory_policy == _KEEPS_ALL,
            f"its maxmemory-policy is {facts.maxmemory_policy!r}, which evicts state; set it to noeviction",
        ),
    )
    return tuple(problem for fine, problem in verdicts if not fine)


async def check(wire: Wire, *, override: bool = False) -> StoreFacts:
    """Inspect a Redis and refuse it if it could lose acknowledged state.

    Args:
        wire: exchanges with the Redis in question.
        override: accept it all the same.

    Raises:
        StoreUnfit: what has to be changed.
        StoreUnavailable: no reply.
    """
    masters = wire.masters
    facts = [await _inspect(wire, master) for master in masters]
    found = [_of(master, problem) for master, its in zip(masters, facts, strict=True) for problem in problems(its)]
    if found and not override:
        raise StoreUnfit(found)
    return _worst(facts)


def check_windows(limits: Limits, *, longest_request_ms: int, retry_window_ms: int) -> None:
    """Refuse lifetimes within which a request or its retry could outlive what protects it.

    Args:
        limits: the lifetimes in question.
        longest_request_ms: longest deadline a request may have (ms).
        retry_window_ms: longest time within which anybody retries a request (ms).

    Raises:
        ValueError: a state TTL of at most four longest requests, or a `key_min_ms` within the retry window.
    """
    if limits.state_ttl_ms <= 4 * longest_request_ms:
        raise ValueError(f"state_ttl_ms is {limits.state_ttl_ms}; accepted is more than {4 * longest_request_ms}")
    if limits.key_min_ms <= retry_window_ms:
        raise ValueError(f"key_min_ms is {limits.key_min_ms}; accepted is more than {retry_window_ms}")


class Probe:
    """Whether Redis takes changes at this moment, and what it is now.

    A change is tried, for there is no end of reasons why one fails: a full memory, a master that became a replica, too
    few replicas, a disk that takes nothing. At most one is tried at a time, and none within `EVERY_S` of one that was
    taken: who asks then is told the same.

    Args:
        wire: exchanges with Redis.
        facts: what it was found to be at the start.
        watch: told how work went that nobody waits for.
        tenant: under whose name the tried change is written.
        override: accept it all the same if it could lose state.
    """

    def __init__(self, wire: Wire, facts: StoreFacts, watch: Watch, *, tenant: str, override: bool = False) -> None:
        self._wire = wire
        self._tenant = tenant
        self._override = override
        self._known = True
        self._tasks = Tasks(watch)
        self._looking: asyncio.Task[str | None] | None = None
        self._fine_at = -math.inf
        self.facts = facts

    def reconnected(self) -> None:
        """Another server may listen there now, or the same one with other settings: it is asked what it is."""
        self._known, self._fine_at = False, -math.inf
        self._tasks.start("redis", self._fitness())

    async def obstacle(self) -> str | None:
        """Why Redis takes no changes, or should be given none; None if it takes them."""
        clock = asyncio.get_running_loop().time
        if clock() - self._fine_at < EVERY_S:
            return None
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.begin(self._look())
        return await asyncio.shield(self._looking)

    async def aclose(self) -> None:
        """Ask no more."""
        await self._tasks.aclose()

    async def _look(self) -> str | None:
        tried = await asyncio.gather(*map(self._try, self._keys()))
        if None not in tried:
            reason = tried[0] if tried else "no master of the Redis cluster serves any slot"
            self._known = False
        else:  # the clients of other masters are served
            reason = await self._fitness()
        if reason is None:
            self._fine_at = asyncio.get_running_loop().time()
        return reason

    async def _try(self, key: str) -> str | None:
        """Why a change is refused; None if it is not."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._wire.run(PROBE, (key,), (_PROBE_TTL_MS,))
        except StateError as error:
            return str(error)
        except TimeoutError:
            return f"Redis does not answer within {PROBE_S:g} s"
        return None

    async def _fitness(self) -> str | None:
        """What is wrong with a Redis that takes changes."""
        if not self._known:
            try:
                async with asyncio.timeout(PROBE_S):
                    self.facts = await inspect(self._wire)
            except (StateError, TimeoutError) as error:
                return f"Redis did not say what it is: {error}"
        found = () if self._override else problems(self.facts)
        self._known = not found
        return str(StoreUnfit(found)) if found else None

    def _keys(self) -> list[str]:
        """A key of each master."""
        masters, keys = self._wire.masters, dict[Target, str]()
        for number in range(_MOST_KEYS):
            key = f"acc:{{{self._tenant}/~probe-{number}}}"
            server = self._wire.server_of(key)
            if server in masters:
                keys.setdefault(server, key)
            if len(keys) == len(masters):
                break
        return list(keys.values())


async def _durability(wire: Wire, master: Target) -> Durability:
    try:
        found = await wire.read("CONFIG", "GET", "appendfsync", at=master)
    except StoreUnavailable:  # hosted Redis often forbids CONFIG
        return Durability.UNKNOWN
    policy = found[1].decode() if found else "unknown"
    return Durability.NONE if policy == "no" else Durability(policy)


def _worst(facts: Sequence[StoreFacts]) -> StoreFacts:
    return StoreFacts(
        version=min(each.version for each in facts),
        role=max((each.role for each in facts), key=lambda role: role != "master"),
        aof_enabled=all(each.aof_enabled for each in facts),
        aof_healthy=all(each.aof_healthy for each in facts),
        maxmemory_policy=max((each.maxmemory_policy for each in facts), key=lambda policy: policy != _KEEPS_ALL),
        replicas=min(each.replicas for each in facts),
        cluster=any(each.cluster for each in facts),
        durability=min((each.durability for each in facts), key=_WORST_FIRST.index),
        masters=len(facts),
        used_bytes=sum(each.used_bytes for each in facts),
        max_bytes=sum(each.max_bytes for each in facts),
    )


def _of(master: Target, problem: str) -> str:
    return problem if master is None else f"of master {master}, {problem}"


def _parse(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode().splitlines())
    return {name: value for name, separator, value in lines if separator}
