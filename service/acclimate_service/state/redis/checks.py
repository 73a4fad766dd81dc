"""What a Redis must be before client state is entrusted to it; of a cluster, what each of its masters must be."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from acclimate_service.state.errors import StoreUnavailable, StoreUnfit
from acclimate_service.state.limits import Limits
from acclimate_service.state.redis.link import Target
from acclimate_service.state.redis.wire import Wire

_OLDEST: Final = (6, 2)
_KEEPS_ALL: Final = "noeviction"


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
    )


def _of(master: Target, problem: str) -> str:
    return problem if master is None else f"of master {master}, {problem}"


def _parse(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode().splitlines())
    return {name: value for name, separator, value in lines if separator}
