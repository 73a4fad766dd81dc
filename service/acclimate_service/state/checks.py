"""What a Redis must be before client state is entrusted to it."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from acclimate_service.state.errors import StoreUnavailable, StoreUnfit
from acclimate_service.state.limits import Limits
from acclimate_service.state.wire import Wire

_OLDEST: Final = (6, 2)


class Durability(StrEnum):
    """What survives a crash of the host: everything acknowledged, all but about 2 s, or nothing that is promised."""

    ALWAYS = "always"
    EVERYSEC = "everysec"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a Redis says about itself."""

    version: tuple[int, ...]
    role: str
    aof_enabled: bool
    aof_healthy: bool
    maxmemory_policy: str
    replicas: int
    cluster: bool
    durability: Durability


async def inspect(wire: Wire) -> StoreFacts:
    """Ask a Redis what it is. Works where CONFIG is forbidden: the durability is then `unknown`.

    Raises:
        StoreUnavailable: no reply.
    """
    info = _parse(await wire.read("INFO"))
    aof_enabled = info.get("aof_enabled") == "1"
    return StoreFacts(
        version=tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", ""))),
        role=info.get("role", ""),
        aof_enabled=aof_enabled,
        aof_healthy=info.get("aof_last_write_status", "ok") == "ok",
        maxmemory_policy=info.get("maxmemory_policy", ""),
        replicas=int(info.get("connected_slaves", "0")),
        cluster=info.get("cluster_enabled") == "1",
        durability=await _durability(wire) if aof_enabled else Durability.NONE,
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
            facts.maxmemory_policy == "noeviction",
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
    facts = await inspect(wire)
    found = problems(facts)
    if found and not override:
        raise StoreUnfit(found)
    return facts


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


async def _durability(wire: Wire) -> Durability:
    try:
        found = await wire.read("CONFIG", "GET", "appendfsync")
    except StoreUnavailable:  # hosted Redis often forbids CONFIG
        return Durability.UNKNOWN
    policy = found[1].decode() if found else "unknown"
    return Durability.NONE if policy == "no" else Durability(policy)


def _parse(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode().splitlines())
    return {name: value for name, separator, value in lines if separator}
